"""Requests that wait together are scored in one batch."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field

from torchrl_llm_kl.service._errors import ServiceClosedError, ServiceOverloaded
from torchrl_llm_kl.service._wire import Reply, Request

__all__ = ["BatchRecord", "Batcher"]

Answers = list[Reply | Exception]
_LOG = logging.getLogger("torchrl_llm_kl.service")
_ABOUT = 10.0  # seconds for which a caller is waited for


@dataclass(eq=False)
class _Waiting:
    request: Request
    answer: asyncio.Future[Reply]
    arrived: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class BatchRecord:
    """One batch, for statistics: requests, tokens, seconds in the model, and how long each request took in all."""

    requests: int
    tokens: int
    seconds: float
    latencies: tuple[float, ...]


class Batcher:
    """Collects requests on an event loop and scores them in one other thread.

    A batch starts with the oldest request, waits a few milliseconds for the other callers that are about, and takes one request
    of each caller in turn, the oldest first, up to a number of tokens. A request larger than that goes alone.

    Args:
        score: answers a batch; called in the thread.

    Keyword Args:
        max_tokens: of a batch.
        max_wait: seconds that the oldest request waits for company; not if all callers of the last ten seconds are there.
        max_queue: requests that may wait; more wait outside, until their time is up.
        on_batch: told of each batch.
    """

    def __init__(
        self,
        score: Callable[[Sequence[Request]], Answers],
        *,
        max_tokens: int = 65536,
        max_wait: float = 0.003,
        max_queue: int = 256,
        on_batch: Callable[[BatchRecord], None] = lambda record: None,
    ) -> None:
        for name, value in (("max_tokens", max_tokens), ("max_queue", max_queue)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not max_wait >= 0:
            raise ValueError(f"max_wait must be a number of seconds, got {max_wait}")
        self._score, self._on_batch = score, on_batch
        self.max_tokens, self.max_wait, self.max_queue = max_tokens, max_wait, max_queue
        self._waiting: deque[_Waiting] = deque()
        self._outside: deque[asyncio.Future[None]] = deque()  # who waits for a place in the queue
        self._changed = asyncio.Event()
        self._callers: dict[str, float] = {}
        self._thread: Executor = ThreadPoolExecutor(1, thread_name_prefix="scoring")
        self._loop: asyncio.Task[None] | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def expect(self, caller: str) -> None:
        """Somebody is about to ask, or has asked: for a while, batches wait for more of it."""
        self._callers[caller] = time.monotonic()

    async def submit(self, request: Request, *, timeout: float) -> Reply:
        """Wait for a place in the queue, and for the answer.

        Raises:
            ServiceOverloaded: if there was no place within ``timeout`` seconds.
            ServiceClosedError: if the service is closed meanwhile.
            Exception: whatever scoring this request raised.
        """
        if self._loop is None:
            self._loop = asyncio.get_running_loop().create_task(self._run())
        self.expect(request.caller)
        deadline = time.monotonic() + timeout
        while len(self._waiting) >= self.max_queue and not self._closed:
            await self._place(deadline, timeout)
        if self._closed:
            raise ServiceClosedError("the service is closed")
        waiting = _Waiting(request, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._changed.set()
        return await waiting.answer

    async def _place(self, deadline: float, timeout: float) -> None:
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._outside.append(place)
        try:
            await asyncio.wait_for(place, max(deadline - time.monotonic(), 0))
        except BaseException as error:
            if place in self._outside:
                self._outside.remove(place)
            self._let_in()  # the place may have been given to somebody who has just gone
            if isinstance(error, asyncio.TimeoutError):
                raise ServiceOverloaded(
                    f"{len(self._waiting)} requests are waiting, as many as max_queue allows, and none was taken within "
                    f"{timeout:g} s: add replicas, ask for less at a time, or wait longer (timeout=)"
                ) from None
            raise

    def _let_in(self) -> None:
        """Tell as many as there is room for, those first who came first."""
        room = len(self._outside) if self._closed else self.max_queue - len(self._waiting)
        while room > 0 and self._outside:
            place = self._outside.popleft()
            if not place.done():
                place.set_result(None)
                room -= 1

    async def in_thread(self, call: Callable[[], object]) -> object:
        """Run something where the model runs, between two batches."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    async def close(self) -> None:
        """Refuse what waits, and what comes."""
        self._closed = True
        for waiting in self._waiting:
            if not waiting.answer.done():
                waiting.answer.set_exception(ServiceClosedError("the service was closed before this was scored"))
        self._waiting.clear()
        self._let_in()
        self._changed.set()
        if self._loop is not None:
            await self._loop
        self._thread.shutdown(wait=False)

    # ------------------------------------------------------------------ the loop

    async def _run(self) -> None:
        while not self._closed:
            self._changed.clear()
            if not self._waiting:
                await self._changed.wait()
                continue
            await self._company()
            batch = self._take()
            self._let_in()
            if batch:
                await self._answer(batch)

    async def _company(self) -> None:
        """Until all callers are there, the oldest request has waited long enough, or there is enough to do."""
        while self._waiting and not self._closed and not self._complete():
            left = self._waiting[0].arrived + self.max_wait - time.monotonic()
            if left <= 0:
                return
            self._changed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left)

    def _complete(self) -> bool:
        if sum(w.request.num_tokens for w in self._waiting) >= self.max_tokens:
            return True
        since = time.monotonic() - _ABOUT
        self._callers = {caller: seen for caller, seen in self._callers.items() if seen > since}
        return self._callers.keys() <= {w.request.caller for w in self._waiting}

    def _take(self) -> list[_Waiting]:
        alive = [w for w in self._waiting if not w.answer.done()]  # a caller may have gone
        turns: dict[str, itertools.count[int]] = {}
        order = sorted(
            ((next(turns.setdefault(w.request.caller, itertools.count())), w.arrived, i) for i, w in enumerate(alive)),
        )
        batch: list[_Waiting] = []
        tokens = 0
        for _, _, i in order:
            size = alive[i].request.num_tokens
            if batch and tokens + size > self.max_tokens:
                break
            batch.append(alive[i])
            tokens += size
        chosen = set(map(id, batch))
        self._waiting = deque(w for w in alive if id(w) not in chosen)
        return batch

    async def _answer(self, batch: list[_Waiting]) -> None:
        start = time.monotonic()
        requests = [w.request for w in batch]
        try:
            answers = await asyncio.get_running_loop().run_in_executor(self._thread, self._score, requests)
        except Exception as error:  # the scorer itself: nobody's request is to blame, and nobody may wait for ever
            answers = [error] * len(batch)
        end = time.monotonic()
        for waiting, answer in zip(batch, answers, strict=True):
            if waiting.answer.done():
                continue
            if isinstance(answer, Exception):
                waiting.answer.set_exception(answer)
            else:
                waiting.answer.set_result(answer)
        latencies = tuple(end - w.arrived for w in batch)
        record = BatchRecord(len(batch), sum(r.num_tokens for r in requests), end - start, latencies)
        try:
            self._on_batch(record)
        except Exception:  # who counts must not keep others from their answers
            _LOG.exception("a batch could not be counted")
