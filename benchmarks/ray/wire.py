"""Bytes that a call sends and receives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

#: Takes something to do and what it is done with; does it.
Around = Callable[[Callable[[], Any], Any], Any]


@dataclass
class Wire:
    """Bytes of pickled arguments to actors and of pickled replies."""

    sent: int = 0
    received: int = 0


@contextmanager
def watched(remote: Around, get: Around) -> Iterator[None]:
    """Wrap this process's calls to actors and its waits for replies."""
    import ray
    from ray import actor

    method: Any = actor.ActorMethod
    plain_remote, plain_get = method.remote, ray.get

    def watched_remote(self: Any, *args: Any, **kwargs: Any) -> Any:
        return remote(lambda: plain_remote(self, *args, **kwargs), (args, kwargs))

    def watched_get(*args: Any, **kwargs: Any) -> Any:
        return get(lambda: plain_get(*args, **kwargs), None)

    method.remote, ray.get = watched_remote, watched_get
    try:
        yield
    finally:
        method.remote, ray.get = plain_remote, plain_get


@contextmanager
def counted() -> Iterator[Wire]:
    """Count the bytes that this process exchanges with actors; pickles each object once more, as Ray does."""
    from ray import cloudpickle

    wire = Wire()

    def remote(call: Callable[[], Any], given: Any) -> Any:
        wire.sent += len(cloudpickle.dumps(given))
        return call()

    def get(call: Callable[[], Any], _: Any) -> Any:
        answer = call()
        wire.received += len(cloudpickle.dumps(answer))
        return answer

    with watched(remote, get):
        yield wire


def bytes_of(call: Callable[[], object], *, repeats: int = 3) -> Wire:
    """Bytes of one call: the minimum of a few, because other messages may add to one."""
    found = []
    for _ in range(repeats):
        with counted() as wire:
            call()
        found.append(wire)
    return min(found, key=lambda wire: wire.sent + wire.received)
