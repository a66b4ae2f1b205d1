"""Calibration of the event model on a short run of the service, and a check of its predictions on another run."""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from benchmarks.models import ModelSize
from benchmarks.ray.callers import Callers, Window
from benchmarks.ray.capacity import around, drawn
from benchmarks.ray.events import Draw, Replica, World, quantile, simulate
from benchmarks.ray.sides import reference
from torchrl_llm_kl.service import ScoringService
from torchrl_llm_kl.service.replica import _batcher

_KEPT = 100  # quantiles that describe a distribution
_LATELY = getattr(_batcher, "CALLER_TTL", 10.0)
_DEFAULTS = inspect.signature(ScoringService).parameters


@dataclass(frozen=True)
class Batches:
    """Batches of a window: their count, and means of their requests, tokens and seconds in the model."""

    count: int
    requests: float
    tokens: float
    seconds: float


@dataclass(frozen=True)
class Calibration:
    """Measured parameters of the service.

    Args:
        replica: arguments of :class:`Replica`.
        links: seconds that a call of one caller spends outside queue and model; a sample.
        largest_error: of the fitted seconds of a batch, relative to the measured ones.
    """

    replica: dict[str, float]
    links: list[float]
    largest_error: float

    def model(self) -> tuple[Replica, Draw]:
        """Arguments of :func:`simulate`."""
        return Replica(**self.replica), drawn(self.links)


@dataclass(frozen=True)
class Check:
    """A prediction and the real run; seconds, and requests per second."""

    clients: int
    think: float
    throughput: float
    predicted_throughput: float
    latency: float
    predicted_latency: float
    latency_p99: float
    predicted_latency_p99: float

    @property
    def errors(self) -> tuple[float, float]:
        """Relative errors of throughput and mean latency."""
        return (
            self.predicted_throughput / self.throughput - 1,
            self.predicted_latency / self.latency - 1,
        )


@dataclass(frozen=True)
class Plan:
    """Sizes of the run.

    Args:
        clients: concurrent ones, ascending: the service waits for recent callers.
        sequences: per request, to calibrate.
        checked: sequences per request, to check.
        length: tokens per sequence.
        alone: seconds between calls of one client, to measure a call outside queue and model.
        thinks: seconds between calls, to check.
        seconds: per window.
        repeats: windows of each kind, to calibrate.
    """

    clients: tuple[int, ...] = (1, 2, 4)
    sequences: tuple[int, ...] = (1, 4, 12)
    checked: int = 4
    length: int = 128
    alone: float = 0.05
    thinks: tuple[float, ...] = (0.02, 0.1)
    seconds: float = 1.5
    repeats: int = 2

    @property
    def windows(self) -> int:
        """Number of windows."""
        return 1 + len(self.clients) * (len(self.sequences) * self.repeats + len(self.thinks))


QUICK_PLAN = Plan(clients=(1, 2), sequences=(1, 4), length=16, thinks=(0.02,), seconds=0.3, repeats=1)


def calibrate(
    callers: Callers, size: ModelSize, plan: Plan, *, on_window: Callable[[str], None]
) -> tuple[Calibration, list[Check]]:
    """Fit on callers without pauses and on one that pauses; check on other windows. Starts a separate service."""
    service = ScoringService(factory=partial(reference, size), name="calibration")
    batches: list[Batches] = []
    checked: list[tuple[int, float, Window]] = []

    def window(clients: int, sequences: int, seconds: float, think: float = 0.0) -> Window:
        return callers.window(
            "score", service.model, sequences, plan.length, callers=clients, seconds=seconds, think=think
        )

    try:
        window(1, plan.checked, 0.3)  # warm up
        on_window("calibration: one client, alone")
        alone = window(1, plan.checked, 2 * plan.seconds, plan.alone).latencies
        for clients in plan.clients:
            for sequences in plan.sequences:
                for _ in range(plan.repeats):
                    on_window(f"calibration: {clients} x {sequences}")
                    before = service.stats()[0]
                    window(clients, sequences, plan.seconds)
                    batches += _between(before, service.stats()[0])
            for think in plan.thinks:
                on_window(f"check: {clients} clients, {1e3 * think:g} ms")
                checked.append((clients, think, window(clients, plan.checked, 2 * plan.seconds, think)))
    finally:
        service.shutdown()
    tokens = plan.checked * plan.length
    found = fit(batches, alone, tokens=tokens)
    return found, [_check(found, clients, think, seen, tokens) for clients, think, seen in checked if seen.calls]


def _between(before: dict[str, float], after: dict[str, float]) -> list[Batches]:
    count = int(after["batches"] - before["batches"])
    if count < 1:
        return []
    requests, tokens, busy = (float(after[key] - before[key]) / count for key in ("requests", "tokens", "busy"))
    return [Batches(count, requests, tokens, busy)]


def fit(batches: Sequence[Batches], alone: Sequence[float], *, tokens: int) -> Calibration:
    """``seconds = fixed + each * requests + tokens / rate`` by non-negative relative least squares.

    Args:
        batches: measured.
        alone: latencies of a single caller.
        tokens: of its requests.
    """
    columns = np.array([[1.0, batch.requests, batch.tokens] for batch in batches])
    seconds = np.array([batch.seconds for batch in batches])
    relative, ones = columns / seconds[:, None], np.ones(len(batches))
    used = [0, 1, 2]
    while True:  # drop terms that would be negative
        found = np.zeros(3)
        found[used] = np.linalg.lstsq(relative[:, used], ones, rcond=None)[0]
        if (found >= 0).all():
            break
        used.remove(int(found.argmin()))
    fixed, each, token = found.tolist()
    replica = Replica(
        fixed,
        each,
        1 / max(token, 1e-12),
        max_wait=float(_DEFAULTS["max_wait"].default),
        lately=float(_LATELY),
        max_tokens=float(_DEFAULTS["max_tokens"].default),
        piece=float(_DEFAULTS["max_tokens"].default) / _batcher._UNIT,
    )
    model_seconds = replica.seconds(1, tokens)
    links = [max(latency - model_seconds, 0.0) for latency in sorted(alone)]
    kept = [quantile(links, (i + 0.5) / _KEPT) for i in range(_KEPT)]
    return Calibration(asdict(replica), kept, float(np.abs(relative @ found - 1).max()))


def _check(calibration: Calibration, clients: int, think: float, seen: Window, tokens: int) -> Check:
    replica, link = calibration.model()
    world = World(clients, around(think), lambda random: float(tokens), 1, replica, link)
    found = simulate(world, requests=20_000, warm_up=1000)
    return Check(
        clients,
        think,
        seen.throughput,
        found.throughput,
        statistics.mean(seen.latencies),
        found.latency,
        quantile(seen.latencies, 0.99),
        found.quantile(0.99),
    )
