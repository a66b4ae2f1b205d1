"""The output of a run: progress, one line of metrics per step, a plot of the curves, and a table."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display needed
import matplotlib.pyplot as plt
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

Metrics = dict[str, float]

LABEL_BOX = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}


class MetricsFile:
    """Writes ``metrics.jsonl``: one JSON object per step, readable during the run.

    Args:
        path: of the file, which is overwritten.
        rows: of earlier steps.
        writes: whether to write the file, which one of several ranks does.
    """

    def __init__(self, path: Path, rows: Sequence[Metrics] = (), *, writes: bool = True) -> None:
        self.path, self.rows, self._writes = path, list[Metrics](), writes
        if writes:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")
        for row in rows:
            self.append(row)

    def append(self, row: Metrics) -> None:
        """Store the row and write it to the file."""
        self.rows.append(row)
        if self._writes:
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")


def keep_earlier_run(folder: Path, names: Sequence[str]) -> None:
    """Move the files and folders ``names`` of an earlier run from ``folder`` to ``folder/earlier-1``, -2, ..., and say so."""
    found = [folder / name for name in names if (folder / name).exists()]
    if not found:
        return
    number = 1
    while (folder / f"earlier-{number}").exists():
        number += 1
    earlier = folder / f"earlier-{number}"
    earlier.mkdir()
    for path in found:
        path.rename(earlier / path.name)
    print(f"{folder} holds an earlier run: moved it to {earlier}", flush=True)


@contextmanager
def progress(name: str, total: int, *, shown: bool = True) -> Iterator[Callable[[str], None]]:
    """Show the progress of ``total`` steps; yields a function to call after each step, with a status text.

    A bar on a terminal. Elsewhere lines: one at once, then one every five seconds, and one at the end. Nothing with
    ``shown=False``, for all but one of several ranks.
    """
    if not shown:
        yield lambda status: None
        return
    if Console().is_terminal:
        columns = (
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[status]}"),
        )
        with Progress(TextColumn("{task.description}"), *columns) as bar:
            task = bar.add_task(name, total=total, status="")
            yield lambda status: bar.update(task, advance=1, status=status)
        return
    start = printed = time.perf_counter()
    done = 0
    print(f"{name}: {total} steps", flush=True)

    def advance(status: str) -> None:
        nonlocal done, printed
        done, now = done + 1, time.perf_counter()
        if done == total or now - printed >= 5:
            printed = now
            print(f"{name}: {done}/{total}, {now - start:.0f} s  {status}", flush=True)

    yield advance


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Mean of the last ``window`` values (fewer at the start)."""
    return [sum(values[max(0, i + 1 - window) : i + 1]) / min(i + 1, window) for i in range(len(values))]


def plot_curves(
    rows: Sequence[Metrics],
    path: Path,
    *,
    kl_target: float | None,
    held_out: Sequence[float],
    algorithm: str = "grpo",
    window: int = 10,
) -> None:
    """Plot reward and KL by step, and the accuracy on held-out problems.

    Args:
        rows: metrics of each step.
        path: of the image.
        kl_target: nats per answer; None for a run without a KL penalty, which has no coefficient either.
        held_out: accuracy before the first step, and after the last one if the run got there.
        algorithm: its name, for the title.
        window: number of steps of the moving averages.
    """
    heights = [3, 3] if kl_target is None else [3, 3, 2]
    figure, axes = plt.subplots(
        len(heights), 1, figsize=(8, 8.5 * sum(heights) / 8), sharex=True, layout="constrained", height_ratios=heights
    )
    steps = [row["step"] for row in rows]
    reward, kl = axes[:2]

    def draw(axis: plt.Axes, key: str, label: str, color: str) -> None:
        values = [row[key] for row in rows]
        axis.plot(steps, values, color=color, alpha=0.25, linewidth=1)
        axis.plot(steps, smooth(values, window), color=color, linewidth=2, label=label)

    draw(reward, "reward", "reward of sampled answers (1 right, 0.1 wrong, 0 no answer)", "tab:blue")
    if kl_target is not None:
        draw(reward, "penalised_reward", "the same − coefficient × KL: what is maximised", "tab:orange")
    ends = [steps[0], steps[-1] + 1][: len(held_out)]
    reward.plot(ends, held_out, "o", color="black", label="share right, held-out problems, greedy", clip_on=False)
    for step, value in zip(ends, held_out, strict=True):
        reward.annotate(f"{value:.1%}", (step, value), (0, 9), textcoords="offset points", ha="center", bbox=LABEL_BOX)
    reward.set(
        ylabel="mean per answer (dimensionless)",
        ylim=(0, 1),
        title=f"{algorithm} on Countdown" + ("" if kl_target is None else " with an adaptive KL penalty"),
    )
    reward.legend(loc="best")
    draw(kl, "kl", "KL(policy ‖ reference)", "tab:red")
    if kl_target is not None:
        kl.axhline(kl_target, color="black", linestyle="--", linewidth=1.2, label=f"target: {kl_target:g} nats")
        coefficient = axes[2]
        coefficient.plot(steps, [row["coefficient"] for row in rows], color="tab:purple", linewidth=2)
        coefficient.set(ylabel="KL coefficient\n(reward per nat)")
        coefficient.set_ylim(bottom=0)
    kl.set(ylabel="KL (nats per answer)")
    kl.set_ylim(bottom=min(0.0, *(row["kl"] for row in rows)))
    kl.legend(loc="lower right")
    axes[-1].set(xlabel=f"RL step (thick lines: mean of {window} steps)")
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def totals(rows: Sequence[Metrics], kl_target: float | None) -> dict[str, str]:
    """A summary of a run: label -> figure."""
    target = {} if kl_target is None else {"its target": f"{kl_target:.2f} nats per answer"}
    seconds = rows[-1]["seconds"]
    last_half = [row["kl"] for row in rows[len(rows) // 2 :]]
    tokens, generated = sum(row["tokens"] for row in rows), sum(row["answer_tokens"] for row in rows)
    return {
        "KL to the reference, mean of the last half": f"{sum(last_half) / len(last_half):.2f} nats per answer",
        **target,
        "RL": f"{len(rows)} steps, {seconds:.0f} s",
        "tokens through RL": f"{tokens / seconds:.0f} /s ({generated / seconds:.0f} /s generated)",
    }


def print_table(title: str, rows: dict[str, str]) -> None:
    """Print a table of labels and figures."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    for row in rows.items():
        table.add_row(*row)
    Console().print(table)
