"""The request queue of a replica: requests that wait together are scored in one batch."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field

from torchrl_llm_kl._numerics import check_range
from torchrl_llm_kl.service._errors import ServiceClosedError, ServiceOverloaded
from torchrl_llm_kl.service._stats import BatchRecord
from torchrl_llm_kl.service._wire import Reply, Request

_LOG = logging.getLogger("torchrl_llm_kl.service")
#: Batches wait for a caller until this many seconds after its last request.
CALLER_TTL = 10.0


@dataclass(eq=False)
class _Waiting:
    request: Request
    answer: asyncio.Future[Reply]
    arrived: float = field(default_factory=time.monotonic)


class Batcher:
    """Collects requests on an event loop and scores them in one thread.

    A batch starts with the oldest request, waits up to ``max_wait`` seconds for a request of every caller of the last ten
    seconds, then takes requests round-robin over the callers, oldest first, up to ``max_tokens``. A larger request gets a
    separate batch. Requests beyond ``max_queue`` wait outside the queue until their timeout.
    """

    def __init__(
        self,
        score: Callable[[Sequence[Request]], list[Reply | Exception]],
        *,
        max_tokens: int = 65536,
        max_wait: float = 0.003,
        max_queue: int = 256,
        on_batch: Callable[[BatchRecord], None] = lambda record: None,
    ) -> None:
        check_range(1, max_tokens=max_tokens, max_queue=max_queue)
        check_range(0, max_wait=max_wait)
        self._score, self._on_batch = score, on_batch
        self.max_tokens, self.max_wait, self.max_queue = max_tokens, max_wait, max_queue
        self._waiting: deque[_Waiting] = deque()
        self._outside: deque[asyncio.Future[None]] = deque()  # callers that wait for room in the queue
        self._changed = asyncio.Event()
        self._callers: dict[str, float] = {}
        self._thread: Executor = ThreadPoolExecutor(1, thread_name_prefix="scoring")
        self._loop: asyncio.Task[None] | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def tokens(self) -> int:
        """Tokens of the waiting requests."""
        return sum(waiting.request.num_tokens for waiting in self._waiting)

    def expect(self, caller: str) -> None:
        """Let batches wait for a request of this caller for the next ten seconds."""
        self._callers[caller] = time.monotonic()

    async def submit(self, request: Request, *, timeout: float) -> Reply:
        """Wait up to ``timeout`` seconds for room in the queue, then for the answer; raises the error of the request."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop().create_task(self._run())
        self.expect(request.caller)
        deadline = time.monotonic() + timeout
        while len(self._waiting) >= self.max_queue and not self._closed:
            await self._wait_for_room(deadline, timeout)
        if self._closed:
            raise ServiceClosedError("the service is closed.")
        waiting = _Waiting(request, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._changed.set()
        return await waiting.answer

    async def _wait_for_room(self, deadline: float, timeout: float) -> None:
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._outside.append(place)
        try:
            await asyncio.wait_for(place, max(deadline - time.monotonic(), 0))
        except BaseException as error:
            if place in self._outside:
                self._outside.remove(place)
            self._admit()  # this caller may have been admitted just now: pass its place on
            if isinstance(error, asyncio.TimeoutError):
                raise ServiceOverloaded(
                    f"{len(self._waiting)} requests are waiting, as many as max_queue allows, and none was accepted within "
                    f"{timeout:g} s: add replicas, send smaller requests, or raise timeout=."
                ) from None
            raise

    def _admit(self) -> None:
        """Admit waiting callers to the queue, first come first served; all of them after a close."""
        room = len(self._outside) if self._closed else self.max_queue - len(self._waiting)
        while room > 0 and self._outside:
            place = self._outside.popleft()
            if not place.done():
                place.set_result(None)
                room -= 1

    async def in_thread(self, call: Callable[[], object]) -> object:
        """Run ``call`` in the scoring thread, between two batches."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    async def close(self) -> None:
        """Reject waiting and later requests."""
        self._closed = True
        for waiting in self._waiting:
            if not waiting.answer.done():
                error = ServiceClosedError("the service was closed before it scored this request.")
                waiting.answer.set_exception(error)
        self._waiting.clear()
        self._admit()
        self._changed.set()
        if self._loop is not None:
            await self._loop
        self._thread.shutdown(wait=False)

    async def _run(self) -> None:
        while not self._closed:
            self._changed.clear()
            if not self._waiting:
                await self._changed.wait()
                continue
            await self._wait_for_callers()
            batch = self._take()
            self._admit()
            if batch:
                await self._answer(batch)

    async def _wait_for_callers(self) -> None:
        """Wait until all recent callers have a request, the batch is full, or the oldest has waited ``max_wait``."""
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
        since = time.monotonic() - CALLER_TTL
        self._callers = {caller: seen for caller, seen in self._callers.items() if seen > since}
        return self._callers.keys() <= {w.request.caller for w in self._waiting}

    def _take(self) -> list[_Waiting]:
        """Take the next batch out of the queue: the first request of each caller, then the second ones, ..."""
        alive = [w for w in self._waiting if not w.answer.done()]  # callers may have given up
        rounds: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        keys = {w: (next(rounds[w.request.caller]), w.arrived) for w in alive}
        batch: list[_Waiting] = []
        tokens = 0
        for waiting in sorted(alive, key=keys.__getitem__):
            tokens += waiting.request.num_tokens
            if batch and tokens > self.max_tokens:
                break
            batch.append(waiting)
        taken = set(batch)
        self._waiting = deque(w for w in alive if w not in taken)
        return batch

    async def _answer(self, batch: list[_Waiting]) -> None:
        start = time.monotonic()
        requests = [w.request for w in batch]
        answers: Sequence[Reply | Exception]
        try:
            answers = await asyncio.get_running_loop().run_in_executor(self._thread, self._score, requests)
        except Exception as error:  # the scorer itself failed: report it to every caller
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
        try:
            self._on_batch(BatchRecord(len(batch), sum(r.num_tokens for r in requests), end - start, latencies))
        except Exception:  # a metrics error must not block replies
            _LOG.exception("a batch could not be counted.")
