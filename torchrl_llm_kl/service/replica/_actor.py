"""One replica: a Ray actor that owns the model."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, TypeVar

import ray

from torchrl_llm_kl.rollouts import ModelInterface
from torchrl_llm_kl.service._errors import (
    EngineLost,
    PoisonedRequest,
    ReplicaGone,
    ServiceBusy,
    ServiceError,
    WeightVersionError,
    portable,
)
from torchrl_llm_kl.service._weights import Missing, Pushes
from torchrl_llm_kl.service._wire import Reply, Request
from torchrl_llm_kl.service.control._reporter import Reporter
from torchrl_llm_kl.service.control._spec import ServiceSpec
from torchrl_llm_kl.service.engines._engine import engine_of
from torchrl_llm_kl.service.replica._batcher import Batcher
from torchrl_llm_kl.service.replica._core import ScoringCore
from torchrl_llm_kl.service.replica._stats import BatchRecord, RayMetrics, ReplicaStats
from torchrl_llm_kl.service.replica._watchdog import Watchdog, stacks

#: Concurrent calls of a replica. The limit for requests is lower, so that weight updates always get through.
MAX_CONCURRENCY = 1000
_MAX_REQUESTS = 800
_SETTLING = 1.0  # seconds that a process lives before it tries a request of which others died
_QUARANTINED = 1024  # poisoned requests that a replica remembers

_LOG = logging.getLogger("torchrl_llm_kl.service")
_T = TypeVar("_T")


class ScoringActor:
    """Scores the requests of any number of clients. Its event loop only waits; the model runs in a thread."""

    def __init__(self, spec: ServiceSpec, replica: int) -> None:
        _log_to_stderr()
        _keep_freed_memory()
        self._spec = dataclasses.replace(spec, make_model=None)  # keeps no second reference to the model
        self._replica, self._name = replica, spec.replica_name(replica)
        self._inside = 0  # requests in flight
        self._failure: Exception | None = None  # why there is no model
        self._lost: Exception | None = None  # why the model lacks the required weights
        self._hung = False
        self._reporter = Reporter(self._spec, replica)
        try:  # a dead actor could not report the error to the client
            self._reporter.starting()
            made = {key: spec.settings[key] for key in ("tokens_per_batch", "memory")}
            self._core = ScoringCore(engine_of(self._reporter.model(spec.make_model), **made))
        except Exception as error:
            self._failure = portable(error)
        except BaseException as error:
            self._failure = ServiceError(f"creating the model ended with {type(error).__name__}: {error}")
        self._stats = ReplicaStats()
        if self._failure is None:
            self._awaited: list[tuple[int, asyncio.Future[None]]] = []  # versions that requests wait for
            queue = {key: spec.settings[key] for key in ("max_tokens", "max_wait", "max_queue")}
            self._batcher = Batcher(self._answer, on_batch=self._record, on_trial=self._announce, **queue)
            self._trials: dict[str, asyncio.Future[None]] = {}  # by digest of the request
            self._quarantine: dict[str, None] = {}
            threading.Thread(target=self._watch_progress, name="watchdog", daemon=True).start()
            self._metrics = RayMetrics(self._name, again=self._reporter.starts > 1)
            if hasattr(self._core.engine, "when_lost"):
                self._core.engine.when_lost(self._end)
            self._reporter.identify(self._core.engine)
            tensors: Any = getattr(self._core.engine, "tensors", list)()
            self._pushes = Pushes(self._spec, self._core.engine.check_weights, tensors)
            self._weights_thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
            self._refreshing = asyncio.Lock()
            self._restore()
            self._failure = self._reporter.ready(self._core.version, replaced=self._pushes.whole)
        else:
            self._reporter.failed(self._failure)
        if self._failure is not None:
            _LOG.error("replica %s has no model: %s", self._name, self._failure)
            return
        _LOG.info(
            "replica %s %s, pid %d", self._name, "restarted" if self._reporter.starts > 1 else "started", os.getpid()
        )

    # ------------------------------------------------------------------ scores

    async def score(self, packed: bytes, timeout: float) -> bytes | Exception:
        """A packed reply, or an exception as a value, since an error of the request is not a failure of the actor."""
        deadline = time.monotonic() + timeout
        self._inside += 1
        try:
            self._check_model()
            if self._inside > _MAX_REQUESTS:
                raise ServiceBusy(
                    f"{_MAX_REQUESTS} requests wait at replica {self._name}: add replicas, or send fewer at a time."
                )
            request = Request.unpack(packed)
            refused = self._quarantine.keys() | self._reporter.quarantined
            if refused and request.digest() in refused:
                raise PoisonedRequest("replicas died of this request before: it is not tried again.")
            if request.deaths:
                await self.settled()
            await self._catch_up(request, timeout)
            reply = await self._batcher.submit(request, timeout=max(deadline - time.monotonic(), 0.0))
            return reply.pack(half=request.half)
        except Exception as error:
            return portable(error)
        finally:
            self._inside -= 1

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
        self._metrics.update(record, waiting=len(self._batcher), recalled=self._core.engine.cached_tokens()[1])

    def _end(self, error: EngineLost) -> NoReturn:
        """Exit without an engine, so that Ray starts the replica again and clients send their requests again."""
        _LOG.error("replica %s ends: %s", self._name, error)
        logging.shutdown()
        os._exit(1)

    def _check_model(self) -> None:
        if self._failure is not None:
            raise ReplicaGone(f"replica {self._name} could not be created again: {self._failure}")
        if self._hung:
            raise ReplicaGone(f"replica {self._name} hangs and ends.")

    # ------------------------------------------------------------------ poison and hangs

    async def settled(self) -> bool:
        """Return True once this process has lived for a second, before which no request with ``deaths`` is scored.

        If it dies before, it dies of something else.
        """
        await asyncio.sleep(max(self._stats.started + _SETTLING - time.time(), 0.0))
        return True

    async def on_trial(self, digest: str, timeout: float) -> str:
        """Return the mark of this process just before it scores a request with ``deaths``, by itself.

        A death after that may be the request's own doing. Empty if it was not its turn within ``timeout`` seconds.
        """
        future = self._trials.setdefault(digest, asyncio.get_running_loop().create_future())
        found, _ = await asyncio.wait([future], timeout=timeout)
        self._trials.pop(digest, None)
        return self._reporter.life if found else ""

    def _announce(self, request: Request) -> None:
        waiting = self._trials.get(request.digest())
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    async def quarantine(self, digest: str) -> None:
        """Refuse a request from now on, given by its :meth:`Request.digest`, with :class:`PoisonedRequest`."""
        if self._failure is None:
            self._quarantine[digest] = None
            if len(self._quarantine) > _QUARANTINED:
                del self._quarantine[next(iter(self._quarantine))]

    def _watch_progress(self) -> None:
        """End the process if a batch or an update makes no progress: only that ends a thread that hangs."""
        watchdog = Watchdog(self._core, float(self._spec.settings["hang_after"]))
        while not watchdog.hangs(time.monotonic()):
            time.sleep(min(watchdog.hang_after / 8, 5.0))
        self._hung = True
        _LOG.error("replica %s made no progress for %g s and ends.\n%s", self._name, watchdog.hang_after, stacks())
        self._batcher.reject_soon(ReplicaGone(f"replica {self._name} hangs and ends."))
        time.sleep(0.5)  # let the errors reach their callers; those of the batch see the actor die
        os._exit(1)

    # ------------------------------------------------------------------ weights

    async def stage_weights(self, token: str, version: int | None = None, seen: int = 0) -> Exception | None:
        """Fetch and check a push, for a later :meth:`refresh_weights`; returns the error if it must not be taken.

        See :meth:`Pushes.stage`.
        """
        return await self._reported(lambda: self._off_loop(lambda: self._pushes.stage(token, version, seen)))

    async def drop_weights(self) -> None:
        """Free a staged push that was given up."""
        await self._reported(lambda: self._off_loop(self._pushes.drop))

    async def refresh_weights(self) -> Exception | None:
        """Load the pushes that this replica lacks; returns the error if it cannot."""
        return await self._reported(self._refresh)

    async def _reported(self, work: Callable[[], Awaitable[object]]) -> Exception | None:
        self._check_model()
        try:
            await work()
        except EngineLost as error:
            self._end(error)
        except Exception as error:
            return portable(error)
        return None

    async def _off_loop(self, call: Callable[[], _T]) -> _T:
        """Run ``call`` in the thread of the weights: the keeper may let it wait, and requests go on."""
        return await asyncio.get_running_loop().run_in_executor(self._weights_thread, call)

    async def _refresh(self, version: int | None = None) -> None:
        """Load the pushes that this replica lacks, unless it has ``version`` by then."""
        async with self._refreshing:
            if version is None or version > self._core.version or self._lost is not None:
                await asyncio.shield(self._load())

    async def _load(self) -> None:
        found = await self._off_loop(self._pushes.missing)
        if found is None:
            return
        await self._batcher.in_thread(lambda: self._copy(found))
        await self._off_loop(lambda: self._pushes.take(found.token))
        self._lost = None
        self._wake()
        _LOG.info("replica %s holds version %d of the weights", self._name, found.version)

    def _copy(self, found: Missing) -> None:
        self._core.update_weights(found.weights, found.version, checked=True, digest=found.digest)

    def _restore(self) -> None:
        """Load all pushes before the first request."""
        try:
            found = self._pushes.missing()
            if found is not None:
                self._copy(found)
                self._pushes.take(found.token)
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
                await asyncio.wait_for(self._refresh(max(wanted, request.newest)), timeout)
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
        if wanted <= self._core.version:
            return
        waiting = (wanted, asyncio.get_running_loop().create_future())
        self._awaited.append(waiting)
        try:
            await asyncio.wait_for(waiting[1], max(end - time.monotonic(), 0.0))
        except asyncio.TimeoutError:
            raise WeightVersionError(
                f"version {wanted} of the weights was requested, replica {self._name} holds {self._core.version} and got "
                f"no newer one within {timeout:.3g} s: push it with update_weights(), or request no version."
            ) from None
        finally:
            self._awaited.remove(waiting)

    def _wake(self) -> None:
        for version, arrived in self._awaited:
            if version <= self._core.version and not arrived.done():
                arrived.set_result(None)

    async def fingerprint(self) -> tuple[int, str, str] | Exception:
        """See :attr:`ScoringCore.fingerprint`; or the error. Reads all weights once after each update."""
        try:
            self._check_model()
            if self._lost is not None:
                return self._lost
            while (found := self._core.fingerprint) is None:
                await self._batcher.in_thread(self._core.read_fingerprint)
            return found
        except Exception as error:
            return portable(error)

    # ------------------------------------------------------------------ state

    async def describe(self) -> dict[str, Any]:
        """The error of the factory, if there was one; configuration and fingerprint."""
        config, fingerprint = self._spec.config(self._replica), self._reporter.fingerprint
        return {"failure": self._failure, "config": config, "fingerprint": fingerprint}

    async def interface(self) -> tuple[ModelInterface, bool]:
        """Keys and tokenizer of the model, for clients that tokenise; and whether it is a TorchRL wrapper."""
        self._check_model()
        return self._core.engine.interface()

    async def stats(self) -> dict[str, Any]:
        """Counters, queue length, version of the weights, clients."""
        self._check_model()
        seen, recalled = self._core.engine.cached_tokens()
        return {
            "name": self._name,
            "pid": os.getpid(),
            "restarts": self._reporter.starts - 1,
            "queue": len(self._batcher),
            "queue_tokens": self._batcher.tokens,
            "version": self._core.version,
            "clients": self._reporter.clients,
            "tokens_recalled": recalled,
            "cache_hit_rate": recalled / seen if seen else 0.0,
            **self._stats.snapshot(),
        }

    async def health(self) -> bool:
        """Whether it can score; responds while a batch runs."""
        return self._failure is None and self._lost is None and not self._hung

    # ------------------------------------------------------------------ life

    async def pulse(self, news: Mapping[str, Any]) -> dict[str, Any]:
        """What the control actor must know of this replica, in exchange for its news."""
        return self._reporter.pulse(
            news,
            version=0 if self._failure is not None else self._core.version,
            failed=self._failure is not None,
            hung=self._hung,
            queue_tokens=0 if self._failure is not None else self._batcher.tokens,
            busy=self._stats.busy,
            tokens=self._stats.tokens,
        )

    async def close(self) -> None:
        """Reject waiting and later requests, then exit in a way that Ray reports as intended."""
        _LOG.info("replica %s drains", self._name)
        if self._failure is None:
            await self._batcher.close()
            await asyncio.sleep(0.2)  # let the errors reach their callers
        ray.actor.exit_actor()


def _log_to_stderr() -> None:
    """Ray shows the stderr of workers, but sets no log level for this logger."""
    if not _LOG.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(message)s"))
        _LOG.addHandler(handler)
        _LOG.setLevel(logging.INFO)


def _keep_freed_memory(mebibytes: int = 256) -> None:
    """Let glibc keep this many freed MiB: getting them from the system again for each batch costs page faults."""
    trim_threshold, mmap_threshold = -1, -3  # of mallopt(3)
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(trim_threshold, mebibytes * 2**20)
        libc.mallopt(mmap_threshold, mebibytes * 2**20 // 2)
