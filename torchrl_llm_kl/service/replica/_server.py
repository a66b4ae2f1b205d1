"""The work of a replica: it scores requests in batches, and takes pushed weights between two of them."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, TypeVar

from torchrl_llm_kl._typing import Json
from torchrl_llm_kl.rollouts import ModelInterface
from torchrl_llm_kl.service._actors import actor_of
from torchrl_llm_kl.service._errors import (
    EngineLost,
    PoisonedRequest,
    ReplicaGone,
    ServiceBusy,
    WeightVersionError,
    portable,
)
from torchrl_llm_kl.service._spec import MAX_CONCURRENCY, MAX_TRIALS, ServiceSpec
from torchrl_llm_kl.service._weights import Missing, Pushes
from torchrl_llm_kl.service._wire import Reply, Request
from torchrl_llm_kl.service.engines._engine import engine_of
from torchrl_llm_kl.service.replica._batcher import Batcher, Trial
from torchrl_llm_kl.service.replica._core import ScoringCore
from torchrl_llm_kl.service.replica._stats import BatchRecord, RayMetrics, ReplicaStats

_ANSWER = 5.0  # seconds to wait for the controller
_MAX_REQUESTS = MAX_CONCURRENCY * 4 // 5

_LOG = logging.getLogger("torchrl_llm_kl.service")
_T = TypeVar("_T")


class Server:
    """Scores the requests of any number of clients.

    Args:
        spec: the service.
        replica: number of this replica.
        life: mark of this process.
        made: what the factory returned: a model or an engine.

    Keyword Args:
        starts: how often the replica was started, this time included.
    """

    def __init__(self, spec: ServiceSpec, replica: int, life: str, made: Any, *, starts: int) -> None:
        _keep_freed_memory()
        self._spec, self._replica, self._life, self._starts = spec, replica, life, starts
        self._name = spec.replica_name(replica)
        self._inside = self._clients = 0  # requests in flight, processes that use the service
        self._most = min(spec.settings["max_queue"], _MAX_REQUESTS)
        self._lost: Exception | None = None  # why the model lacks the required weights
        self._hung = False
        self._refused: frozenset[str] = frozenset()  # digests of requests that end the process
        self._core = ScoringCore(engine_of(made, **{key: spec.settings[key] for key in ("tokens_per_batch", "memory")}))
        engine = self._core.engine
        self._fingerprint: str | None = None  # of the factory's model
        try:
            self._fingerprint = self._core.read_fingerprint()
        except Exception as error:  # weights elsewhere, or of an exotic kind: it can be scored all the same
            _LOG.info("the model of %s has no fingerprint: %s", spec.name, error)
        self._stats, self._metrics = ReplicaStats(), RayMetrics(self._name, again=starts > 1)
        self._records: list[BatchRecord] = []  # of the last second: telling Ray of each would delay its answers
        queue = {key: spec.settings[key] for key in ("max_tokens", "max_wait")}
        self._batcher = Batcher(self._answer, on_batch=self._record, **queue)
        self._pushes = Pushes(spec, engine.check_weights, getattr(engine, "tensors", list)())
        self._weights_thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._refreshing = asyncio.Lock()
        if hasattr(engine, "when_lost"):
            engine.when_lost(self._end)
        threading.Thread(target=self._watch_progress, name="watchdog", daemon=True).start()
        self._restore()

    # ------------------------------------------------------------------ scores

    async def score(self, packed: bytes) -> bytes:
        """A packed reply, within the timeout of the request."""
        arrived = time.monotonic()
        self._inside += 1
        try:
            self._check_life()
            if self._inside > self._most:
                raise ServiceBusy(
                    f"{self._most} requests wait at replica {self._name}, as many as max_queue= allows: add replicas, send "
                    "fewer at a time, or raise timeout=."
                )
            request = Request.unpack(packed)
            if self._refused and request.digest() in self._refused:
                raise PoisonedRequest("replicas died of this request before: it is not tried again.")
            await self._catch_up(request, request.timeout)
            left = max(arrived + request.timeout - time.monotonic(), 0.0)
            reply = await self._batcher.submit(request, timeout=left, trial=self._trial(request))
            return reply.pack()
        finally:
            self._inside -= 1

    def _trial(self, request: Request) -> Trial | None:
        """What to do before and after a request is scored of which other processes may have died; None if none did."""
        controller = actor_of(self._spec, "control") if request.suspect else None
        if controller is None:
            return None
        digest = request.digest()

        async def announce(over: bool | None) -> None:
            if over is False:
                call = controller.begin_trial.remote(digest, self._replica, self._life)
            else:
                call = controller.end_trial.remote(digest, "" if over else self._life)
            try:
                may = await asyncio.wait_for(asyncio.wrap_future(call.future()), _ANSWER)
            except Exception as error:
                _LOG.warning("the controller of %s does not answer: this trial does not count (%s)", self._name, error)
                return
            if over is False and not may:
                raise PoisonedRequest(
                    f"{MAX_TRIALS} processes died while they scored a request of {request.num_sequences} sequences and "
                    f"{request.num_tokens} tokens, and nothing else: it is not tried again. Look for the cause in the logs of "
                    f"{self._spec.name!r}, and score its sequences in smaller requests to find the one at fault."
                )

        return announce

    def _answer(self, requests: Sequence[Request]) -> list[Reply | Exception]:
        if self._lost is not None:
            return [self._lost] * len(requests)
        try:
            answers = self._core.score(requests)
        except EngineLost as error:
            self._end(error)
        self._stats.failures += sum(isinstance(answer, Exception) for answer in answers)
        return answers

    def _record(self, record: BatchRecord) -> None:
        self._stats.add(record)
        self._records.append(record)

    # ------------------------------------------------------------------ the end of the process

    def _end(self, error: EngineLost) -> NoReturn:
        """Exit without an engine, so that Ray starts the replica again and clients send their requests again."""
        _LOG.error("replica %s ends: %s", self._name, error)
        logging.shutdown()
        os._exit(1)

    def _check_life(self) -> None:
        if self._hung:
            raise ReplicaGone(f"replica {self._name} hangs and ends.")

    def _watch_progress(self) -> None:
        """End the process if a batch or an update makes no progress: only that ends a thread that hangs."""
        watchdog = Watchdog(self._core, float(self._spec.settings["hang_after"]))
        while not watchdog.hangs(time.monotonic()):
            time.sleep(min(watchdog.hang_after / 8, 5.0))
        self._hung = True
        _LOG.error("replica %s made no progress for %g s and ends; its threads:", self._name, watchdog.hang_after)
        with contextlib.suppress(Exception):  # stderr may be closed
            faulthandler.dump_traceback(all_threads=True)
        self._batcher.reject_soon(ReplicaGone(f"replica {self._name} hangs and ends."))
        time.sleep(0.5)  # let the errors reach their callers; callers of the batch see the actor die
        os._exit(1)

    async def close(self) -> None:
        """Reject waiting and later requests."""
        await self._batcher.close()
        await asyncio.sleep(0.2)  # let the errors reach their callers

    # ------------------------------------------------------------------ weights

    async def stage_weights(self, token: str) -> int:
        """Fetch and check a push, for a later :meth:`refresh_weights`; see :meth:`Pushes.stage`. The version of the model."""
        await self._off_loop(lambda: self._pushes.stage(token))
        return self._core.version

    async def drop_weights(self) -> None:
        """Free a staged push that was given up."""
        await self._off_loop(self._pushes.drop)

    async def _off_loop(self, call: Callable[[], _T]) -> _T:
        """Run ``call`` in the thread of the weights: the keeper may let it wait, and requests go on."""
        self._check_life()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._weights_thread, call)
        except EngineLost as error:
            self._end(error)

    async def refresh_weights(self, version: int | None = None) -> None:
        """Load the last push, unless this replica has ``version`` by then."""
        async with self._refreshing:
            if version is None or version > self._core.version or self._lost is not None:
                await asyncio.shield(self._load())

    async def _load(self) -> None:
        found = await self._off_loop(self._pushes.missing)
        if found is None:
            return
        try:
            await self._batcher.in_thread(lambda: self._copy(found))
        except EngineLost as error:
            self._end(error)
        await self._off_loop(lambda: self._pushes.take(found))
        self._lost = None
        _LOG.info("replica %s holds version %d of the weights", self._name, found.version)

    def _copy(self, found: Missing) -> None:
        self._core.update_weights(found.weights, found.version, checked=True)

    def _restore(self) -> None:
        """Load the last push before the first request."""
        try:
            found = self._pushes.missing()
            if found is not None:
                self._copy(found)
                self._pushes.take(found)
                _LOG.info("replica %s took version %d of the weights again", self._name, found.version)
        except EngineLost as error:
            self._end(error)
        except Exception as error:  # better an error than scores from wrong weights
            self._lost = portable(error)
            _LOG.warning("replica %s answers no request: %s", self._name, error)

    async def _catch_up(self, request: Request, timeout: float) -> None:
        """Load the weights that a request needs from the keeper, or wait for their push."""
        wanted, failed = request.version or 0, None
        end = time.monotonic() + timeout
        if max(wanted, request.newest) > self._core.version or self._lost is not None:
            try:
                await asyncio.wait_for(self.refresh_weights(max(wanted, request.newest)), timeout)
            except asyncio.TimeoutError:
                failed = "they were not there in time"
            except Exception as error:
                failed = str(error)
        if self._lost is not None:  # each request of the batch reports it
            return
        if request.newest > self._core.version:
            raise WeightVersionError(
                f"version {request.newest} of the weights was seen before, replica {self._name} holds {self._core.version} and "
                f"finds no newer one: {failed or 'it is lost, push it again.'}"
            )
        while wanted > self._core.version:
            if time.monotonic() > end:
                raise WeightVersionError(
                    f"version {wanted} of the weights was requested, replica {self._name} holds {self._core.version} and got "
                    f"no newer one within {timeout:.3g} s: push it with update_weights(), or request no version."
                )
            await asyncio.sleep(0.01)

    async def fingerprint(self) -> tuple[int, str]:
        """See :attr:`ScoringCore.fingerprint`. Reads all weights once after each update."""
        self._check_life()
        if self._lost is not None:
            raise self._lost
        while (found := self._core.fingerprint) is None:
            await self._batcher.in_thread(self._core.read_fingerprint)
        return found

    # ------------------------------------------------------------------ state

    def hear(self, news: Mapping[str, Any]) -> Json:
        """Take the controller's news; what it must know: the weights that were loaded, and whether pushes replaced them."""
        self._clients = int(news.get("clients", self._clients))
        self._refused = frozenset(news.get("refused", self._refused))
        self._metrics.update(self._records, waiting=len(self._batcher), recalled=self._core.engine.cached_tokens()[1])
        self._records = []
        return {"fingerprint": self._fingerprint, "replaced": self._pushes.whole}

    async def interface(self) -> tuple[ModelInterface, bool]:
        """Keys and tokenizer of the model, for clients that tokenise; and whether it is a TorchRL wrapper."""
        return self._core.engine.interface()

    async def stats(self) -> Json:
        """Counters, queue length, version of the weights, clients."""
        seen, recalled = self._core.engine.cached_tokens()
        return {
            "name": self._name,
            "pid": os.getpid(),
            "restarts": self._starts - 1,
            "queue": len(self._batcher),
            "queue_tokens": self._batcher.tokens,
            "version": self._core.version,
            "clients": self._clients,
            "tokens_recalled": recalled,
            "cache_hit_rate": recalled / seen if seen else 0.0,
            **self._stats.snapshot(),
        }


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

    def hangs(self, now: float) -> bool:
        """Whether the call hangs; to be asked a few times within ``hang_after``, with the time of one clock in seconds."""
        running = self._core.running
        state = None if running is None else (running, self._progress())
        if state != self._state:
            self._state, self._since = state, now
        return state is not None and now - self._since >= self.hang_after

    def _progress(self) -> int:
        try:
            return self._core.engine.progress()
        except Exception:  # it cannot tell: no progress
            return -1


def _keep_freed_memory(mebibytes: int = 256) -> None:
    """Let glibc keep this many freed MiB: getting them from the system again for each batch costs page faults."""
    trim_threshold, mmap_threshold = -1, -3  # of mallopt(3)
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(trim_threshold, mebibytes * 2**20)
        libc.mallopt(mmap_threshold, mebibytes * 2**20 // 2)
