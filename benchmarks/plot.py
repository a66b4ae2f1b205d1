"""A figure of the speed-up, the memory saving, and the cost of each turn of a conversation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from benchmarks.results import Run, Turns

PLOT = "results.png"
_OURS, _THEIRS, _TARGET = "tab:blue", "tab:gray", "tab:red"


def save_plot(run: Run, folder: Path) -> None:
    """Write the figure to ``folder``."""
    turns = next((result.outcome.turns for result in run.results if result.outcome.turns), None)
    work = [result for result in run.results if result.outcome.difference is not None]  # imports compute no numbers
    size = (14 if turns else 10, max(4.2, 1.2 + 0.26 * len(work)))
    figure, axes = plt.subplots(1, 3 if turns else 2, figsize=size, layout="constrained")
    others = ", TRL (trl-) and plain forwards (the others)" if any(r.peer != "torchrl" for r in run.results) else ""
    figure.suptitle(f"The same work, the same numbers, beside torchrl {run.versions['torchrl']}{others}")
    _ratios(axes[0], "times faster", [(r.name, r.faster, r.targets.faster) for r in work])
    _ratios(axes[1], "times less peak memory", [(r.name, r.smaller, r.targets.smaller) for r in work if r.smaller])
    if turns:
        _cost_of_turns(axes[2], turns)
    figure.savefig(folder / PLOT, dpi=120)
    plt.close(figure)


def _ratios(axis: Any, label: str, rows: list[tuple[str, float, float | None]]) -> None:
    names = [f"{name}  {found:.{2 if found < 99.5 else 3}g}x" for name, found, _ in rows]
    axis.barh(names, [found - 1 for _, found, _ in rows], left=1, color=_OURS)
    axis.axvline(1, color=_THEIRS, linewidth=1)
    marked = [(i, target) for i, (_, _, target) in enumerate(rows) if target is not None]
    if marked:
        where, targets = zip(*marked, strict=True)
        axis.scatter(targets, where, marker="|", s=200, linewidths=2.5, color=_TARGET, label="target", zorder=3)
        axis.legend(loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
    axis.set(xscale="log", xlabel=label)
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_locator(NullLocator())
    axis.margins(x=0.1)
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)


def _cost_of_turns(axis: Any, turns: Turns) -> None:
    number = range(1, len(turns.new_tokens) + 1)
    for name, color, seconds in (("torchrl", _THEIRS, turns.theirs), ("here", _OURS, turns.ours)):
        cost = [1e3 * value / new for value, new in zip(seconds, turns.new_tokens, strict=True)]
        axis.plot(number, cost, marker="o", color=color, label=name)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set(xlabel="turn of a conversation", ylabel="ms for each new token", ylim=(0, None))
    axis.legend()
    axis.spines[["top", "right"]].set_visible(False)
