"""What a replica has done, in numbers."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from torchrl_llm_kl.service._batcher import BatchRecord

__all__ = ["ReplicaStats"]

_KEPT = 2048  # latencies that quantiles are taken of


class ReplicaStats:
    """Counters of one replica, and quantiles of its last requests."""

    def __init__(self) -> None:
        self.started = time.time()
        self.requests = self.tokens = self.batches = self.failures = self.largest_batch = 0
        self.busy = 0.0
        self._latencies: deque[float] = deque(maxlen=_KEPT)

    def add(self, record: BatchRecord) -> None:
        """Count a batch."""
        self.batches += 1
        self.requests += record.requests
        self.tokens += record.tokens
        self.busy += record.seconds
        self.largest_batch = max(self.largest_batch, record.requests)
        self._latencies.extend(record.latencies)

    def snapshot(self) -> dict[str, Any]:
        """All of it; times in seconds."""
        ordered = sorted(self._latencies)

        def quantile(share: float) -> float:
            return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0

        return {
            "uptime": time.time() - self.started,
            "requests": self.requests,
            "failures": self.failures,
            "tokens": self.tokens,
            "batches": self.batches,
            "requests_per_batch": self.requests / max(self.batches, 1),
            "largest_batch": self.largest_batch,
            "tokens_per_second": self.tokens / self.busy if self.busy else 0.0,
            "busy": self.busy,
            "latency_p50": quantile(0.5),
            "latency_p99": quantile(0.99),
        }
