"""The KL study: its cells, the file of its results, their statistics, and the page that shows them."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display needed
import matplotlib.pyplot as plt
import torch

from countdown.report import smooth

Result = dict[str, Any]

TARGET = 0.5  # nats per answer
TUNING_SEEDS = tuple(range(10))
TARGET_SEEDS = tuple(range(10, 20))
PLACEMENT_SEEDS = tuple(range(20, 25))


@dataclass(frozen=True)
class Scale:
    """The size of a run."""

    steps: int = 100
    warmup_steps: int = 300
    num_prompts: int = 32
    group_size: int = 8
    lr: float = 3e-4
    held_out: int = 200
    samples: int = 4  # answers to each held-out problem, for the true KL


#: The demo's size; one that fits 125 runs into an hour on two cores; one for tests.
DEMO = Scale()
SHORT = Scale(steps=80, num_prompts=12)
QUICK = Scale(steps=3, warmup_steps=25, num_prompts=2, group_size=3, held_out=8, samples=2)


@dataclass(frozen=True)
class Cell:
    """A setting of the study, which runs with several seeds.

    Args:
        study: ``"target"`` or ``"placement"``.
        kl_reward: the KL estimator in the reward.
        kl_loss: the KL estimator in the loss.
        coefficient: a constant, or one of the controllers, which hold the KL at ``TARGET``.
        temperature: of the sampler.
        top_k: of the sampler; None to sample from all tokens.
        scored_at: the temperature at which the answers are scored.
    """

    study: str
    kl_reward: str = "none"
    kl_loss: str = "none"
    coefficient: float | str = "pi"
    temperature: float = 1.0
    top_k: int | None = None
    scored_at: float = 1.0

    @property
    def placement(self) -> str:
        """Where the KL is."""
        for kind, where in ((self.kl_reward, "reward"), (self.kl_loss, "loss")):
            if kind != "none":
                return f"{kind} in the {where}"
        return "none"

    @property
    def sampler(self) -> str:
        """How the answers are drawn and scored."""
        if self.top_k is not None:
            return f"top {self.top_k}, scored without"
        if self.temperature != self.scored_at:
            return f"temperature {self.temperature:g}, scored at {self.scored_at:g}"
        return f"temperature {self.temperature:g}"

    def __str__(self) -> str:
        weight = "" if self.placement == "none" else f", {self.coefficient}"
        return f"{self.placement}{weight}; {self.sampler}"


def target_cells() -> list[Cell]:
    """The demo with each controller."""
    return [Cell("target", kl_reward="k1", coefficient=name) for name in ("pi", "ziegler")]


def placement_cells() -> list[Cell]:
    """Each placement with three constant coefficients and a target; then the samplers."""
    placements = [{"kl_reward": "k1"}, {"kl_loss": "k2"}, {"kl_loss": "k3"}, {"kl_loss": "exact"}]
    cells = [Cell("placement", coefficient=0.0)]
    for coefficient in ("pi", 0.1, 0.3, 0.03):
        cells += [Cell("placement", **placement, coefficient=coefficient) for placement in placements]  # type: ignore[arg-type]
    biased = [{"kl_reward": "k3"}, {"kl_loss": "k1"}]
    cells += [Cell("placement", **placement, coefficient=0.1) for placement in biased]  # type: ignore[arg-type]
    samplers = [{"temperature": 0.7}, {"temperature": 0.7, "scored_at": 0.7}, {"top_k": 3}]
    for placement in placements[:2]:
        cells += [Cell("placement", **placement, coefficient="pi", **sampler) for sampler in samplers]  # type: ignore[arg-type]
    return cells


# ------------------------------------------------------------------ results


class Results:
    """The results of all runs in a file, one JSON object per line, written as each run ends.

    A line that was cut off by the end of the process is dropped, and its run is repeated.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Result] = []
        if not path.exists():
            return
        text = path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            path.write_text(whole, encoding="utf-8")
        self.rows = [json.loads(line) for line in whole.splitlines()]

    def append(self, row: Result) -> None:
        """Add a row, and write it to the disk."""
        self.rows.append(row)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

    @property
    def processors(self) -> list[str]:
        """Names by ``torch.backends.cpu.get_cpu_capability()`` of the processors that ran, the one with most runs first."""
        return [name for name, _ in Counter(row["processor"] for row in self.rows).most_common()]

    def find(self, cell: Cell, scale: Scale, processor: str | None = None) -> dict[int, Result]:
        """The rows of a cell by seed, from one kind of processor; by default the one with most runs."""
        want = (asdict(cell), asdict(scale), processor or next(iter(self.processors), None))
        return {row["seed"]: row for row in self.rows if (row["cell"], row["scale"], row["processor"]) == want}

    def missing(self, cells: Iterable[Cell], seeds: Sequence[int], scale: Scale) -> list[tuple[Cell, int]]:
        """What is still to be run on this processor: all cells of a seed before the next seed."""
        here = torch.backends.cpu.get_cpu_capability()
        done = {cell: self.find(cell, scale, here) for cell in cells}
        return [(cell, seed) for seed in seeds for cell in done if seed not in done[cell]]


