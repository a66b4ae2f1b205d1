"""Compare two runs: their largest difference, a plot and a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table

from countdown.report import LABEL_BOX, Metrics, smooth

CLOCKS = {"seconds", "collecting"}  # differ in every run


def largest_difference(one: Sequence[Metrics], other: Sequence[Metrics]) -> float:
    """Largest difference of any metric except times, over all steps; infinite if the runs have different steps."""
    if [row["step"] for row in one] != [row["step"] for row in other]:
        return float("inf")
    return max(abs(a[key] - b[key]) for a, b in zip(one, other, strict=True) for key in a.keys() - CLOCKS)


def print_columns(title: str, columns: Mapping[str, Mapping[str, str]]) -> None:
    """Print a table with one column per run and one row per measurement."""
    table = Table(title=title, title_justify="left")
    table.add_column()
    for name in columns:
        table.add_column(name, justify="right")
    for what in next(iter(columns.values())):
        table.add_row(what, *[column[what] for column in columns.values()])
    Console().print(table)


def plot_runs(
    runs: Mapping[str, tuple[Sequence[Metrics], Sequence[float]]],
    path: Path,
    *,
    kl_target: float,
    killed_at: int | None,
    window: int = 10,
) -> None:
    """Plot the share of right answers, the KL with its target, and the time of collecting by step; one line per run.

    Args:
        runs: name -> (rows of metrics, accuracy on held-out problems before and, unless interrupted, after). The first line
            is wide and pale, so that it stays visible under another.
        path: of the image.
        kl_target: nats per answer.
        killed_at: the step in which the reference was killed; None if it was not.
        window: number of steps of the moving averages.
    """
    figure, (right, kl, clock) = plt.subplots(
        3, 1, figsize=(8, 8.5), sharex=True, layout="constrained", height_ratios=[3, 3, 2]
    )
    styles = [{"linewidth": 6, "alpha": 0.35}, {"linewidth": 1.5, "color": "black", "linestyle": (0, (4, 2))}]
    for (name, (rows, held_out)), style, marker in zip(runs.items(), styles, ("o", "x"), strict=False):
        steps = [row["step"] for row in rows]
        ends = (steps[0], steps[-1] + 1)[: len(held_out)]
        right.plot(steps, smooth([row["success"] for row in rows], window), label=name, **style)
        right.plot(ends, held_out, marker, color="black", markersize=9, fillstyle="none", clip_on=False)
        if marker == "o":
            for step, value in zip(ends, held_out, strict=True):
                right.annotate(
                    f"{value:.1%}", (step, value), (0, 10), textcoords="offset points", ha="center", bbox=LABEL_BOX
                )
        kl.plot(steps, smooth([row["kl"] for row in rows], window), label=name, **style)
        clock.plot(steps, [row["collecting"] for row in rows], label=name, **style)
    right.set(
        ylabel="share of right answers",
        ylim=(0, 1),
        title="One reference for several collectors; marks: held-out problems, greedy",
    )
    kl.axhline(kl_target, color="tab:red", linestyle=":", linewidth=1.5, label=f"target: {kl_target:g} nats")
    kl.set(ylabel="KL (nats per answer)")
    clock.set(
        yscale="log", ylabel="collecting\n(seconds a step)", xlabel=f"RL step (upper two: mean of {window} steps)"
    )
    for axis in (right, kl, clock):
        if killed_at is not None:
            axis.axvline(killed_at, color="tab:red", linewidth=1, label="the reference is killed")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(loc="upper right" if axis is clock else "lower right")
    figure.savefig(path, dpi=150)
    plt.close(figure)
