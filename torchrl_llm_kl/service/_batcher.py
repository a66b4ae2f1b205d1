"""The request queue of a replica: requests that wait together are scored in one batch."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from torchrl_llm_kl.service._errors import ServiceError
from torchrl_llm_kl.service._messages import Job, Reply

#: Batches wait for a caller until this many seconds after its last request.
CALLER_TTL = 10.0
T = TypeVar("T")


class _Waiting:
    """A request in the queue. Its future ends with the answer, or is cancelled by a client that gave up."""

    def __init__(self, job: Job, *, alone: bool) -> None:
        self.job, self.alone, self.arrived = job, alone, time.monotonic()
        self.answer: asyncio.Future[Reply | Exception] = asyncio.get_running_loop().create_future()


class Batcher:
    """Collects requests on an event loop and scores them in one thread, in the order of their arrival.

    A batch waits up to ``max_wait`` seconds for a request of every caller of the last ten seconds, so that callers that
    answer in step share one forward. A single caller never waits.

    Args:
        score: scores a batch in the thread; one reply or error for each request.

    Keyword Args:
        max_tokens: per batch. A larger request is a batch of its own.
        max_wait: seconds.

    Attributes:
        last_answer: time of the last batch with an answer that is no error.
        answered: number of requests in all batches.
    """

    def __init__(
        self, score: Callable[[Sequence[Job]], list[Reply | Exception]], *, max_tokens: int, max_wait: float
    ) -> None:
        self._score, self.max_tokens, self.max_wait = score, max_tokens, max_wait
        self._waiting: list[_Waiting] = []
        self._changed = asyncio.Event()
        self._callers: dict[str, float] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scoring")
        self._loop: asyncio.Task[None] | None = None
        self.last_answer, self.answered = time.monotonic(), 0

    def __len__(self) -> int:
        return len(self._waiting)

    async def submit(self, job: Job, *, alone: bool = False) -> Reply:
        """Wait for the answer; raises the error of the request. ``alone`` is a request that shares no batch."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop().create_task(self._run())
        waiting = _Waiting(job, alone=alone)
        self._callers[job.caller] = waiting.arrived
        self._waiting.append(waiting)
        self._changed.set()
        answer = await waiting.answer
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def in_thread(self, call: Callable[[], T]) -> T:
        """Run ``call`` in the scoring thread, between two batches."""
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
        """Wait until all recent callers have a request, the batch is full, or the oldest has waited ``max_wait``."""
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
        """The next batch, without requests whose client gave up."""
        self._waiting = [waiting for waiting in self._waiting if not waiting.answer.done()]
        batch = self._waiting[:1]
        if batch and not batch[0].alone:
            tokens = np.cumsum([waiting.job.num_tokens for waiting in self._waiting])
            few = self._waiting[: max(int((tokens <= self.max_tokens).sum()), 1)]
            batch = [waiting for waiting in few if not waiting.alone]
        self._waiting = [waiting for waiting in self._waiting if waiting not in batch]
        return batch

    async def _answer(self, batch: Sequence[_Waiting]) -> None:
        jobs = [waiting.job for waiting in batch]
        answers: Sequence[Reply | Exception]
        try:
            answers = await self.in_thread(lambda: self._score(jobs))
        except Exception as error:  # the scorer itself failed: the queue goes on, and every caller hears of it
            answers = [error] * len(batch)
        except (SystemExit, KeyboardInterrupt) as error:  # of the model's code: it must not end this loop
            answers = [ServiceError(f"the model raised {type(error).__name__}: {error}.")] * len(batch)
        if not all(isinstance(answer, Exception) for answer in answers):  # a broken model shall be probed
            self.last_answer = time.monotonic()
        self.answered += len(batch)
        for waiting, answer in zip(batch, answers, strict=True):
            if not waiting.answer.done():
                waiting.answer.set_result(answer)  # errors too: a future takes no StopIteration as its exception
