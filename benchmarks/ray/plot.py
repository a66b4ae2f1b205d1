"""Plots: replicas over collectors, and predictions against real runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.ray.calibration import Check
from benchmarks.ray.capacity import Answer
from benchmarks.ray.results import RayRun

PLOT = "ray_capacity.png"
_MEASURED, _PREDICTED = "tab:gray", "tab:blue"


def save_plot(run: RayRun, folder: Path) -> None:
    """Write the plot to ``folder``."""
    figure, axes = plt.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    figure.suptitle("Replicas of a reference that many collectors share")
    _replicas(axes[0], run.answers)
    checks = list(run.checks)
    _beside(axes[1], "calls per second", checks, [(c.throughput, c.predicted_throughput) for c in checks])
    _beside(
        axes[2], "mean latency, ms", checks, [(1e3 * c.latency, 1e3 * c.predicted_latency) for c in checks], legend=True
    )
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / PLOT, dpi=120)
    plt.close(figure)


def _replicas(axis: Any, answers: tuple[Answer, ...]) -> None:
    for speed in sorted({answer.tokens_per_second for answer in answers}, reverse=True):
        points = [(a.collectors, a.replicas) for a in answers if a.tokens_per_second == speed and a.replicas]
        axis.plot(*zip(*points, strict=True), marker="o", markersize=4, label=f"{speed:,.0f} tokens/s each")
    axis.set(xscale="log", yscale="log", xlabel="collectors", ylabel="replicas needed")
    axis.set_ylim(bottom=0.8)
    for which in (axis.xaxis, axis.yaxis):
        which.set_major_formatter("{x:,.0f}")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)


def _beside(
    axis: Any, label: str, checks: list[Check], pairs: list[tuple[float, float]], *, legend: bool = False
) -> None:
    where = range(len(checks))
    axis.bar([x - 0.2 for x in where], [measured for measured, _ in pairs], 0.4, color=_MEASURED, label="measured")
    axis.bar([x + 0.2 for x in where], [predicted for _, predicted in pairs], 0.4, color=_PREDICTED, label="predicted")
    for x, (measured, predicted) in zip(where, pairs, strict=True):
        axis.annotate(
            f"{predicted / measured - 1:+.0%}",
            (x + 0.2, predicted),
            xytext=(0, 2),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    axis.set_xticks(where, [f"{c.clients}\n{1e3 * c.think:g} ms" for c in checks])
    axis.set(xlabel="clients, and their pause between calls", ylabel=label)
    axis.margins(y=0.15)
    if legend:
        axis.legend(frameon=False, loc="upper left")
    axis.spines[["top", "right"]].set_visible(False)
