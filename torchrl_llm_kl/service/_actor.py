"""One replica: a Ray actor that owns the model."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from torchrl_llm_kl.rollouts import ModelInterface
from torchrl_llm_kl.service._batcher import Batcher, BatchRecord
from torchrl_llm_kl.service._core import ScoringCore
from torchrl_llm_kl.service._errors import ReplicaGone, ServiceBusy, ServiceError, WeightVersionError, portable
from torchrl_llm_kl.service._heap import keep_freed_memory
from torchrl_llm_kl.service._keeper import end_keeper, kept_weights
from torchrl_llm_kl.service._leases import LEASE
from torchrl_llm_kl.service._metrics import RayMetrics
from torchrl_llm_kl.service._stats import ReplicaStats
from torchrl_llm_kl.service._wire import Reply, Request

__all__ = ["MAX_CONCURRENCY", "ScoringActor"]

#: Calls at a time. However many requests wait (for their turn, for a version of the weights), new weights get through.
MAX_CONCURRENCY = 1000
_MAX_REQUESTS = 800

_LOG = logging.getLogger("torchrl_llm_kl.service")
_MAKER = "whoever made it"


class ScoringActor:
    """Scores requests of any number of clients. Its event loop only waits; the model runs in a thread of its own.

    Args:
        make_model: returns the model; called here.
        config: what the service was asked to be, for comparison.

    Keyword Args:
        service: its name.
        namespace: of the names.
        replicas: names of all of them.
        leased: whether it ends with its last client.
        tokens_per_batch: of one forward.
        memory: bytes of remembered keys and values.
        max_tokens: of one batch of requests.
        max_wait: seconds.
        max_queue: requests.
    """

    def __init__(
        self,
        make_model: Callable[[], Any],
        config: Mapping[str, Any],
        *,
        service: str,
        namespace: str,
        replicas: Sequence[str],
        leased: bool,
        tokens_per_batch: int | None,
        memory: int,
        max_tokens: int,
        max_wait: float,
        max_queue: int,
    ) -> None:
        _log_to_stderr()
        keep_freed_memory()
        self._config = dict(config)
        self._name = str(config["name"])
        self._service, self._namespace, self._replicas = service, namespace, list(replicas)
        self._lives = {uuid.uuid4().hex[:8]}
        self._left = threading.Event()
        self._failure: Exception | None = None
        self._lost: Exception | None = None
        try:  # an error is handed to whoever asks, instead of a dead actor
            self._core = ScoringCore(make_model(), tokens_per_batch=tokens_per_batch, memory=memory)
        except Exception as error:
            self._failure = portable(error)
        except BaseException as error:
            self._failure = ServiceError(f"making the model ended with {type(error).__name__}: {error}")
        self._clients = {_MAKER: time.monotonic()}  # from now on: it may have taken long
        if leased:
            threading.Thread(target=self._watch, name="watch", daemon=True).start()
        if self._failure is not None:
            _LOG.error("replica %s has no model: %s", self._name, self._failure)
            return
        self._stats = ReplicaStats()
        self._inside = 0
        self._awaited: list[tuple[int, asyncio.Future[None]]] = []  # versions that requests wait for
        self._batcher = Batcher(
            self._answer, max_tokens=max_tokens, max_wait=max_wait, max_queue=max_queue, on_batch=self._record
        )
        self._metrics = RayMetrics(self._name)
        self._restore()
        again = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        self._metrics.started(again=again)
        _LOG.info("replica %s %s, pid %d", self._name, "restarted" if again else "started", os.getpid())

    def _restore(self) -> None:
        """Take the weights that were pushed while it was not there, or did not listen."""
        try:
            kept = kept_weights(self._service, self._namespace, str(self._config["model"]))
            if kept is not None and (kept[0] > self._core.version or self._lost is not None):
                for weights in kept[1]:
                    self._core.update_weights(weights, kept[0])
                self._lost = None
                _LOG.info("replica %s took version %d of the weights again", self._name, kept[0])
        except Exception as error:  # better no answer than one of other weights
            self._lost = portable(error)
            _LOG.warning("replica %s answers nothing: %s", self._name, error)

    def _answer(self, requests: Sequence[Request]) -> list[Reply | Exception]:
        if self._lost is not None:
            return [self._lost] * len(requests)
        answers = self._core.score(requests)
        self._stats.failures += sum(isinstance(answer, Exception) for answer in answers)
        return answers

    def _record(self, record: BatchRecord) -> None:
        self._stats.add(record)
        self._metrics.update(record, waiting=len(self._batcher), recalled=self._core.tokens_recalled)

    # ------------------------------------------------------------------ what clients call

    async def describe(self) -> tuple[Exception | None, dict[str, Any]]:
        """Why the model could not be made, if it could not; and what was asked for."""
        return self._failure, self._config

    async def interface(self) -> tuple[ModelInterface, bool]:
        """Keys and tokenizer of the model, for clients that tokenise; and whether a wrapper named them."""
        self._check_model()
        return ModelInterface.of(self._core.model), hasattr(self._core.model, "input_mode")

    async def score(self, packed: bytes, timeout: float) -> bytes | Exception:
        """A reply, or an exception: an error of the request is no failure of the actor."""
        deadline = time.monotonic() + timeout
        if self._failure is not None:
            return ReplicaGone(f"replica {self._name} could not be made again: {self._failure}")
        if self._inside >= _MAX_REQUESTS:
            return ServiceBusy(
                f"{self._inside} requests wait at replica {self._name}: add replicas, or ask for less at a time"
            )
        self._inside += 1
        try:
            request = Request.unpack(packed)
            await self._catch_up(request, timeout)
            reply = await self._batcher.submit(request, timeout=max(deadline - time.monotonic(), 0.0))
            return reply.pack()
        except Exception as error:
            return portable(error)
        finally:
            self._inside -= 1

    def _check_model(self) -> None:
        if self._failure is not None:
            raise ReplicaGone(f"replica {self._name} could not be made again: {self._failure}")

    async def _catch_up(self, request: Request, timeout: float) -> None:
        """Get the weights that a request needs, or wait for them."""
        wanted = request.version or 0
        if max(wanted, request.newest) > self._core.version:
            await self._batcher.in_thread(self._restore)
            self._wake()
        if self._lost is None and request.newest > self._core.version:
            raise WeightVersionError(
                f"version {request.newest} of the weights was here, replica {self._name} holds {self._core.version} and "
                "finds no other: it is lost, push it again"
            )
        if wanted > self._core.version and self._lost is None:
            await self._wait_for_version(wanted, timeout)

    async def _wait_for_version(self, version: int, timeout: float) -> None:
        there: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = (version, there)
        self._awaited.append(waiting)
        try:
            await asyncio.wait_for(there, timeout)
        except asyncio.TimeoutError:
            raise WeightVersionError(
                f"version {version} of the weights was asked for, replica {self._name} holds {self._core.version} and got "
                f"no other within {timeout:.3g} s: push it with update_weights(), or ask for no version"
            ) from None
        finally:
            self._awaited.remove(waiting)

    def _wake(self) -> None:
        for version, there in self._awaited:
            if version <= self._core.version and not there.done():
                there.set_result(None)

    async def check_weights(self, weights: Mapping[str, Any]) -> Exception | None:
        """Whether the weights fit; nothing is changed."""
        self._check_model()
        try:
            await self._batcher.in_thread(lambda: self._core.check_weights(weights))
        except Exception as error:
            return portable(error)
        return None

    async def update_weights(self, weights: Mapping[str, Any], version: int) -> Exception | None:
        """Copy weights into the model, between two batches."""
        self._check_model()
        try:
            await self._batcher.in_thread(lambda: self._core.update_weights(weights, version))
        except Exception as error:
            return portable(error)
        self._lost = None
        self._wake()
        _LOG.info("replica %s holds version %d of the weights", self._name, version)
        return None

    async def stats(self) -> dict[str, Any]:
        """Counters, queue length, version of the weights, clients."""
        self._check_model()
        seen, recalled = self._core.tokens_seen, self._core.tokens_recalled
        return {
            "name": self._name,
            "pid": os.getpid(),
            "restarts": len(self._lives) - 1,
            "queue": len(self._batcher),
            "version": self._core.version,
            "clients": len(self._clients.keys() - {_MAKER}),
            "tokens_recalled": recalled,
            "cache_hit_rate": recalled / seen if seen else 0.0,
            **self._stats.snapshot(),
        }

    async def health(self) -> bool:
        """Whether it scores; answers while it is at work."""
        return self._failure is None and self._lost is None

    # ------------------------------------------------------------------ clients come and go

    async def hold(self, client: str, lives: Sequence[str]) -> set[str]:
        """A client is there, and still is.

        Args:
            client: its name.
            lives: marks of this replica's lives that the client has seen: what a restart forgets, clients remember.
        """
        self._clients[client] = time.monotonic()
        self._clients.pop(_MAKER, None)
        self._lives.update(lives)
        return self._lives

    async def release(self, client: str) -> None:
        """A client has gone."""
        self._clients.pop(client, None)
        if not self._clients:
            self._left.set()

    async def close(self) -> None:
        """Refuse what waits and what comes, and end: an end that Ray knows was meant."""
        _LOG.info("replica %s drains", self._name)
        if self._failure is None:
            await self._batcher.close()
            await asyncio.sleep(0.2)  # the refusals are on their way
        ray.actor.exit_actor()

    def _watch(self) -> None:
        """End with the last client."""
        while self._clients:
            self._left.wait(LEASE / 4)
            self._left.clear()
            since = time.monotonic() - LEASE
            for name in tuple(self._clients):  # in place: others come in meanwhile
                if self._clients.get(name, 0.0) <= since:
                    self._clients.pop(name, None)
        _LOG.info("replica %s ends with its last client", self._name)
        names = {(entry["namespace"], entry["name"]) for entry in ray.util.list_named_actors(all_namespaces=True)}
        if not any((self._namespace, name) in names for name in self._replicas if name != self._name):
            end_keeper(self._service, self._namespace)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def _log_to_stderr() -> None:
    """Ray shows what workers write there; it sets no level of ours."""
    if not _LOG.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(message)s"))
        _LOG.addHandler(handler)
        _LOG.setLevel(logging.INFO)
