"""How the cost of a score grows, beside its multiply-adds: ``python -m benchmarks.scaling``; five minutes.

Writes SCALING.md and scaling.png. Times are of one thread's processor, so that other load on the machine hardly counts; those
of replicas are the wall's.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import ray
import torch
import typer
from rich.console import Console
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks import environment
from benchmarks.data import Batch, conversation, grouped, one_prompt
from benchmarks.measure import MIB, Contender, HostMeter, alternate
from benchmarks.models import ModelSize, qwen2
from benchmarks.ray.cluster import cluster
from benchmarks.ray.sides import reference
from benchmarks.report import markdown_table
from benchmarks.roofline import BodyShape, needed_multiply_adds
from torchrl_llm_kl import LogProbScorer, Ragged
from torchrl_llm_kl.service import ScoringService

HERE = Path(__file__).parent
SIZE = ModelSize(vocab=8_000, hidden=256, layers=2)
PACK, TILE, TILES = 1024, (512, 2048), 5  # tokens of a forward, and the head's tiles of positions and tokens, on a CPU

Calls = Sequence[tuple[Ragged, Tensor]]  # sequences and scored tokens of each call


@dataclass(frozen=True)
class Axis:
    """What grows, its values, and the calls and the model of each value."""

    name: str
    values: tuple[int, ...]
    make: Callable[[int], tuple[ModelSize, Calls]]
    remember: bool = False


@dataclass(frozen=True)
class Point:
    """The figures of one value."""

    value: int
    seconds: float
    multiply_adds: int  # of one core
    peak_mib: float
    formula_mib: float


def _of(batch: Batch, size: ModelSize = SIZE) -> tuple[ModelSize, Calls]:
    return size, [batch.ragged()]


AXES = (
    Axis("answers to a prompt of 256", (1, 2, 4, 8, 16, 32, 64), lambda n: _of(one_prompt(n, 256, 64, SIZE.vocab))),
    Axis(
        "tokens of a prompt",
        (64, 128, 256, 512, 1024, 2048, 4096, 8192),
        lambda n: _of(one_prompt(4, n, 64, SIZE.vocab)),
    ),
    Axis(
        "vocabulary",
        (1024, 4096, 16_384, 65_536, 262_144),
        lambda n: _of(one_prompt(4, 64, 64, n), ModelSize(n, SIZE.hidden, SIZE.layers)),
    ),
    Axis(
        "turns of a conversation",
        (1, 2, 4, 8, 16, 32),
        lambda n: (SIZE, [batch.ragged() for batch in conversation(n, SIZE.vocab)]),
        remember=True,
    ),
)
CORES = os.cpu_count() or 1
REPLICAS = Axis("replicas of a service", (1, 2, 4), lambda n: _of(grouped(32, 4, SIZE.vocab)))


def measure(axis: Axis, values: Sequence[int], repeats: int) -> list[Point]:
    """Time and peak of each value, interleaved."""
    contenders, points = {}, []
    for value in values:
        size, calls = axis.make(value)
        model = qwen2(size)
        model.config.max_position_embeddings = 2**15  # its rotations are computed for any position
        scorer = LogProbScorer(model, remember=axis.remember)
        contenders[str(value)] = Contender(partial(_run, scorer, calls), prepare=scorer.forget)
        sequences, scored = calls[-1]
        if axis.remember:  # of the whole conversation: the answers of all turns
            scored = torch.cat([part for _, part in _answers(calls)])
        rows, wanted = (_lists(each) for each in (sequences, sequences.like(scored)))
        shape = BodyShape.of(model.config)
        points.append((value, needed_multiply_adds(rows, wanted, shape), formula(shape, calls, axis.remember)))
    found = alternate(contenders, _NoMeter(), repeats=repeats, warm_up=1, clock=time.process_time)
    return [
        Point(value, found[str(value)].seconds, needed, peak_of(contenders[str(value)]), least)
        for value, needed, least in points
    ]


def measure_replicas(values: Sequence[int], repeats: int) -> list[Point]:
    """The wall's time of one call on services of so many replicas, each with one thread; cores are shared by more of them."""
    contenders = {}
    size, [(sequences, scored)] = REPLICAS.make(1)
    with ExitStack() as services:
        if not ray.is_initialized():
            services.enter_context(cluster())
        for count in values:
            service = ScoringService(factory=partial(reference, size), num_replicas=count, num_cpus=0.5, memory=0)
            services.callback(service.shutdown)
            contenders[str(count)] = Contender(partial(_run, service.model.make_scorer(), [(sequences, scored)]))
        found = alternate(contenders, _NoMeter(), repeats=repeats, warm_up=1)
    shape = BodyShape.of(qwen2(size).config)
    needed = needed_multiply_adds(_lists(sequences), _lists(sequences.like(scored)), shape)
    return [Point(n, found[str(n)].seconds, needed // min(n, CORES), math.nan, math.nan) for n in values]


class _NoMeter(HostMeter):
    def reset(self) -> None:
        """Nothing: memory is measured apart."""

    def peak_mib(self) -> None:
        """Not measured."""


def peak_of(contender: Contender) -> float:
    """The most that torch has allocated at once, in MiB: the heap may hold more."""
    given, held, peak = contender.prepare(), 0, 0
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        contender.run(given)
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak / MIB


def _answers(calls: Calls) -> list[tuple[int, Tensor]]:
    """Of each turn its place and the mask of its own tokens."""
    before, found = 0, []
    for sequences, scored in calls:
        found.append((before, scored[before:]))
        before = sequences.values.shape[0]
    return found


def _lists(ragged: Ragged) -> list[list[Any]]:
    return [row.tolist() for row in ragged.to_list()]


def _run(scorer: LogProbScorer, calls: Calls, _: object) -> None:
    for sequences, scored in calls:
        scorer.score(sequences, scored)


def formula(shape: BodyShape, calls: Calls, remember: bool) -> float:
    """The peak of a score in MiB, as docs/scoring.md states it, with the packs and tiles of a CPU; and what is remembered."""
    sequences, scored = calls[-1]
    rows = [tuple(row.tolist()) for row in sequences.to_list()]
    prompt = next((i for i, column in enumerate(zip(*rows, strict=False)) if len(set(column)) > 1), len(rows[0]))
    tokens, wide = prompt + sum(len(row) - prompt for row in rows), 3 * shape.intermediate + 4.5 * shape.hidden
    # Tokens of each pack, and those of earlier packs that it attends to. A turn forwards only its own tokens.
    packs = [(min(PACK, tokens - start), min(start, prompt)) for start in range(0, tokens, PACK)]
    if remember:
        new = len(_answers(calls)[-1][1])
        packs = [(new, len(rows[0]) - new)]
    body = max(4 * own * (wide + before) + 4 * (shape.layers + 1) * before * 2 * shape.keys for own, before in packs)
    head = TILES * 4 * min(int(scored.sum()), PACK, TILE[0]) * min(shape.vocab, TILE[1])
    return (max(body, head) + 4 * shape.layers * packs[-1][0] * 2 * shape.keys * remember) / MIB


def slope(axis: Axis, values: Sequence[int], costs: Sequence[float]) -> float:
    """Exponent of the growth over the upper half of the values; of replicas over those that have a core each."""
    half = len(values) // 2 - (len(values) % 2 == 0)
    used = slice(max(sum(value <= CORES for value in values), 2)) if axis is REPLICAS else slice(half, None)
    x, y = ([math.log(each) for each in some[used]] for some in (values, costs))
    return statistics.linear_regression(x, y).slope


# ------------------------------------------------------------------ the report

_INTRO = """# How the cost grows

Written by `python -m benchmarks.scaling`; do not edit.

One score without gradient: {size}, on one thread of {processor}, in its processor's time, medians of {repeats}. "Theory"
is the multiply-adds that the work needs (every distinct prefix once, attention to all before it, the head where a token is
scored); the slopes are exponents over the upper half of each axis: 1 is linear. A smaller slope than in theory is a fixed cost
that still matters here. Memory is the peak above what was held before, beside the formula of
[scoring](../docs/scoring.md#memory-on-the-device) with the packs and tiles of a CPU. Replicas have a thread each, on {cores}
cores: their time is the wall's, the multiply-adds are those of one core, and the slope is that of replicas with a core each.
Callers and faults are in [RAY.md](RAY.md).

![Time and memory of each axis](scaling.png)
"""


def page(found: dict[Axis, list[Point]], repeats: int) -> str:
    """SCALING.md."""
    processor = environment.machine(torch.device("cpu"))["processor"]
    parts = [_INTRO.format(size=SIZE, processor=processor, repeats=repeats, cores=CORES)]
    rows = []
    for axis, points in found.items():
        values = [p.value for p in points]
        theory, here = (
            slope(axis, values, costs)
            for costs in ([float(p.multiply_adds) for p in points], [p.seconds for p in points])
        )
        rows.append([axis.name, f"{values[0]:,} to {values[-1]:,}", f"{theory:.2f}", f"{here:.2f}"])
    parts.append(markdown_table(["axis", "values", "slope in theory", "measured"], rows))
    for axis, points in found.items():
        parts.append(f"## {axis.name[0].upper()}{axis.name[1:]}\n")
        rows = [
            [
                f"{p.value:,}",
                f"{p.seconds:.3g} s",
                f"{p.multiply_adds / 1e9:.3g}",
                f"{2 * p.multiply_adds / p.seconds / 1e9:.0f}",
                *("" if math.isnan(mib) else f"{mib:.1f} MiB" for mib in (p.peak_mib, p.formula_mib)),
            ]
            for p in points
        ]
        parts.append(markdown_table(["", "time", "10^9 multiply-adds", "GFLOP/s", "peak", "formula"], rows))
    return "\n".join(parts)


def save_plot(found: dict[Axis, list[Point]], path: Path) -> None:
    """Time beside theory, scaled to the last point; and the peak beside the formula."""
    figure, axes = plt.subplots(2, len(found), figsize=(3.6 * len(found), 6.4), layout="constrained")
    for (axis, points), above, below in zip(found.items(), *axes, strict=True):
        values = [p.value for p in points]
        scale = points[-1].seconds / points[-1].multiply_adds
        above.plot(values, [p.multiply_adds * scale for p in points], "--", color="tab:gray", label="multiply-adds")
        above.plot(values, [p.seconds for p in points], marker="o", color="tab:blue", label="time")
        below.plot(values, [p.formula_mib for p in points], "--", color="tab:gray", label="formula")
        below.plot(values, [p.peak_mib for p in points], marker="o", color="tab:orange", label="peak")
        below.set_visible(axis is not REPLICAS)
        for panel, label in ((above, "seconds"), (below, "MiB")):
            panel.set(xscale="log", yscale="log", xlabel=axis.name, ylabel=label)
            panel.set_xticks(values, [f"{v // 1024}k" if v >= 1024 else str(v) for v in values])
            panel.minorticks_off()
            panel.spines[["top", "right"]].set_visible(False)
            panel.legend(frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each point; their median counts.")] = 3,
    quick: Annotated[bool, typer.Option(help="Only the two smallest values of each axis, as a smoke test.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = HERE,
) -> None:
    """Measure; write SCALING.md and scaling.png."""
    torch.set_num_threads(1)
    found, console = dict[Axis, list[Point]](), Console()
    for axis in AXES:
        found[axis] = measure(axis, axis.values[:2] if quick else axis.values, repeats)
        console.print(f"{axis.name}: {', '.join(f'{p.seconds:.3g} s' for p in found[axis])}")
    found[REPLICAS] = measure_replicas(REPLICAS.values[:2] if quick else REPLICAS.values, repeats)
    out.mkdir(parents=True, exist_ok=True)
    (out / "SCALING.md").write_text(page(found, repeats), encoding="utf-8")
    save_plot(found, out / "scaling.png")


if __name__ == "__main__":
    typer.run(main)
