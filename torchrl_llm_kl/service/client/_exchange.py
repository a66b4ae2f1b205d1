"""The requests of one call, out to the replicas, and their replies."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_llm_kl.scoring import Scores
from torchrl_llm_kl.service._errors import ReplicaGone, ServiceBusy, ServiceError, ServiceTimeout
from torchrl_llm_kl.service._wire import MAX_TIMEOUT, Reply, Request
from torchrl_llm_kl.service.client._connection import Connection, Patience, failures
from torchrl_llm_kl.service.client._router import Router

_MOST_TOKENS = 2**21  # of a request, about: 8 MiB
_LOOK = 2.0  # seconds without an answer after which a client asks the controller about the replica


@dataclass(frozen=True, eq=False)
class Part:
    """One request of a call, and the place of its answer."""

    request: Request
    where: Tensor | None = None  # positions of its tokens in the call, int64 [n]; None for all
    replica: int | None = None  # that scores it; None before one was chosen

    @property
    def elements(self) -> Tensor:
        """Positions of the scored tokens in the flat tokens of the call; int64 ``[K]``."""
        scored = self.request.scored.mask.nonzero().squeeze(-1)
        return scored if self.where is None else self.where[scored]

    def divided(self, router: Router, replicas: Sequence[int]) -> list[Part]:
        """One part for each of ``replicas`` that gets some of the sequences; more only beyond ``_MOST_TOKENS``."""
        request, scored = self.request, self.request.scored
        if len(replicas) == 1 and int(scored.sizes().sum()) <= _MOST_TOKENS:
            return [replace(self, replica=replicas[0])]
        tokens, lengths = scored.tokens.values.numpy(), scored.tokens.lengths.numpy()
        starts = lengths.cumsum() - lengths
        places = np.append(np.flatnonzero(scored.mask.numpy()), len(tokens))
        first = np.minimum(places[places.searchsorted(starts)] - starts, lengths)
        chosen = router.assign(tokens, lengths, first, replicas, continues=request.options.remember)
        sizes, parts = scored.sizes().numpy(), []
        for replica in np.unique(chosen).tolist():
            own = np.where(chosen == replica, sizes, 0)
            pieces = (own.cumsum() - own) // _MOST_TOKENS
            for piece in np.unique(pieces[chosen == replica]):
                rows = (chosen == replica) & (pieces == piece)
                if rows.all():
                    return [replace(self, replica=replica)]
                inside = scored.elements(torch.from_numpy(np.flatnonzero(rows)))
                where = inside if self.where is None else self.where[inside]
                parts.append(Part(request.select(np.flatnonzero(rows)), where, replica))
        return parts or [replace(self, replica=replicas[0])]


class Exchange:
    """Sends a call to the replicas, one request to each; calling it waits for the scores.

    If a replica dies or does not answer, its sequences are divided among the others. A request whose replica died while it
    held it may be the cause: from then on it shares no batch, and the controller counts its trials. During a weight update,
    requests are repeated to replicas that do not hold the new weights yet. The timeout starts when the scores are awaited.

    Attributes:
        parts: the requests so far; one of a replica that died may be replaced by several.
    """

    def __init__(self, connection: Connection, router: Router, whole: Part, *, timeout: float) -> None:
        self.parts = [whole]
        self._connection, self._router, self._timeout = connection, router, timeout
        self._layout = whole.request.scored.layout
        self._replies: dict[int, Reply] = {}
        self._error: Exception | None = None
        self._sent: dict[Any, int] = {}  # reference to an answer -> part
        self._withdrawn = False
        self._start_clock()
        self._send()

    def _start_clock(self) -> None:
        self._patience = Patience(self._timeout, f"scoring on {self._connection.spec.name!r}")

    def __call__(self) -> Scores:
        """Wait for the scores, all from the same weights; raises the error of a request."""
        replies = self.replies()
        for part, reply in zip(self.parts, replies, strict=True):
            reply.check_answers(part.request)
        columns = {name: torch.cat([reply.columns[name] for reply in replies]) for name in replies[0].columns}
        elements = torch.cat([part.elements for part in self.parts])
        return replace(replies[0], columns=columns).scores(self._layout, elements)

    def replies(self) -> list[Reply]:
        """In the order of the parts."""
        self._start_clock()
        while True:
            self._collect()
            if self._withdrawn:
                raise ServiceError("the call was cancelled.")
            if self._error is not None:
                self._patience.rest(self._error)
            if len(self._replies) == len(self.parts) and not self._drop_stale():
                return [self._replies[i] for i in range(len(self.parts))]
            if self._patience.left <= 0.001:
                raise self._patience.up()
            self._send()

    def _send(self) -> None:
        """Request all missing replies at once."""
        self._error, self._sent = None, {}
        usable, handles = self._connection.usable(), self._connection.handles
        for i in [i for i, part in enumerate(self.parts) if i not in self._replies and part.replica not in usable]:
            self.parts[i], *others = self.parts[i].divided(self._router, usable)
            self.parts += others
        for i, part in enumerate(self.parts):
            if i in self._replies or part.replica is None:
                continue
            # Slightly less than the remaining time: the replica must report a full queue before the client times out.
            left = self._patience.left
            left = min(max(left - 0.5, 0.8 * left), MAX_TIMEOUT)
            timeout = float(f"{left:.3g}")  # equal calls have equal bytes
            request = replace(part.request, newest=self._connection.newest, timeout=timeout)
            self._sent[handles[part.replica].score.remote(request.pack())] = i

    def _collect(self) -> None:
        """Wait for the answers; store replies and the last failure of a replica, and raise the error of a request."""
        try:
            for answer, i in self._sent.items():
                self._take(i, answer)
        except BaseException:  # the call fails: no caller waits for the requests that are still queued
            self.cancel()
            raise

    def _take(self, i: int, answer: Any) -> None:
        import ray

        part = self.parts[i]
        assert part.replica is not None
        while True:
            try:
                found = ray.get(answer, timeout=min(_LOOK, self._patience.left))
            except ray.exceptions.GetTimeoutError:  # noqa: PERF203
                if self._patience.left <= 0.001:
                    raise self._patience.up() from None
                if self._connection.is_away(part.replica):
                    found = ReplicaGone("its process or node does not answer, or it starts.")
                    ray.cancel(answer)  # its next process need not score it as well
                    break
            except ray.exceptions.TaskCancelledError:
                return
            except failures() as down:
                found = down
                if isinstance(down, ray.exceptions.RayActorError):
                    self.parts[i] = replace(part, request=replace(part.request, suspect=True))
                break
            else:
                break
        if not isinstance(found, Exception):
            self._replies[i] = Reply.unpack(found)
        elif isinstance(found, failures()):
            self._connection.lose(part.replica)
            self._error = found
        elif isinstance(found, (ServiceBusy, ServiceTimeout)):
            self._error = found  # dropped there, while this caller's timeout began again
        else:
            raise found

    def cancel(self) -> None:
        """Withdraw the requests that have no reply: no replica scores those that wait there, and a call of this object ends."""
        self._withdrawn = True
        with contextlib.suppress(Exception):
            import ray

            for answer, i in self._sent.items():
                if i not in self._replies:
                    ray.cancel(answer)

    def _drop_stale(self) -> bool:
        """Whether some replies came from older weights than others; drops the older ones."""
        newest = max((reply.version for reply in self._replies.values()), default=0)
        self._connection.saw(newest)
        stale = [i for i, reply in self._replies.items() if reply.version < newest]
        for i in stale:
            del self._replies[i]
        return bool(stale)
