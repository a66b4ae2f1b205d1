"""Many callers of mixed sizes, many prompts over replicas, top-k on the wire, and scores that are remembered."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.measure import Contender, alternate
from benchmarks.models import ModelSize
from benchmarks.ray.callers import quantile
from benchmarks.ray.overhead import NoMemory
from benchmarks.ray.sides import reference
from benchmarks.results import Goal
from torchrl_llm_kl import Ragged
from torchrl_llm_kl.scoring import ScoreRequest
from torchrl_llm_kl.service import ScoringService

MOST_BATCHES, LEAST_TOP_K, TOP_K = 3.0, 0.7, 64
#: Where a forward costs more than choosing 64 of its logits, as in any model that is trained in earnest.
LARGER = ModelSize(vocab=32_000, hidden=512, layers=4)


@dataclass(frozen=True)
class SizeOf:
    """Callers of one size, all of them at once.

    Args:
        name: of the size.
        callers: their number.
        sequences: per call.
        length: tokens per sequence.
        calls: that ended in the window.
        latency_p50: seconds.
        latency_p99: seconds.
    """

    name: str
    callers: int
    sequences: int
    length: int
    calls: int = 0
    latency_p50: float = 0.0
    latency_p99: float = 0.0


FULL = (SizeOf("small", 24, 4, 32), SizeOf("middle", 6, 16, 128), SizeOf("large", 2, 128, 512))
QUICK = (SizeOf("small", 3, 1, 8), SizeOf("large", 1, 4, 16))


@dataclass(frozen=True)
class Spread:
    """One call for many prompts over several replicas.

    Args:
        prompts: distinct ones.
        answers: to each.
        replicas: their number.
        requests: that the call became.
        client: seconds until all requests were sent.
        seconds: until all scores were there.
        balance: tokens of the busiest replica over their mean.
    """

    prompts: int
    answers: int
    replicas: int
    requests: float
    client: float
    seconds: float
    balance: float


@dataclass(frozen=True)
class Scale:
    """All figures; seconds.

    Args:
        sizes: callers by size.
        batch: a full batch of the large callers alone.
        spread: of one call.
        plain: a call for log-probs.
        top_k: the same call with the top 64 of each token.
        larger_plain: as ``plain``, of a model with 8 times the width and 32 times the vocabulary.
        larger_top_k: as ``top_k``, of that model.
        first: an epoch over all sequences, remembered on disk.
        second: the same epoch again.
    """

    sizes: tuple[SizeOf, ...]
    batch: float
    spread: Spread
    plain: float
    top_k: float
    larger_plain: float
    larger_top_k: float
    first: float
    second: float

    @classmethod
    def read(cls, data: dict[str, Any]) -> Scale:
        """From its JSON."""
        sizes = tuple(SizeOf(**each) for each in data["sizes"])
        return cls(**{**data, "sizes": sizes, "spread": Spread(**data["spread"])})

    @property
    def goals(self) -> list[Goal]:
        """The targets, with the measured values."""
        small = self.sizes[0]
        return [
            Goal(
                f"batch times for p99 of {small.callers} small callers beside large ones",
                "batches",
                small.latency_p99 / self.batch,
                MOST_BATCHES,
                at_least=False,
            ),
            Goal(f"of the plain throughput with top-{TOP_K}", "top-k", self.plain / self.top_k, LEAST_TOP_K),
            Goal(
                f"of the plain throughput with top-{TOP_K}, {LARGER}",
                "top-k",
                self.larger_plain / self.larger_top_k,
                LEAST_TOP_K,
            ),
        ]


def scale(size: ModelSize, *, quick: bool, seconds: float, repeats: int, on_step: Callable[[str], None]) -> Scale:
    """Measure everything, each on a separate service."""
    on_step("callers of mixed sizes")
    sizes, batch = _mixed(size, QUICK if quick else FULL, seconds=seconds)
    on_step("prompts over replicas")
    spread = _spread(size, *((8, 2, 2) if quick else (256, 8, 4)), repeats=repeats)
    on_step(f"top-{TOP_K} on the wire")
    plain, top_k = _top_k(size, *((2, 8) if quick else (32, 256)), repeats=repeats)
    larger = _top_k(size if quick else LARGER, *((2, 8) if quick else (4, 128)), repeats=repeats)
    on_step("scores remembered on disk")
    first, second = _epochs(size, *((2, 8) if quick else (64, 256)))
    return Scale(sizes, batch, spread, plain, top_k, *larger, first, second)


STEPS = 4  # calls of on_step


def _mixed(size: ModelSize, kinds: tuple[SizeOf, ...], *, seconds: float) -> tuple[tuple[SizeOf, ...], float]:
    """Latencies while all call at once, and the time of a full batch."""
    limit = max(kind.sequences * kind.length for kind in kinds) // 4
    with _service(size, max_tokens=limit) as service:
        full = _rows(size, limit // kinds[-1].length, kinds[-1].length, seed=0)
        scorer = service.model.make_scorer()
        scorer.score(full)
        took = [_seconds(lambda: scorer.score(full)) for _ in range(5)]
        found: dict[str, list[float]] = {kind.name: [] for kind in kinds}
        barrier, end = threading.Barrier(sum(kind.callers for kind in kinds)), [0.0]

        def run(kind: SizeOf, seed: int) -> None:
            own, rows = service.model.make_scorer(), _rows(size, kind.sequences, kind.length, seed=seed)
            if barrier.wait() == 0:
                end[0] = time.monotonic() + seconds
            while not end[0]:
                time.sleep(0.001)
            while time.monotonic() < end[0]:
                found[kind.name].append(_seconds(lambda: own.score(rows)))

        threads = [
            threading.Thread(target=run, args=(kind, 100 * k + i), daemon=True)
            for k, kind in enumerate(kinds)
            for i in range(kind.callers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    sizes = tuple(
        SizeOf(
            kind.name,
            kind.callers,
            kind.sequences,
            kind.length,
            len(found[kind.name]),
            quantile(found[kind.name], 0.5),
            quantile(found[kind.name], 0.99),
        )
        for kind in kinds
    )
    return sizes, median(took)


def _spread(size: ModelSize, prompts: int, answers: int, replicas: int, *, repeats: int) -> Spread:
    generator = torch.Generator().manual_seed(0)
    rows, mask = [], []
    for _ in range(prompts):
        prompt = torch.randint(size.vocab, (32,), generator=generator)
        for _ in range(answers):
            rows.append(torch.cat([prompt, torch.randint(size.vocab, (16,), generator=generator)]))
            mask.append(torch.arange(48) >= 32)
    sequences, chosen = Ragged.from_list(rows), torch.cat(mask)
    with _service(size, num_replicas=replicas, num_cpus=0.5) as service:
        scorer = service.model.make_scorer()
        scorer.score(sequences, chosen)
        before = service.stats()
        sent, took = [], []
        for _ in range(repeats):
            start = time.perf_counter()
            finish = scorer.begin(ScoreRequest.of(sequences, chosen))
            sent.append(time.perf_counter() - start)
            finish()
            took.append(time.perf_counter() - start)
        after = service.stats()
    tokens = [b["tokens"] - a["tokens"] for a, b in zip(before, after, strict=True)]
    requests = sum(b["requests"] - a["requests"] for a, b in zip(before, after, strict=True)) / repeats
    balance = max(tokens) * replicas / sum(tokens)
    return Spread(prompts, answers, replicas, requests, median(sent), median(took), balance)


def _top_k(size: ModelSize, sequences: int, length: int, *, repeats: int) -> tuple[float, float]:
    rows = _rows(size, sequences, length, seed=0)
    with _service(size) as service:
        scorer = service.model.make_scorer()
        steps = {
            "plain": Contender(lambda _: scorer.evaluate(rows)),
            "top-k": Contender(lambda _: scorer.evaluate(rows, top_k=min(TOP_K, size.vocab))),
        }
        found = alternate(steps, NoMemory(), repeats=max(repeats, 5), warm_up=1)
    return found["plain"].seconds, found["top-k"].seconds


def _epochs(size: ModelSize, sequences: int, length: int) -> tuple[float, float]:
    from torchrl_llm_kl import RememberedModel

    rows = _rows(size, sequences, length, seed=0)
    with tempfile.TemporaryDirectory() as folder, _service(size) as service:
        service.model.make_scorer().score(rows)
        scorer = RememberedModel(service.model, folder).make_scorer()
        first, second = (_seconds(lambda: scorer.score(rows)) for _ in range(2))
        return first, second


@contextmanager
def _service(size: ModelSize, **options: Any) -> Iterator[ScoringService]:
    service = ScoringService(factory=partial(reference, size), memory=0, **options)
    try:
        yield service
    finally:
        service.shutdown()


def _rows(size: ModelSize, sequences: int, length: int, *, seed: int) -> Ragged:
    generator = torch.Generator().manual_seed(seed)
    return Ragged.from_list(list(torch.randint(size.vocab, (sequences, length), generator=generator)))


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
