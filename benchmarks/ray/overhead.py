"""Overhead of the service per call, and the stages of a call."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean
from typing import Any

import ray
import torch

from benchmarks.agreement import largest_difference
from benchmarks.measure import Contender, alternate
from benchmarks.models import ModelSize
from benchmarks.ray.comparison import TOLERANCE
from benchmarks.ray.sides import SEQUENCES, reference
from benchmarks.ray.wire import watched
from torchrl_llm_kl import LogProbScorer, Ragged


@dataclass(frozen=True)
class Overhead:
    """A call of a single caller; seconds.

    Args:
        length: tokens per sequence.
        local: of a scorer in this process; the median.
        remote: of the service; the median.
        stages: of a remote call; means.
        bare: of a Ray actor with only a scorer; the median. The lower bound with Ray.
    """

    length: int
    local: float
    remote: float
    stages: dict[str, float]
    bare: float

    @property
    def seconds(self) -> float:
        """Seconds more than locally."""
        return self.remote - self.local


class _Bare:
    """An actor that scores calls one after another."""

    def __init__(self, size: ModelSize) -> None:
        torch.set_num_threads(1)
        self._scorer = LogProbScorer(reference(size))

    def score(self, tokens: bytes, lengths: list[int]) -> bytes:
        values = torch.frombuffer(bytearray(tokens), dtype=torch.int64)
        found: bytes = self._scorer.score(Ragged.from_list(list(values.split(lengths)))).values.numpy().tobytes()
        return found


class NoMemory:
    """Measures time only: reading the memory would distort such short calls."""

    def reset(self) -> None:
        """Nothing to start."""

    def wait(self) -> None:
        """Nothing to wait for."""

    def peak_mib(self) -> float | None:
        """Not measured."""
        return None


def overhead(model: Any, size: ModelSize, length: int, *, repeats: int) -> Overhead:
    """A remote and a local scorer on the same sequences, interleaved."""
    rng = torch.Generator().manual_seed(3)
    sequences = Ragged.from_list(list(torch.randint(size.vocab, (SEQUENCES, length), generator=rng)))
    local, remote = LogProbScorer(reference(size)), model.make_scorer()
    found, expected = remote.score(sequences).values, local.score(sequences).values
    largest_difference(found, expected, tolerance=TOLERANCE, what="the service beside a local scorer")
    actor: Any = ray.remote(num_cpus=1)(_Bare)
    bare, lengths = actor.remote(size), sequences.lengths.tolist()
    tokens = sequences.values.numpy().tobytes()
    contenders = {
        "local": Contender(lambda _: local.score(sequences)),
        "bare": Contender(lambda _: ray.get(bare.score.remote(tokens, lengths))),
        "remote": Contender(lambda _: remote.score(sequences)),
    }
    times = alternate(contenders, NoMemory(), repeats=repeats, warm_up=5)
    stages = _stages(lambda: remote.score(sequences), lambda: model.call("stats"), repeats=repeats)
    ray.kill(bare)
    return Overhead(length, times["local"].seconds, times["remote"].seconds, stages, times["bare"].seconds)


def _stages(score: Callable[[], object], stats: Callable[[], dict[str, Any]], *, repeats: int) -> dict[str, float]:
    clock = time.perf_counter
    marks: dict[str, float] = {}

    def remote(call: Callable[[], Any], _: Any) -> Any:
        marks.setdefault("asked", clock())
        answer = call()
        marks["sent"] = clock()
        return answer

    def get(call: Callable[[], Any], _: Any) -> Any:
        answer = call()
        marks["answered"] = clock()
        return answer

    before, rows = stats(), []
    with watched(remote, get):
        for _ in range(repeats):
            marks.clear()
            start = clock()
            score()
            end = clock()
            rows.append((marks["asked"] - start, marks["sent"] - marks["asked"], end - marks["answered"], end - start))
    batches = stats()["batches"] - before["batches"]
    in_model = (stats()["busy"] - before["busy"]) / batches
    prepare, submit, scatter, whole = (mean(column) for column in zip(*rows, strict=True))
    return {
        "client: sequences to bytes": prepare,
        "client: Ray takes the call": submit,
        "Ray and the actor's event loop, there and back": whole - prepare - submit - scatter - in_model,
        "actor: model, in its thread": in_model,
        "client: bytes to scores": scatter,
    }