# ------------------------------------------------------------------ statistics

# 97.5 % quantiles of Student's t with 1, 2, ... degrees of freedom.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean and half the width of its 95 % interval (Student's t); NaN for the latter with a single value."""
    mean = sum(values) / len(values)
    if len(values) == 1:
        return mean, math.nan
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    t = _T[min(len(values) - 2, len(_T) - 1)]
    return mean, t * math.sqrt(variance / len(values))


def shown(values: Sequence[float], percent: bool = False) -> str:
    """``mean ± half the width of the interval``."""
    if not values:
        return "not run"
    mean, half = (100 * x if percent else x for x in interval(values))
    digits, unit = (1, " %") if percent else (2, "")
    return f"{mean:.{digits}f}{unit}" if math.isnan(half) else f"{mean:.{digits}f} ± {half:.{digits}f}{unit}"


def differences(a: Mapping[int, Result], b: Mapping[int, Result], key: str) -> list[float]:
    """``a - b`` for each seed that both have: pairs, since they share model, warm-up and order of problems."""
    return [a[seed][key] - b[seed][key] for seed in sorted(a.keys() & b.keys())]


def verdict(values: Sequence[float], sign: int) -> str:
    """Whether differences have the ``sign`` of a claim; 0: no difference."""
    if len(values) < 2:
        return "open: fewer than two seeds were run"
    mean, half = interval(values)
    if abs(mean) <= half:
        return "agrees: no difference seen" if sign == 0 else "not seen: the interval contains 0"
    return "agrees" if sign * mean > 0 else "disagrees"


# ------------------------------------------------------------------ holding the target


