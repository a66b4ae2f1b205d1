"""Requests go out to all replicas at once, and come back complete."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from torchrl_llm_kl.service._errors import WeightVersionError
from torchrl_llm_kl.service._replicas import Patience, Replicas, failures
from torchrl_llm_kl.service._wire import Packed, Reply, Request

__all__ = ["Part", "exchange"]


@dataclass(frozen=True, eq=False)
class Part:
    """One request, and where its answer belongs.

    Args:
        order: replicas, the one in charge first.
        elements: positions in the flat tokens that it scores; int64 ``[K]``.
        request: what is asked.
    """

    order: tuple[int, ...]
    elements: Tensor
    request: Request

    def packed(self, version: int | None) -> Packed:
        """What is sent, with a version of the weights if the request names none."""
        return self.request.pack() if version is None else replace(self.request, version=version).pack()


def exchange(replicas: Replicas, parts: Sequence[Part], *, timeout: float) -> list[Reply]:
    """Replies to all parts, in their order and from the same weights.

    A replica that dies is asked again, or another one in its place. While new weights go round, replicas that do not have them
    yet are asked again.

    Raises:
        ServiceTimeout: if that is not done in time.
        Exception: what a replica says is wrong with a request.
    """
    patience = Patience(timeout, f"scoring on {replicas.spec.name!r}")
    replies: dict[int, Reply] = {}
    version: int | None = None
    while True:
        missing = {i: part for i, part in enumerate(parts) if i not in replies}
        try:
            error = _ask(replicas, missing, version, replies, patience)
        except WeightVersionError:
            if version is None:
                raise
            error, version = None, None  # they have gone on meanwhile: all from the start
            replies.clear()
        if error is not None:
            patience.rest(error)
        if len(replies) == len(parts):
            newest = max((reply.version for reply in replies.values()), default=0)
            stale = [i for i, reply in replies.items() if reply.version < newest]
            if not stale:
                return [replies[i] for i in range(len(parts))]
            version = newest
            for i in stale:
                del replies[i]


def _ask(
    replicas: Replicas, parts: Mapping[int, Part], version: int | None, replies: dict[int, Reply], patience: Patience
) -> Exception | None:
    """Ask for all of these at once and write what comes back; the failure of a replica, if one failed."""
    error: Exception | None = None
    sent: list[tuple[int, int, Any]] = []
    for i, part in parts.items():
        replica = replicas.choose(part.order)
        try:
            handle = replicas.handle(replica, timeout=patience.left)
            sent.append((i, replica, handle.score.remote(part.packed(version), patience.left)))
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
    return error


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
