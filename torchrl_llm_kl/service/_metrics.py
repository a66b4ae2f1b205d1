"""Ray metrics, which a cluster's Prometheus collects."""

from __future__ import annotations

from typing import Any

from torchrl_llm_kl.service._batcher import BatchRecord

__all__ = ["RayMetrics"]

_SECONDS = [0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0]


class RayMetrics:
    """What a replica does, under the tag ``replica``.

    Args:
        replica: its name.
    """

    def __init__(self, replica: str) -> None:
        from ray.util.metrics import Counter, Gauge, Histogram

        tags: dict[str, Any] = {"tag_keys": ("replica",)}
        self._tag = {"replica": replica}
        self._queue = Gauge("torchrl_llm_kl_queue_length", "Requests that wait", **tags)
        self._size = Histogram("torchrl_llm_kl_batch_requests", "Requests of a batch", [1, 2, 4, 8, 16, 32, 64], **tags)
        self._batch_tokens = Histogram(
            "torchrl_llm_kl_batch_tokens", "Tokens of a batch", [2**k for k in range(6, 18)], **tags
        )
        self._tokens = Counter("torchrl_llm_kl_tokens", "Tokens scored; their rate is tokens per second", **tags)
        self._recalled = Counter("torchrl_llm_kl_tokens_recalled", "Tokens remembered and not forwarded again", **tags)
        self._latency = Histogram("torchrl_llm_kl_latency_seconds", "From arrival to answer", _SECONDS, **tags)
        self._busy = Counter("torchrl_llm_kl_busy_seconds", "Time in the model", **tags)
        self._restarts = Counter("torchrl_llm_kl_restarts", "Times that the replica began again", **tags)
        self._recalled_before = 0

    def started(self, *, again: bool) -> None:
        """The replica is there."""
        self._queue.set(0, self._tag)
        if again:
            self._restarts.inc(1, self._tag)

    def update(self, record: BatchRecord, *, waiting: int, recalled: int) -> None:
        """After a batch.

        Args:
            record: of the batch.
            waiting: requests that wait.
            recalled: tokens that were remembered so far.
        """
        self._queue.set(waiting, self._tag)
        self._size.observe(record.requests, self._tag)
        self._batch_tokens.observe(record.tokens, self._tag)
        for counter, amount in (
            (self._tokens, record.tokens),
            (self._busy, record.seconds),
            (self._recalled, recalled - self._recalled_before),
        ):
            if amount > 0:
                counter.inc(amount, self._tag)
        self._recalled_before = recalled
        for latency in record.latencies:
            self._latency.observe(latency, self._tag)
