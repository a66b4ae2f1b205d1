"""A replica's answers: batches of requests to an engine, replies from it. Independent of Ray."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from torchrl_llm_kl.scoring import ScoreRequest, check_offers
from torchrl_llm_kl.service._errors import EngineLost, ServiceTimeout, WeightVersionError
from torchrl_llm_kl.service._messages import Job, Reply, check_columns, columns_of
from torchrl_llm_kl.service.engines._engine import Engine

T = TypeVar("T")


class ScoringCore:
    """Answers requests with one engine, those with equal settings in one call. For one thread.

    Attributes:
        version: of the engine's weights; 0 before the first update.
        running: number of the call that runs; None between calls.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.version = engine, 0
        self.running: int | None = None
        self._calls = itertools.count()
        self._fingerprint = ""  # of the weights, once it is read

    def score(self, jobs: Sequence[Job]) -> list[Reply | Exception]:
        """One reply per request, in order; an exception for a request that failed."""
        answers: dict[int, Reply | Exception] = {}
        groups: dict[tuple[object, ...], list[int]] = {}
        for i, job in enumerate(jobs):
            if job.version not in (None, self.version):
                answers[i] = WeightVersionError(
                    f"version {job.version} of the weights was requested, this replica holds {self.version}: push it with "
                    "update_weights(), or request no version."
                )
            else:
                groups.setdefault((job.options, job.request.form), []).append(i)
        for members in groups.values():
            some = [jobs[i] for i in members]
            alike = self.call(partial(self._score_alike, some))
            answers.update(zip(members, alike, strict=True))
        return [answers[i] for i in range(len(jobs))]

    def _score_alike(self, jobs: Sequence[Job]) -> list[Reply | Exception]:
        try:
            return [*self._score_together(jobs)]
        except EngineLost:
            raise
        except ServiceTimeout as error:  # the engine's server does not answer: do not wait again for each request
            return [error] * len(jobs)
        except Exception as error:
            if len(jobs) == 1:
                return [error]
        # At least one request is bad. Each is scored by itself, so that only the bad ones fail.
        return [answer for job in jobs for answer in self._score_alike([job])]

    def _score_together(self, jobs: Sequence[Job]) -> list[Reply]:
        options, requests = jobs[0].options, [job.request for job in jobs]
        whole = requests[0] if len(requests) == 1 else ScoreRequest.concat(requests)
        check_offers(self.engine, options, whole)
        columns = columns_of(self.engine.run(whole, options), whole.mask)
        check_columns(columns, whole, options)
        counts = [int(request.mask.sum()) for request in requests]
        parts = zip(*(values.split(counts) for values in columns.values()), strict=True)
        return [
            Reply(columns={n: x.numpy() for n, x in zip(columns, part, strict=True)}, version=self.version)
            for part in parts
        ]

    def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Pass ``weights``, a result of the engine's ``check_weights``, to the engine under a new version."""
        self._fingerprint = ""
        self.call(lambda: self.engine.update_weights(weights, checked=True))
        self.version = version

    def call(self, work: Callable[[], T]) -> T:
        """Work of the engine that a :class:`Watchdog` sees."""
        self.running = next(self._calls)
        try:
            return work()
        finally:
            self.running = None

    def read_fingerprint(self) -> tuple[int, str]:
        """Version and fingerprint of the weights, which are read once after each update.

        Raises a TypeError for an engine that reports none.
        """
        if not self._fingerprint:
            read: Callable[[], object] | None = getattr(self.engine, "fingerprint", None)
            if read is None:
                raise TypeError(
                    f"{type(self.engine).__name__} reports no fingerprint of its weights: state it, RememberedModel(model, "
                    "store, fingerprint=), as a text that changes with them."
                )
            self._fingerprint = str(read())
        return self.version, self._fingerprint


class Watchdog:
    """Tells whether a call of a core has made no progress for ``hang_after`` seconds.

    A long call does not hang while the engine's ``progress()`` grows, nor does a core that waits.

    Args:
        core: its calls are watched.
        hang_after: seconds.
    """

    def __init__(self, core: ScoringCore, hang_after: float) -> None:
        self._core, self.hang_after = core, hang_after
        self._state: tuple[int, int] | None = None
        self._since = 0.0

    def hangs(self, now: float | None = None) -> bool:
        """Whether the call hangs, at a time in seconds; to be asked a few times within ``hang_after``."""
        now = time.monotonic() if now is None else now
        running = self._core.running
        state = None if running is None else (running, self._core.engine.progress())
        if state != self._state:
            self._state, self._since = state, now
        return state is not None and now - self._since >= self.hang_after


def probe() -> ScoreRequest:
    """Two tokens that every model has, to see whether a model answers at all."""
    return ScoreRequest.of(torch.tensor([[0, 1]]), attention_mask=torch.ones(1, 2, dtype=torch.long))
