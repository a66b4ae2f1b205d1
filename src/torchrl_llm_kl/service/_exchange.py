"""Requests go out to all replicas at once, and come back complete."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchrl_llm_kl.service._replicas import Patience, Replicas, failures
from torchrl_llm_kl.service._wire import Packed, Reply

__all__ = ["Part", "exchange"]


@dataclass(frozen=True, eq=False)
class Part:
    """One request, and where its answer belongs.

    Args:
        order: replicas, the one in charge first.
        elements: positions in the flat tokens that it scores; int64 ``[K]``.
        packed: the request.
    """

    order: tuple[int, ...]
    elements: Tensor
    packed: Packed


def exchange(replicas: Replicas, parts: Sequence[Part], *, timeout: float) -> list[Reply]:
    """Replies to all parts, in their order. A replica that dies is asked again, or another one in its place.

    Raises:
        ServiceTimeout: if that is not done in time.
        Exception: what a replica says is wrong with a request.
    """
    patience = Patience(timeout, f"scoring on {replicas.spec.name!r}")
    replies: dict[int, Reply] = {}
    while len(replies) < len(parts):
        error: Exception | None = None
        sent: list[tuple[int, int, Any]] = []
        for i, part in enumerate(parts):
            if i not in replies:
                replica = replicas.choose(part.order)
                try:
                    handle = replicas.handle(replica, timeout=patience.left)
                    sent.append((i, replica, handle.score.remote(part.packed, patience.left)))
                except failures() as down:
                    replicas.lose(replica, down)
                    error = down
        try:
            for i, replica, answer in sent:
                found = _receive(answer, patience)
                if isinstance(found, Reply):
                    replies[i] = found
                else:
                    replicas.lose(replica, found)
                    error = found
        except BaseException:  # nobody waits for the rest: what is still in a queue need not be scored
            _give_up([answer for i, _, answer in sent if i not in replies])
            raise
        if error is not None:
            patience.rest(error)
    return [replies[i] for i in range(len(parts))]


def _receive(answer: Any, patience: Patience) -> Reply | Exception:
    """The reply, or the failure of the replica."""
    import ray

    try:
        found = ray.get(answer, timeout=patience.left)
    except ray.exceptions.GetTimeoutError:
        raise patience.up() from None
    except failures() as down:
        return down
    if isinstance(found, Exception):
        raise found
    return Reply.unpack(found)


def _give_up(answers: Sequence[Any]) -> None:
    import ray

    with contextlib.suppress(Exception):
        for answer in answers:
            ray.cancel(answer)
