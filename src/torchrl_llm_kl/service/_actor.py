"""One replica: a Ray actor that owns the model."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchrl_llm_kl.service._batcher import Batcher, BatchRecord
from torchrl_llm_kl.service._core import ScoringCore
from torchrl_llm_kl.service._stats import ReplicaStats
from torchrl_llm_kl.service._wire import Reply, Request
from torchrl_llm_kl.transforms._interface import ModelInterface

__all__ = ["ScoringActor"]

_LOG = logging.getLogger("torchrl_llm_kl.service")


class ScoringActor:
    """Scores requests of any number of clients. Its event loop only waits; the model runs in a thread of its own.

    Args:
        make_model: returns the model; called here.
        config: what the service was asked to be, for comparison.
        tokens_per_batch: of one forward.
        memory: bytes of remembered keys and values.
        max_tokens: of one batch of requests.
        max_wait: seconds.
        max_queue: requests.
        lease: seconds without a sign of any client after which the replica ends; None for never.
    """

    def __init__(
        self,
        make_model: Callable[[], Any],
        config: Mapping[str, Any],
        *,
        tokens_per_batch: int | None,
        memory: int,
        max_tokens: int,
        max_wait: float,
        max_queue: int,
        lease: float | None,
    ) -> None:
        self._config = dict(config)
        self._failure: Exception | None = None
        self._stats = ReplicaStats()
        self._lease, self._clients = lease, {"the creator": time.monotonic()}
        self._watching: asyncio.Task[None] | None = None
        try:  # an error is handed to whoever asks, instead of a dead actor
            self._core = ScoringCore(make_model(), tokens_per_batch=tokens_per_batch, memory=memory)
        except Exception as error:
            self._failure = error
            return
        self._batcher = Batcher(
            self._answer, max_tokens=max_tokens, max_wait=max_wait, max_queue=max_queue, on_batch=self._record
        )
        self._gauges = _Gauges(str(config.get("name", "")))
        _LOG.info("replica %s started, pid %d", config.get("name"), os.getpid())

    def _answer(self, requests: Sequence[Request]) -> list[Reply | Exception]:
        answers = self._core.score(requests)
        self._stats.failures += sum(isinstance(answer, Exception) for answer in answers)
        return answers

    def _record(self, record: BatchRecord) -> None:
        self._stats.add(record)
        self._gauges.update(record, waiting=len(self._batcher))

    # ------------------------------------------------------------------ what clients call

    async def describe(self) -> tuple[str, Any]:
        """``("ready", config)``, or ``("failed", error)`` if the model could not be made."""
        if self._failure is not None:
            return "failed", self._failure
        if self._lease is not None and self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self._watch())
        return "ready", self._config

    async def interface(self) -> tuple[ModelInterface, bool]:
        """Keys and tokenizer of the model, for clients that tokenise; and whether a wrapper named them."""
        return ModelInterface.of(self._core.model), hasattr(self._core.model, "input_mode")

    async def score(self, request: Request, timeout: float) -> tuple[str, Any]:
        """``("ok", reply)`` or ``("error", exception)``: an error of the request is no failure of the actor."""
        try:
            return "ok", await self._batcher.submit(request, timeout=timeout)
        except Exception as error:
            return "error", error

    async def update_weights(self, weights: Mapping[str, Any], version: int) -> tuple[str, Any]:
        """Copy weights into the model, between two batches."""
        try:
            await self._batcher.in_thread(lambda: self._core.update_weights(weights, version))
        except Exception as error:
            return "error", error
        _LOG.info("replica %s holds version %d of the weights", self._config.get("name"), version)
        return "ok", self._core.version

    async def stats(self) -> dict[str, Any]:
        """Counters, queue length, version of the weights, clients."""
        return {
            "name": self._config.get("name"),
            "pid": os.getpid(),
            "queue": len(self._batcher),
            "version": self._core.version,
            "clients": max(len(self._clients) - 1, 0),
            **self._stats.snapshot(),
        }

    async def health(self) -> bool:
        """Whether the model is there; answers while it is at work."""
        return self._failure is None

    async def hold(self, client: str) -> None:
        """A client is there, and still is."""
        self._clients[client] = time.monotonic()

    async def release(self, client: str) -> None:
        """A client has gone."""
        self._clients.pop(client, None)
        self._clients.pop("the creator", None)

    async def close(self) -> None:
        """Refuse what waits and what comes."""
        _LOG.info("replica %s drains", self._config.get("name"))
        await self._batcher.close()

    async def _watch(self) -> None:
        """End with the last client."""
        import ray

        assert self._lease is not None
        while True:
            await asyncio.sleep(self._lease / 4)
            now = time.monotonic()
            self._clients = {name: seen for name, seen in self._clients.items() if now - seen < self._lease}
            if not self._clients:
                _LOG.info("replica %s ends with its last client", self._config.get("name"))
                await self._batcher.close()
                ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


class _Gauges:
    """Ray metrics, which a cluster's Prometheus collects."""

    def __init__(self, name: str) -> None:
        from ray.util import metrics

        tags = {"tag_keys": ("replica",)}
        self._tag = {"replica": name}
        self._queue = metrics.Gauge("torchrl_llm_kl_queue_length", "requests that wait", **tags)
        self._size = metrics.Histogram(
            "torchrl_llm_kl_batch_requests", "requests of a batch", boundaries=[1, 2, 4, 8, 16, 32, 64], **tags
        )
        self._tokens = metrics.Counter("torchrl_llm_kl_tokens", "tokens of all requests", **tags)
        self._latency = metrics.Histogram(
            "torchrl_llm_kl_latency_seconds",
            "from arrival to answer",
            boundaries=[0.003, 0.01, 0.03, 0.1, 0.3, 1, 3],
            **tags,
        )

    def update(self, record: BatchRecord, *, waiting: int) -> None:
        self._queue.set(waiting, self._tag)
        self._size.observe(record.requests, self._tag)
        if record.tokens:
            self._tokens.inc(record.tokens, self._tag)
        for latency in record.latencies:
            self._latency.observe(latency, self._tag)
