"""The time of calls: beside a local score, of eight callers beside torchrl's, and with the top 64."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks.agreement import largest_difference
from benchmarks.models import ModelSize
from benchmarks.ray.callers import Callers
from benchmarks.ray.figures import Figure
from benchmarks.ray.sides import SEQUENCES, Sides, data, numbers, reference
from benchmarks.workloads.base import OURS, THEIRS
from torchrl_llm_kl import LogProbScorer
from torchrl_llm_kl.scoring import Scorer, ScoreRequest
from torchrl_llm_kl.service import ScoringService

TOLERANCE = 1e-4
MANY = 8
#: By length, the goal as a multiple of torchrl's throughput. The model's own speed bounds both for long calls.
GOALS = {32: 8.0, 512: 2.0}
SERVICE = Path(__file__).parents[2] / "torchrl_llm_kl" / "service"


def milliseconds(call: Callable[[], object], repeats: int) -> list[float]:
    """Time some calls. Returns the milliseconds of each."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - begin))
    return times


def over_local(size: ModelSize, length: int, repeats: int) -> list[Figure]:
    """Time a call of one caller and the same call of a local scorer, in turn."""
    rows = torch.randint(size.vocab, (SEQUENCES, length), generator=torch.Generator().manual_seed(0))
    request, local = ScoreRequest.of(list(rows)), LogProbScorer(reference(size))
    with ScoringService(factory=partial(reference, size), memory=0) as service:
        scorer = service.model.make_scorer()
        run(scorer, request, 3)
        here, there, top = [], [], []
        for _ in range(repeats):
            here += milliseconds(lambda: run(local, request), 1)
            there += milliseconds(lambda: run(scorer, request), 1)
            top += milliseconds(lambda: run(scorer, request, top_k=64), 1)
        service.shutdown()
    one, other, best = (statistics.median(times) for times in (here, there, top))
    what = f"{SEQUENCES} x {length} tokens"
    return [
        Figure(f"a local score of {what}", one, "ms"),
        Figure(f"a call of {what} over the local score", other - one, "ms", most=3.0),
        Figure(f"a call of {what} with the top 64, times the plain call", best / other, "x"),
    ]


def run(scorer: Scorer, request: ScoreRequest, times: int = 1, *, top_k: int = 0) -> None:
    """Score a request."""
    for _ in range(times):
        scorer.run(request, scorer.options.but(top_k=top_k))


def agreement(sides: Sides, length: int) -> None:
    """Check that both libraries compute the same numbers, to 1e-4 nats."""
    ours, theirs = (numbers(sides.make(side)(data(sides.size, length, seed=7))) for side in (OURS, THEIRS))
    largest_difference(ours, theirs, tolerance=TOLERANCE, what=f"{length} tokens")


def beside_torchrl(callers: Callers, length: int, *, rounds: int, seconds: float, count: int = MANY) -> list[Figure]:
    """Measure calls per second of both libraries' ``RayRetrieveKL``, and the median ratio of adjacent windows."""
    found: dict[str, list[float]] = {THEIRS: [], OURS: []}
    for i in range(rounds + 1):
        for side in (THEIRS, OURS):
            window = callers.window("transform", side, length, callers=count, seconds=seconds if i else 0.3)
            if i:  # the first, shorter round warms up
                found[side].append(window.throughput)
    ratios = [ours / theirs for ours, theirs in zip(found[OURS], found[THEIRS], strict=True)]
    what = f"{count} callers of {SEQUENCES} x {length} tokens, both models served"
    return [
        Figure(f"{what}: torchrl", statistics.median(found[THEIRS]), "calls/s"),
        Figure(f"{what}: here", statistics.median(found[OURS]), "calls/s"),
        Figure(f"{what}: here over torchrl", statistics.median(ratios), "x", least=GOALS.get(length)),
    ]


def size_of_code() -> Figure:
    """Count the lines of the service's package, without blank lines, comments and docstrings."""
    import ast

    count = 0
    for path in SERVICE.rglob("*.py"):
        lines = path.read_text(encoding="utf-8").splitlines()
        code = {i for i, line in enumerate(lines, 1) if line.strip() and not line.strip().startswith("#")}
        for node in ast.walk(ast.parse("\n".join(lines))):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                code -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        count += len(code)
    return Figure("lines of code of the service", count, "lines", most=1900)
