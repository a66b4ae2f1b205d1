"""Requests go out to all replicas at once, and come back complete."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from torchrl_llm_kl.service._errors import ServiceBusy
from torchrl_llm_kl.service._lifecycle import ReplicaGone
from torchrl_llm_kl.service._replicas import Patience, Replicas, failures
from torchrl_llm_kl.service._wire import Reply, Request

__all__ = ["Exchange", "Part"]


@dataclass(frozen=True, eq=False)
class Part:
    """One request, and where its answer belongs.

    Args:
        order: replicas, the one in charge first.
        request: what is asked.
        mask: of its tokens; ``[n]``.
        where: they are among all tokens of the call; int64 ``[n]``, None for all of them.
    """

    order: tuple[int, ...]
    request: Request
    mask: Tensor
    where: Tensor | None = None

    @property
    def elements(self) -> Tensor:
        """Positions in the flat tokens of the call that are scored; int64 ``[K]``."""
        return self.mask.nonzero().squeeze(-1) if self.where is None else self.where[self.mask]

    def packed(self, newest: int) -> bytes:
        """What is sent, with the latest version of the weights that the caller has seen."""
        return replace(self.request, newest=newest).pack()


class Exchange:
    """Replies to all parts, in their order and from the same weights. The requests are on their way once it is made.

    A replica that dies is asked again, or another one in its place. While new weights go round, replicas that do not have them
    yet are asked again.

    Args:
        replicas: of the service.
        parts: what to ask.
        timeout: seconds, from when the replies are waited for.
    """

    def __init__(self, replicas: Replicas, parts: Sequence[Part], *, timeout: float) -> None:
        self._replicas, self._parts = replicas, parts
        self._timeout = timeout
        self._be_patient()
        self._replies: dict[int, Reply] = {}
        self._error: Exception | None = None
        self._sent: list[tuple[int, int, Any]] = []
        self._send()

    def _be_patient(self) -> None:
        self._patience = Patience(self._timeout, f"scoring on {self._replicas.spec.name!r}")

    def _send(self) -> None:
        """Ask for all that is missing, at once."""
        self._error, self._sent = None, []
        for i, part in enumerate(self._parts):
            if i in self._replies:
                continue
            replica = self._replicas.choose(part.order)
            try:
                handle = self._replicas.handle(replica, timeout=self._patience.left)
                answer = handle.score.remote(part.packed(self._replicas.newest), _margin(self._patience.left))
                self._sent.append((i, replica, answer))
            except failures() as down:
                self._lose(replica, down)

    def _lose(self, replica: int, error: Exception) -> None:
        self._replicas.lose(replica, error)
        self._error = error

    def replies(self) -> list[Reply]:
        """Wait for them.

        Raises:
            ServiceTimeout: if that is not done in time.
            Exception: what a replica says is wrong with a request.
        """
        self._be_patient()
        while True:
            self._collect()
            if self._error is not None:
                self._patience.rest(self._error)
            if len(self._replies) == len(self._parts) and not self._drop_stale():
                return [self._replies[i] for i in range(len(self._parts))]
            self._send()

    def _drop_stale(self) -> bool:
        """Whether some came from older weights than others; they are to be asked for again."""
        newest = max((reply.version for reply in self._replies.values()), default=0)
        self._replicas.newest = max(self._replicas.newest, newest)
        stale = [i for i, reply in self._replies.items() if reply.version < newest]
        for i in stale:
            del self._replies[i]
        return bool(stale)

    def _collect(self) -> None:
        try:
            for i, replica, answer in self._sent:
                found = _receive(answer, self._patience)
                if isinstance(found, Reply):
                    self._replies[i] = found
                elif isinstance(found, ServiceBusy):
                    self._error = found
                else:
                    self._lose(replica, found)
        except BaseException:  # nobody waits for the rest: what is still in a queue need not be scored
            _give_up([answer for i, _, answer in self._sent if i not in self._replies])
            raise


def _margin(left: float) -> float:
    """A little less: so that a full queue is the replica's to tell, before nobody listens any more."""
    return max(left - 0.5, 0.8 * left)


def _receive(answer: Any, patience: Patience) -> Reply | Exception:
    """The reply, or the failure of the replica."""
    import ray

    try:
        found = ray.get(answer, timeout=patience.left)
    except ray.exceptions.GetTimeoutError:
        raise patience.up() from None
    except failures() as down:
        return down
    if isinstance(found, (ServiceBusy, ReplicaGone)):
        return found
    if isinstance(found, Exception):
        raise found
    return Reply.unpack(found)


def _give_up(answers: Sequence[Any]) -> None:
    import ray

    with contextlib.suppress(Exception):
        for answer in answers:
            ray.cancel(answer)
