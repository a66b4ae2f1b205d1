"""The output of the tutorial: progress of several processes, a table for each seed, and the summary."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

#: Progress of a process: seed, stage, steps done, steps of the stage, a few words.
Event = tuple[int, str, int, int, str]
Result = dict[str, Any]

GUESSES = {
    "accuracy": "implicit reward after DPO",
    "by_sft": "log-prob of the SFT model",
    "by_sft_per_token": "the same per token",
    "by_length": "length alone",
    "by_writer": "the writer alone",
}


@contextmanager
def progress() -> Iterator[Callable[[Event], None]]:
    """Show events: a bar for each seed on a terminal; elsewhere a line for each seed every ten seconds, and at its stages."""
    if Console().is_terminal:
        columns = (
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[status]}"),
        )
        with Progress(TextColumn("{task.description}"), *columns) as bars:
            tasks: dict[int, Any] = {}

            def show(event: Event) -> None:
                seed, stage, done, total, status = event
                if seed not in tasks:
                    tasks[seed] = bars.add_task("", total=None, status="")
                bars.update(
                    tasks[seed], description=f"seed {seed}: {stage}", completed=done, total=total, status=status
                )

            yield show
        return
    start, printed, stages = time.perf_counter(), dict[int, float](), dict[int, str]()

    def say(event: Event) -> None:
        seed, stage, done, total, status = event
        now = time.perf_counter()
        if stages.get(seed) != stage or now - printed[seed] >= 10 or done == total:
            stages[seed], printed[seed] = stage, now
            print(f"seed {seed}: {stage} {done}/{total}, {now - start:.0f} s  {status}", flush=True)

    yield say


def percent(result: Result, name: str) -> str:
    """A share with its standard error."""
    return f"{result[name]:.1%} ± {result[f'{name}_error']:.1%}"


def print_seed(result: Result) -> None:
    """The table of one seed."""
    table = Table(
        title=f"seed {result['seed']}: {result['questions_held_out']} questions held out, {result['pairs']} pairs of "
        f"{result['questions']} of them",
        title_justify="left",
    )
    for name in ("", "before", "after"):
        table.add_column(name, justify="left" if not name else "right")
    before, after = (
        f"{result[f'perplexity_{x}']:.2f} ± {result[f'perplexity_{x}_error']:.2f}" for x in ("before", "after")
    )
    table.add_row("perplexity of worked solutions, SFT", before, after)
    table.add_row("preference accuracy, DPO", "50.0% (all ties)", percent(result, "accuracy"))
    table.add_row("  at equal writers", "50.0% (all ties)", percent(result, "accuracy_equal_writers"))
    table.add_row("mean margin, nats", "0", f"{result['margin']:.3f} ± {result['margin_error']:.3f}")
    table.add_row("seconds (of CPU)", "", f"{result['seconds']:.0f} ({result['cpu_seconds']:.0f})")
    Console().print(table)


def summary(results: Sequence[Result]) -> str:
    """All seeds in Markdown: the figures, and simple guesses on the same pairs."""
    lines = [
        "| held out | " + " | ".join(f"seed {r['seed']}" for r in results) + " | mean |",
        "|---|" + "---|" * (len(results) + 1),
    ]

    def row(label: str, cells: list[str], mean: str) -> None:
        lines.append(f"| {label} | {' | '.join(cells)} | {mean} |")

    for when, label in (("before", "perplexity, untrained"), ("after", "perplexity after SFT")):
        values = [r[f"perplexity_{when}"] for r in results]
        errors = [r[f"perplexity_{when}_error"] for r in results]
        cells = [f"{v:.2f} ± {e:.2f}" for v, e in zip(values, errors, strict=True)]
        row(label, cells, f"{sum(values) / len(values):.2f}")
    row("preference accuracy before DPO (all ties)", ["50.0 %" for _ in results], "50.0 %")
    for suffix, pairs in (("", ""), ("_equal_writers", ", at equal writers")):
        for name, label in GUESSES.items():
            own = [mean_of(results[i : i + 1], name + suffix) for i in range(len(results))]
            emphasis = "**" if name == "accuracy" else ""
            cells = [
                f"{emphasis}{v:.1%} ± {e:.1%}{emphasis}".replace("%", " %")
                for v, e in [*own, mean_of(results, name + suffix)]
            ]
            row(label + pairs, cells[:-1], cells[-1])
    cells = [f"{v:.3f} ± {e:.3f}" for v, e in [*(mean_of([r], "margin") for r in results), mean_of(results, "margin")]]
    row("mean margin after DPO, nats", cells[:-1], cells[-1])
    row("pairs (questions)", [f"{r['pairs']} ({r['questions']})" for r in results], "")
    return "\n".join(lines) + "\n"


def mean_of(results: Sequence[Result], name: str) -> tuple[float, float]:
    """Mean over seeds, which hold out different questions, and its standard error."""
    number = len(results)
    return sum(r[name] for r in results) / number, sum(r[f"{name}_error"] ** 2 for r in results) ** 0.5 / number
