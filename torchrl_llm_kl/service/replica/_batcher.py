"""The request queue of a replica: requests that wait together are scored in one batch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial

from torchrl_llm_kl._numerics import check_range
from torchrl_llm_kl.service._errors import ServiceClosedError, ServiceError, ServiceTimeout
from torchrl_llm_kl.service._wire import Reply, Request
from torchrl_llm_kl.service.replica._fair import FairQueue, Job
from torchrl_llm_kl.service.replica._pieces import Pieces
from torchrl_llm_kl.service.replica._stats import BatchRecord

_LOG = logging.getLogger("torchrl_llm_kl.service")
#: Batches wait for a caller until this many seconds after its last request.
CALLER_TTL = 10.0
#: Parts of ``max_tokens``: a caller's turn, so that up to 64 callers have one in each batch; and the largest unit of a cut
#: request, large enough that most answers to one prompt are in one unit.
_TURN, _UNIT = 64, 16
#: Tokens from which requests are cut and joined in another thread: it takes 10 ms per million tokens.
_LARGE = 2**18


#: Called with False before a request is scored of which other processes may have died, with True once it was scored, and
#: with None if it is dropped.
Trial = Callable[[bool | None], Awaitable[None]]


class _Waiting(Job):
    """A request in the queue."""

    def __init__(self, pieces: Pieces, arrived: float, timeout: float, trial: Trial | None) -> None:
        self.request, self.pieces, self.trial = pieces.request, pieces, trial
        super().__init__(self.request.caller, pieces.sizes, alone=trial is not None)
        self.answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # done once it has all replies
        self.arrived, self.timeout = arrived, timeout
        self.replies: list[tuple[list[int], Reply]] = []  # of some units each

    def take(self, units: list[int], answer: Reply | Exception) -> bool:
        """Store the answer to some units; whether units must be scored again, since weights changed in between."""
        if self.answer.done():
            return False
        if isinstance(answer, Exception):
            self.answer.set_exception(self._in_whole(units, answer))
            return False
        self.replies.append((units, answer))
        if sum(len(done) for done, _ in self.replies) < len(self.sizes):
            return False
        newest = max(reply.version for _, reply in self.replies)
        for done, reply in self.replies:
            if reply.version < newest:
                self.todo.extend(done)
        self.replies = [(done, reply) for done, reply in self.replies if reply.version == newest]
        if self.todo:
            return True
        self.answer.set_result(None)
        return False

    def _in_whole(self, units: list[int], error: Exception) -> Exception:
        """The error of a part, with the numbers that its sequences have in the request."""
        rows = self.pieces.rows(units)

        def number(found: re.Match[str]) -> str:
            row = int(found[1])
            return f"sequence {rows[row]}" if row < len(rows) else found[0]

        return ValueError(re.sub(r"\bsequence (\d+)", number, str(error))) if type(error) is ValueError else error


class Batcher:
    """Collects requests on an event loop and scores them in one thread.

    A batch waits up to ``max_wait`` seconds for a request of every caller of the last ten seconds, then takes tokens fairly
    over the callers, up to ``max_tokens``: see :class:`~torchrl_llm_kl.service.replica._fair.FairQueue`. Requests larger than a
    sixteenth of that are cut between sequences, so that others' requests get into each batch, and answered when all their
    pieces are scored. A request on trial, of which other processes may have died, shares no batch.

    A request is dropped when its timeout is over or its caller gave up, before the next batch.

    Args:
        score: scores a batch in the thread; one reply or error for each request.

    Keyword Args:
        max_tokens: per batch.
        max_wait: seconds.
        on_batch: called after each batch.
    """

    def __init__(
        self,
        score: Callable[[Sequence[Request]], list[Reply | Exception]],
        *,
        max_tokens: int = 65536,
        max_wait: float = 0.003,
        on_batch: Callable[[BatchRecord], None] = lambda record: None,
    ) -> None:
        check_range(1, max_tokens=max_tokens)
        check_range(0, max_wait=max_wait)
        self._score, self._on_batch = score, on_batch
        self.max_tokens, self.max_wait = max_tokens, max_wait
        self._waiting: FairQueue[_Waiting] = FairQueue(max(max_tokens // _TURN, 1))
        self._changed = asyncio.Event()
        self._callers: dict[str, float] = {}
        # Requests with pieces that are scored again, since weights changed in between.
        self._again: set[_Waiting] = set()
        self._thread: Executor = ThreadPoolExecutor(1, thread_name_prefix="scoring")
        self._loop: asyncio.Task[None] | None = None
        self._closed: Exception | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def tokens(self) -> int:
        """Tokens in the queue."""
        return self._waiting.tokens

    def expect(self, caller: str) -> None:
        """Let batches wait for a request of this caller for the next ten seconds."""
        self._callers[caller] = time.monotonic()

    async def submit(self, request: Request, *, timeout: float, trial: Trial | None = None) -> Reply:
        """Wait for the answer; raises the error of the request.

        Args:
            request: to score.

        Keyword Args:
            timeout: seconds; a request that was not scored by then is a :class:`ServiceTimeout` at the next batch.
            trial: see :data:`Trial`; None for a request that shares batches with others.
        """
        if self._loop is None:
            self._loop = asyncio.get_running_loop().create_task(self._run())
        self.expect(request.caller)
        arrived, unit = time.monotonic(), max(self.max_tokens // _UNIT, 1)
        large = request.num_tokens > _LARGE
        pieces = await asyncio.to_thread(Pieces, request, unit) if large else Pieces(request, unit)
        waiting = _Waiting(pieces, arrived, timeout, trial)
        if self._closed is not None:
            raise self._closed
        self._waiting.add(waiting)
        self._changed.set()
        await waiting.answer
        return await asyncio.to_thread(pieces.join, waiting.replies) if large else pieces.join(waiting.replies)

    async def in_thread(self, call: Callable[[], object]) -> object:
        """Run ``call``, which may change the weights, in the scoring thread between two batches.

        It waits for requests whose pieces are scored again since an earlier call changed the weights: without that, updates
        that come faster than a large request is scored would restart it for ever. Only requests that were in the queue
        during a change can be among them, so the wait ends when these are answered, or not in time.
        """
        while self._again:
            await asyncio.sleep(0.01)
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def reject_soon(self, error: Exception) -> None:
        """:meth:`reject` from any thread, without waiting."""
        if self._loop is None:
            self._closed = error
        else:
            self._loop.get_loop().call_soon_threadsafe(self.reject, error)

    async def close(self) -> None:
        """Reject waiting and later requests, after the batch that runs."""
        self.reject(ServiceClosedError("the service is closed."))
        if self._loop is not None:
            await self._loop
        self._thread.shutdown(wait=False)

    def reject(self, error: Exception) -> None:
        """Answer waiting and later requests with an error. A batch that runs is left alone."""
        self._closed = error
        self._fail(error)
        self._changed.set()

    def _fail(self, error: Exception) -> None:
        for waiting in self._waiting.remove(lambda waiting: True):
            if not waiting.answer.done():
                waiting.answer.set_exception(error)

    async def _run(self) -> None:
        while self._closed is None:
            self._changed.clear()
            if not len(self._waiting):
                await self._changed.wait()
                continue
            await self._wait_for_callers()
            await self._drop()
            batch = self._waiting.take(self.max_tokens)
            try:
                if batch:
                    await self._answer(batch)
            except Exception as error:  # the queue must go on, whatever happened
                if not isinstance(error, ServiceError):
                    _LOG.exception("a batch failed.")
                self._waiting.remove(batch.__contains__)
                for waiting in batch:
                    if not waiting.answer.done():
                        waiting.answer.set_exception(error)
        self._fail(self._closed)

    async def _wait_for_callers(self) -> None:
        """Wait until all recent callers have a request, the batch is full, or the oldest has waited ``max_wait``."""
        while len(self._waiting) and self._closed is None and not self._complete():
            left = min(waiting.arrived for waiting in self._waiting) + self.max_wait - time.monotonic()
            if left <= 0:
                return
            self._changed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left)

    def _complete(self) -> bool:
        if self._waiting.tokens >= self.max_tokens:
            return True
        since = time.monotonic() - CALLER_TTL
        self._callers = {caller: seen for caller, seen in self._callers.items() if seen > since}
        return self._callers.keys() <= self._waiting.callers

    async def _drop(self) -> None:
        """Drop requests that no caller waits for any more."""
        now = time.monotonic()
        for waiting in self._waiting.remove(lambda w: w.answer.done() or now > w.arrived + w.timeout):
            if not waiting.answer.done():
                waiting.answer.set_exception(
                    ServiceTimeout(
                        f"a request was not scored within {waiting.timeout:g} s, {len(self)} others of {self.tokens} tokens "
                        "wait: raise timeout=, or add replicas."
                    )
                )
            if waiting.trial is not None:
                await waiting.trial(None)

    async def _answer(self, batch: dict[_Waiting, list[int]]) -> None:
        first = next(iter(batch))
        if first.trial is not None:
            await first.trial(False)
        start = time.monotonic()
        answers: Sequence[Reply | Exception]
        try:
            answers = await asyncio.get_running_loop().run_in_executor(self._thread, self._score_parts, batch)
        except Exception as error:  # the scorer itself failed: report it to every caller
            answers = [error] * len(batch)
        except (SystemExit, KeyboardInterrupt) as error:  # of the model's code: it must not end this loop
            answers = [ServiceError(f"the model raised {type(error).__name__}: {error}.")] * len(batch)
        end = time.monotonic()
        latencies, tokens = [], 0
        for (waiting, units), answer in zip(batch.items(), answers, strict=True):
            tokens += sum(waiting.sizes[unit] for unit in units)
            if waiting.take(units, answer):
                self._again.add(waiting)
                waiting.answer.add_done_callback(partial(self._scored_again, waiting))
                self._waiting.add(waiting)
            elif waiting.answer.done():
                latencies.append(end - waiting.arrived)
        if first.trial is not None and first.answer.done():
            await first.trial(True)
            first.trial = None  # its other pieces are dropped if one failed
        try:
            self._on_batch(BatchRecord(len(batch), tokens, end - start, tuple(latencies)))
        except Exception:  # a metrics error must not block replies
            _LOG.exception("a batch could not be counted.")

    def _scored_again(self, waiting: _Waiting, _: object) -> None:
        self._again.discard(waiting)

    def _score_parts(self, batch: dict[_Waiting, list[int]]) -> list[Reply | Exception]:
        return self._score([waiting.pieces.part(units) for waiting, units in batch.items()])
