"""Bytes that a call sends and gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

#: Takes something to do and what it is done with; does it.
Around = Callable[[Callable[[], Any], Any], Any]


@dataclass
class Wire:
    """Pickled arguments of calls to actors, and pickled answers."""

    sent: int = 0
    received: int = 0


@contextmanager
def watched(remote: Around, get: Around) -> Iterator[None]:
    """Put something around this process's calls to actors, and around its waiting for answers."""
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
    """Count what this process exchanges with actors; each thing is pickled once more for that, as Ray pickles it."""
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
    """Of one call: the least of a few, for a sign of life may come in between."""
    found = []
    for _ in range(repeats):
        with counted() as wire:
            call()
        found.append(wire)
    return min(found, key=lambda wire: wire.sent + wire.received)
