"""Counters of a replica, and its Ray metrics."""

from __future__ import annotations

from typing import ClassVar

import pytest

from torchrl_llm_kl.service.replica._stats import BatchRecord, RayMetrics, ReplicaStats


class Metric:
    """Records values by name."""

    told: ClassVar[dict[str, list[float]]] = {}

    def __init__(self, name: str, *_: object, tag_keys: tuple[str, ...] = ()) -> None:
        assert tag_keys == ("replica",)
        self.name = name.removeprefix("torchrl_llm_kl_")

    def record(self, value: float, tags: dict[str, str]) -> None:
        assert tags == {"replica": "x:0"}
        self.told.setdefault(self.name, []).append(value)

    set = inc = observe = record


def test_metrics_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(f"ray.util.metrics.{name}", Metric)
    monkeypatch.setattr(Metric, "told", {})
    metrics = RayMetrics("x:0", again=True)
    metrics.update(BatchRecord(2, 300, 0.5, (0.6, 0.7)), waiting=3, recalled=40)
    metrics.update(BatchRecord(1, 100, 0.25, (0.3,)), waiting=0, recalled=100)
    assert Metric.told == {
        "queue_length": [0, 3, 0],
        "restarts": [1],
        "batch_requests": [2, 1],
        "batch_tokens": [300, 100],
        "tokens": [300, 100],
        "tokens_recalled": [40, 60],
        "busy_seconds": [0.5, 0.25],
        "latency_seconds": [0.6, 0.7, 0.3],
    }


def test_statistics_of_a_replica() -> None:
    stats = ReplicaStats()
    assert stats.snapshot()["latency_p99"] == 0.0
    for i in range(100):
        stats.add(BatchRecord(1, 10, 0.5, ((i + 1) / 100,)))
    found = stats.snapshot()
    assert (found["requests"], found["batches"], found["tokens"], found["busy"]) == (100, 100, 1000, 50.0)
    assert found["tokens_per_second"] == 20.0
    assert found["latency_p50"] == pytest.approx(0.51)
    assert found["latency_p99"] == pytest.approx(1.0)