def target_summary(rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Of a run's metrics: the mean KL of the last half, the swing of the coefficient after the first third, both curves."""
    kls, coefficients = ([row[key] for row in rows] for key in ("kl", "coefficient"))
    last, later = kls[len(kls) // 2 :], coefficients[len(kls) // 3 :]
    return {
        "kl_last_half": sum(last) / len(last),
        "swing": max(later) / min(later),
        "kls": [round(x, 4) for x in kls],
        "coefficients": [round(x, 5) for x in coefficients],
    }


def target_table(results: Results, seeds: Sequence[int], scale: Scale) -> str:
    """One row per seed, and a summary of all."""
    pi, ziegler = (results.find(cell, scale) for cell in target_cells())
    lines = [
        "| seed | KL, PI | KL, Ziegler | swing, PI | swing, Ziegler | right before RL | after, PI | after, Ziegler |",
        "|---|---|---|---|---|---|---|---|",
    ]

    def cells(runs: Mapping[int, Result], seed: int, key: str, form: Callable[[float], str]) -> str:
        return form(runs[seed][key]) if seed in runs else "not run"

    for seed in seeds:
        row = [str(seed)]
        for key, form in (("kl_last_half", "{:.3f}".format), ("swing", "{:.1f}".format)):
            row += [cells(runs, seed, key, form) for runs in (pi, ziegler)]
        row.append(cells(pi if seed in pi else ziegler, seed, "accuracy_before", "{:.1%}".format))
        row += [cells(runs, seed, "accuracy_after", "{:.1%}".format) for runs in (pi, ziegler)]
        lines.append(f"| {' | '.join(row)} |")
    text = [
        "\n".join(lines),
        f"Settings were chosen on seeds {TUNING_SEEDS[0]} to {TUNING_SEEDS[-1]}, not on these.",
    ]
    for name, runs in (("PI control", pi), ("Ziegler's rule", ziegler)):
        done = [runs[seed] for seed in seeds if seed in runs]
        if done:
            close = sum(abs(run["kl_last_half"] / TARGET - 1) <= 0.1 for run in done)
            calm = sum(run["swing"] <= 4 for run in done)
            kl = shown([run["kl_last_half"] for run in done])
            text.append(
                f"{name}, {len(done)} of {len(seeds)} seeds run: the mean KL of the last half is within 10 % of the target in "
                f"{close}, the coefficient within a factor of 4 after the first third in {calm}; KL {kl}."
            )
    both = [seed for seed in seeds if seed in pi and seed in ziegler]
    if both:
        apart = differences({s: pi[s] for s in both}, ziegler, "accuracy_after")
        text.append(
            f"Accuracy after RL, PI control minus Ziegler's rule, {len(both)} pairs: {shown(apart, percent=True)}."
        )
    return "\n\n".join(text)


def processor_table(results: Results, seeds: Sequence[int], scale: Scale) -> str:
    """The demo with PI control under each setting of the processor: mean and range over the seeds."""
    columns = {"accuracy_before": "{:.1%}", "accuracy_after": "{:.1%}", "kl_last_half": "{:.2f}", "swing": "{:.1f}"}
    lines = [
        "| processor | seeds | right before RL | right after | KL of the last half | swing |",
        "|---|---|---|---|---|---|",
    ]
    by_processor = {name: results.find(target_cells()[0], scale, name) for name in results.processors}
    found = {name: [runs[seed] for seed in seeds if seed in runs] for name, runs in by_processor.items()}
    for name, runs in {**found, "all": [run for some in found.values() for run in some]}.items():
        row = [name, str(len(runs))]
        for key, form in columns.items():
            values = [run[key] for run in runs]
            low, mean, high = (min(values), sum(values) / len(values), max(values)) if values else (math.nan,) * 3
            row.append(f"{form.format(mean)} ({form.format(low)} to {form.format(high)})")
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def draw_target(results: Results, seeds: Sequence[int], scale: Scale, path: Path) -> None:
    """KL and coefficient by step, one line per seed and a column per controller."""
    cells = target_cells()
    figure, axes = plt.subplots(2, len(cells), figsize=(9, 5.5), sharex=True, sharey="row", layout="constrained")
    for column, (cell, title) in enumerate(zip(cells, ("PI control", "Ziegler's rule"), strict=True)):
        kl, coefficient = axes[0, column], axes[1, column]
        runs = [run for seed, run in results.find(cell, scale).items() if seed in seeds]
        for run in runs:
            kl.plot(smooth(run["kls"], 10), color="tab:red", alpha=0.5, linewidth=1)
            coefficient.plot(run["coefficients"], color="tab:purple", alpha=0.5, linewidth=1)
        kl.axhline(TARGET, color="black", linestyle="--", linewidth=1)
        kl.set(title=f"{title}: {len(runs)} seeds")
        coefficient.set(yscale="log", xlabel="RL step")
    axes[0, 0].set(ylabel="KL (nats per answer,\nmean of 10 steps)")
    axes[1, 0].set(ylabel="KL coefficient")
    _finish(figure, path)


# ------------------------------------------------------------------ placement


def placement_table(results: Results, seeds: Sequence[int], scale: Scale) -> str:
    """One row per cell: means over seeds with their 95 % intervals."""
    lines = [
        "| KL | coefficient | sampler | runs | true KL | as estimated in training | right, greedy | right, sampled | "
        "coefficient at the end |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for cell in placement_cells():
        runs = [run for seed, run in results.find(cell, scale).items() if seed in seeds]
        constant = not isinstance(cell.coefficient, str)
        weight = "—" if cell.placement == "none" else (f"{cell.coefficient:g}" if constant else f"KL {TARGET:g}")  # type: ignore[str-format]
        row = [cell.placement, weight, cell.sampler, f"{len(runs)} of {len(seeds)}"]
        row += [shown([run[key] for run in runs]) for key in ("true_kl", "kl_estimated")]
        row += [shown([run[key] for run in runs], percent=True) for key in ("accuracy_after", "sampled_after")]
        row.append("—" if constant else shown([run["coefficient_end"] for run in runs]))
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


#: What a paper says, the two cells that test it, the measurement, the sign of their difference, and the difference in words.
CLAIMS: tuple[tuple[str, Cell, Cell, str, int, str], ...] = (
    (
        "gradients without bias lead to better in-domain performance (arXiv 2512.21852)",
        Cell("placement", kl_reward="k1"),
        Cell("placement", kl_loss="k3"),
        "sampled_after",
        1,
        "right answers at the same target, `k1` in the reward minus `k3` in the loss",
    ),
    (
        "the common `k3` in the loss does not have the gradient of the reverse KL (arXiv 2512.21852, 2510.01555)",
        Cell("placement", kl_loss="k3", coefficient=0.1),
        Cell("placement", kl_loss="exact", coefficient=0.1),
        "true_kl",
        1,
        "true KL at a coefficient of 0.1, `k3` minus `exact` in the loss",
    ),
    (
        "gradients with bias can make the training unstable (arXiv 2512.21852): `k1` in the loss",
        Cell("placement", kl_loss="k1", coefficient=0.1),
        Cell("placement", kl_reward="k1", coefficient=0.1),
        "true_kl",
        1,
        "true KL at a coefficient of 0.1, `k1` in the loss minus `k1` in the reward",
    ),
    (
        "gradients with bias can make the training unstable (arXiv 2512.21852): `k3` in the reward",
        Cell("placement", kl_reward="k3", coefficient=0.1),
        Cell("placement", kl_reward="k1", coefficient=0.1),
        "sampled_after",
        -1,
        "right answers at a coefficient of 0.1, `k3` minus `k1` in the reward",
    ),
    (
        "`k2` in the loss has the gradient of `k1` in the reward on policy (arXiv 2510.01555)",
        Cell("placement", kl_loss="k2"),
        Cell("placement", kl_reward="k1"),
        "sampled_after",
        0,
        "right answers at the same target, `k2` in the loss minus `k1` in the reward",
    ),
)


def claims_table(results: Results, scale: Scale) -> str:
    """Each claim with its measurement, in pairs of one seed, and what follows."""
    lines = ["| claim | measured | pairs | difference | |", "|---|---|---|---|---|"]
    for claim, one, other, key, sign, what in CLAIMS:
        apart = differences(results.find(one, scale), results.find(other, scale), key)
        difference = shown(apart, percent=key != "true_kl")
        lines.append(f"| {claim} | {what} | {len(apart)} | {difference} | {verdict(apart, sign)} |")
    return "\n".join(lines)


def draw_placement(results: Results, seeds: Sequence[int], scale: Scale, path: Path) -> None:
    """Right answers against the true KL, with 95 % intervals: the placements, then the samplers."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 5), sharey=True, layout="constrained")
    edges = {left: 1.5, right: 4.0}  # a point beyond is drawn at the edge, with its numbers
    groups: dict[tuple[Any, str], list[Cell]] = {}
    for cell in placement_cells():
        plain = cell.sampler == "temperature 1"
        if plain:
            groups.setdefault((left, cell.placement), []).append(cell)
        if not plain or cell.coefficient == "pi":
            groups.setdefault((right, f"{cell.placement}, {cell.sampler}"), []).append(cell)
    for (axis, name), cells in groups.items():
        points = []
        for cell in cells:
            runs = [run for seed, run in results.find(cell, scale).items() if seed in seeds]
            if runs:
                pair = (interval([run[key] for run in runs]) for key in ("true_kl", "sampled_after"))
                points.append((cell, [0.0 if math.isnan(x) else x for both in pair for x in both]))
        points.sort(key=lambda point: point[1][0])
        edge = edges[axis]
        far = [point for point in points if point[1][0] > edge]
        points = [point for point in points if point[1][0] <= edge]
        for _, (x, dx, y, dy) in far:
            drawn = axis.errorbar([edge], [y], [dy], fmt=">", capsize=2, clip_on=False, label=name)
            where = {"xytext": (-8, 5), "textcoords": "offset points", "ha": "right", "color": drawn[0].get_color()}
            axis.annotate(f"{x:.1f} ± {dx:.1f}", (edge, y), **where)
        if points:
            line = axis.plot([p[0] for _, p in points], [p[2] for _, p in points], alpha=0.4)[0]
            for number, (cell, (x, dx, y, dy)) in enumerate(points):
                marker = "s" if isinstance(cell.coefficient, str) else "o"
                axis.errorbar(
                    x, y, dy, dx, marker, color=line.get_color(), capsize=2, label=name if number == 0 else None
                )
    if not groups or not left.get_legend_handles_labels()[0]:
        left.text(0.5, 0.5, "no runs yet", transform=left.transAxes, ha="center")
    left.set(ylabel="right answers, held-out problems, sampled", title="placements (squares: held at the target)")
    right.set(title="samplers, KL held at the target as estimated")
    for axis in (left, right):
        axis.set_xlabel("true KL (nats per answer)")
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
    _finish(figure, path)


def _finish(figure: Any, path: Path) -> None:
    for axis in figure.axes:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


# ------------------------------------------------------------------ the page


def write_blocks(page: Path, blocks: Mapping[str, str]) -> None:
    """Replace the text between ``<!-- NAME -->`` and ``<!-- end -->`` for each block."""
    text = page.read_text(encoding="utf-8")
    for name, block in blocks.items():
        begin, end = f"<!-- {name} -->", "<!-- end -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"{page} has no block {begin} ... {end}: restore it.")
        text = f"{before}{begin}\n{block}\n{end}{after}"
    page.write_text(text, encoding="utf-8")
