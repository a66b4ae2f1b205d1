"""Two runs side by side: whether they agree, in a picture and in a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table

from countdown.report import LABEL_BOX, Metrics, smooth

CLOCKS = {"seconds", "collecting"}  # what no two runs have in common


def largest_difference(one: Sequence[Metrics], other: Sequence[Metrics]) -> float:
    """Of any metric but the clocks, in any step; infinite if the runs have other steps."""
    if [row["step"] for row in one] != [row["step"] for row in other]:
        return float("inf")
    return max(abs(a[key] - b[key]) for a, b in zip(one, other, strict=True) for key in a.keys() - CLOCKS)


def print_columns(title: str, columns: Mapping[str, Mapping[str, str]]) -> None:
    """A table of runs: a column for each, a row for each thing that was measured."""
    table = Table(title=title, title_justify="left")
    table.add_column()
    for name in columns:
        table.add_column(name, justify="right")
    for what in next(iter(columns.values())):
        table.add_row(what, *[column[what] for column in columns.values()])
    Console().print(table)


def plot_runs(
    runs: Mapping[str, tuple[Sequence[Metrics], tuple[float, float]]],
    path: Path,
    *,
    kl_target: float,
    killed_at: int | None,
    window: int = 10,
) -> None:
    """Share of right answers, KL with its target, and seconds of collecting, over the steps; one line for each run.

    Args:
        runs: name -> (rows of metrics, accuracy on held-out problems before and after). The first is drawn broad and pale, so
            that another on top of it leaves it to be seen.
        path: of the picture.
        kl_target: nats per answer.
        killed_at: the step in which the reference was killed, if it was.
        window: steps of the means.
    """
    figure, (right, kl, clock) = plt.subplots(
        3, 1, figsize=(8, 8.5), sharex=True, layout="constrained", height_ratios=[3, 3, 2]
    )
    styles = [{"linewidth": 6, "alpha": 0.35}, {"linewidth": 1.5, "color": "black", "linestyle": (0, (4, 2))}]
    for (name, (rows, held_out)), style, marker in zip(runs.items(), styles, ("o", "x"), strict=False):
        steps = [row["step"] for row in rows]
        ends = (steps[0], steps[-1] + 1)
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
