"""Counters of a replica, for ``ScoringService.stats()`` and for a cluster's Prometheus."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchrl_llm_kl._typing import Json

_LATENCIES = 2048  # requests over which quantiles are computed
_LATENCY_BOUNDS = [0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0]


@dataclass(frozen=True)
class BatchRecord:
    """One batch: requests, tokens, seconds in the model, and seconds from arrival to answer of each finished request.

    A large request is in several batches, and finished in the last of them.
    """

    requests: int
    tokens: int
    seconds: float
    latencies: tuple[float, ...]


class ReplicaStats:
    """Counters of one replica, and latency quantiles of its last requests."""

    def __init__(self) -> None:
        self.started = time.time()
        self.requests = self.tokens = self.batches = self.failures = self.largest_batch = 0
        self._taken = 0  # requests in batches, those in several counted several times
        self.busy = 0.0
        self._latencies: deque[float] = deque(maxlen=_LATENCIES)

    def add(self, record: BatchRecord) -> None:
        """Count a batch."""
        self.batches += 1
        self.requests += len(record.latencies)
        self._taken += record.requests
        self.tokens += record.tokens
        self.busy += record.seconds
        self.largest_batch = max(self.largest_batch, record.requests)
        self._latencies.extend(record.latencies)

    def snapshot(self) -> Json:
        """All counters; times in seconds."""
        ordered = sorted(self._latencies) or [0.0]

        def quantile(share: float) -> float:
            return ordered[min(int(share * len(ordered)), len(ordered) - 1)]

        return {
            "uptime": time.time() - self.started,
            "requests": self.requests,
            "failures": self.failures,
            "tokens": self.tokens,
            "batches": self.batches,
            "requests_per_batch": self._taken / max(self.batches, 1),
            "largest_batch": self.largest_batch,
            "tokens_per_second": self.tokens / self.busy if self.busy else 0.0,
            "busy": self.busy,
            "latency_p50": quantile(0.5),
            "latency_p99": quantile(0.99),
        }


class RayMetrics:
    """Ray metrics of one replica, whose name is the tag ``replica``; ``again`` records a restart."""

    def __init__(self, replica: str, *, again: bool) -> None:
        from ray.util.metrics import Counter, Gauge, Histogram

        def metric(kind: Any, name: str, description: str, *bounds: list[float]) -> Any:
            return kind(f"torchrl_llm_kl_{name}", description, *bounds, tag_keys=("replica",))

        self._tag = {"replica": replica}
        self._queue = metric(Gauge, "queue_length", "Requests that wait")
        self._requests = metric(Histogram, "batch_requests", "Requests in a batch", [2.0**k for k in range(7)])
        self._batch_tokens = metric(Histogram, "batch_tokens", "Tokens in a batch", [2.0**k for k in range(6, 18)])
        self._tokens = metric(Counter, "tokens", "Tokens scored; their rate is tokens per second")
        self._recalled = metric(Counter, "tokens_recalled", "Tokens found in the cache and not forwarded again")
        self._latency = metric(Histogram, "latency_seconds", "From arrival to answer", _LATENCY_BOUNDS)
        self._busy = metric(Counter, "busy_seconds", "Time in the model")
        restarts = metric(Counter, "restarts", "Restarts of the replica")
        self._recalled_before = 0
        self._queue.set(0, self._tag)
        if again:
            restarts.inc(1, self._tag)

    def update(self, records: Sequence[BatchRecord], *, waiting: int, recalled: int) -> None:
        """Record batches, the requests still in the queue, and the tokens found in the cache since the start."""
        self._queue.set(waiting, self._tag)
        for record in records:
            self._requests.observe(record.requests, self._tag)
            self._batch_tokens.observe(record.tokens, self._tag)
            for latency in record.latencies:
                self._latency.observe(latency, self._tag)
        found, self._recalled_before = recalled - self._recalled_before, recalled
        tokens, busy = sum(record.tokens for record in records), sum(record.seconds for record in records)
        for counter, amount in ((self._tokens, tokens), (self._busy, busy), (self._recalled, found)):
            if amount > 0:
                counter.inc(amount, self._tag)
