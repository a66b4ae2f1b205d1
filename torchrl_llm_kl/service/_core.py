"""The work of a replica, independent of Ray: a queue of requests, batches for an engine, and replies."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor

from torchrl_llm_kl.scoring import ScoreOptions, ScoreRequest, check_offers
from torchrl_llm_kl.service._errors import EngineLost, ServiceError, ServiceTimeout, WeightVersionError
from torchrl_llm_kl.service._messages import Job, Reply, columns_of
from torchrl_llm_kl.service.engines._engine import Engine

#: Batches wait for a caller until this many seconds after its last request.
CALLER_TTL = 10.0
T = TypeVar("T")


def _raise(error: EngineLost) -> NoReturn:
    raise error


class ScoringCore:
    """Answers requests with one engine. Requests with equal settings share a call. For use in one thread.

    Args:
        engine: scores the requests.
        lost: called with the error of an engine that cannot go on. By default it raises the error.

    Attributes:
        version: of the engine's weights, 0 before the first update.
    """

    def __init__(self, engine: Engine, lost: Callable[[EngineLost], NoReturn] = _raise) -> None:
        self.engine, self.version, self._lost = engine, 0, lost
        self._fingerprint = ""  # of the weights; empty until it is read

    def score(self, jobs: Sequence[Job]) -> list[Reply | Exception]:
        """Returns one reply per request, in order, or an exception for a request that failed."""
        answers: dict[int, Reply | Exception] = {}
        groups: dict[tuple[object, ...], list[int]] = {}
        for i, job in enumerate(jobs):
            if job.version not in (None, self.version):
                answers[i] = WeightVersionError(
                    f"version {job.version} of the weights was requested, but this replica holds {self.version}. Request the "
                    "latest version, or none."
                )
            else:
                groups.setdefault((job.options, job.request.form), []).append(i)
        for members in groups.values():
            alike = self.call(partial(self._score_alike, [jobs[i] for i in members]))
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
        counts = [int(request.mask.sum()) for request in requests]
        parts = zip(*(values.split(counts) for values in columns.values()), strict=True)
        return [
            Reply(columns={n: x.numpy() for n, x in zip(columns, part, strict=True)}, version=self.version)
            for part in parts
        ]

    def probe(self) -> None:
        """Scores two tokens that every model has. An error means that the model is broken."""
        request = ScoreRequest.of(torch.tensor([[0, 1]]), attention_mask=torch.ones(1, 2, dtype=torch.long))
        self.call(lambda: self.engine.run(request, ScoreOptions()))

    def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Passes ``weights``, a result of the engine's ``own_weights``, to the engine under a new version."""
        self._fingerprint = ""
        self.call(lambda: self.engine.update_weights(weights, checked=True))
        self.engine.record(version)
        self.version = version

    def call(self, work: Callable[[], T]) -> T:
        """Runs a call of the engine. All calls that may lose it go through here."""
        try:
            return work()
        except EngineLost as error:
            self._lost(error)

    def read_fingerprint(self) -> tuple[int, str]:
        """Returns version and fingerprint of the weights. Reads the weights once after each update."""
        if not self._fingerprint:
            self._fingerprint = self.engine.fingerprint()
        return self.version, self._fingerprint


class _Waiting:
    """A request in the queue. Its future receives the answer. A client that gives up cancels it."""

    def __init__(self, job: Job, *, by_itself: bool) -> None:
        self.job, self.by_itself, self.arrived = job, by_itself, time.monotonic()
        self.answer: asyncio.Future[Reply | Exception] = asyncio.get_running_loop().create_future()


class Batcher:
    """Collects requests on an event loop and scores them in one thread, in the order of their arrival.

    A batch waits up to ``max_wait`` seconds for a request of every caller of the last ten seconds, so that callers that
    answer in step share one forward. A single caller never waits.

    Args:
        score: scores a batch in the thread. Returns one reply or error for each request.

    Keyword Args:
        max_tokens: per batch. A larger request is a batch of its own.
        max_wait: seconds.

    Attributes:
        last_answer: time of the last batch with at least one reply that is not an error.
        answered: number of requests in all batches.
    """

    def __init__(
        self, score: Callable[[Sequence[Job]], list[Reply | Exception]], *, max_tokens: int, max_wait: float
    ) -> None:
        # A configuration file may hold texts. A comparison with one would end the loop below, and each call would hang.
        self._score, self.max_tokens, self.max_wait = score, int(max_tokens), float(max_wait)
        self._waiting: list[_Waiting] = []
        self._changed = asyncio.Event()
        self._callers: dict[str, float] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scoring")
        self._loop: asyncio.Task[None] | None = None
        self.last_answer, self.answered = time.monotonic(), 0

    def __len__(self) -> int:
        return len(self._waiting)

    async def submit(self, job: Job, *, by_itself: bool = False) -> Reply:
        """Waits for the answer. Raises the error of the request. A request ``by_itself`` shares no batch."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop().create_task(self._run())
        waiting = _Waiting(job, by_itself=by_itself)
        self._callers[job.caller] = waiting.arrived
        self._waiting.append(waiting)
        self._changed.set()
        answer = await waiting.answer
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def in_thread(self, call: Callable[[], T]) -> T:
        """Runs ``call`` in the scoring thread, between two batches."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            if not self._waiting:
                await self._changed.wait()
                continue
            await self._wait_for_callers()
            batch = self._take()
            if batch:
                await self._answer(batch)

    async def _wait_for_callers(self) -> None:
        """Waits until all recent callers have a request, the batch is full, or the oldest has waited ``max_wait``."""
        end = self._waiting[0].arrived + self.max_wait
        while not self._is_complete() and time.monotonic() < end:
            self._changed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), end - time.monotonic())

    def _is_complete(self) -> bool:
        if sum(waiting.job.num_tokens for waiting in self._waiting) >= self.max_tokens:
            return True
        since = time.monotonic() - CALLER_TTL
        self._callers = {caller: seen for caller, seen in self._callers.items() if seen > since}
        return self._callers.keys() <= {waiting.job.caller for waiting in self._waiting}

    def _take(self) -> list[_Waiting]:
        """Takes the next batch from the queue, without requests whose client gave up."""
        self._waiting = [waiting for waiting in self._waiting if not waiting.answer.done()]
        batch = self._waiting[:1]
        if batch and not batch[0].by_itself:
            tokens = np.cumsum([waiting.job.num_tokens for waiting in self._waiting])
            few = self._waiting[: max(int((tokens <= self.max_tokens).sum()), 1)]
            batch = [waiting for waiting in few if not waiting.by_itself]
        self._waiting = [waiting for waiting in self._waiting if waiting not in batch]
        return batch

    async def _answer(self, batch: Sequence[_Waiting]) -> None:
        jobs = [waiting.job for waiting in batch]
        answers: Sequence[Reply | Exception]
        try:
            answers = await self.in_thread(lambda: self._score(jobs))
        except Exception as error:  # the scorer itself failed: every caller gets the error, and the queue goes on
            answers = [error] * len(batch)
        except (SystemExit, KeyboardInterrupt) as error:  # raised by the model's code: it must not end this loop
            answers = [ServiceError(f"the model raised {type(error).__name__}: {error}.")] * len(batch)
        if not all(isinstance(answer, Exception) for answer in answers):  # a broken model must be probed
            self.last_answer = time.monotonic()
        self.answered += len(batch)
        for waiting, answer in zip(batch, answers, strict=True):
            if not waiting.answer.done():
                # Errors are results too: a future takes no StopIteration as its exception.
                waiting.answer.set_result(answer)
