"""The Ray service compared with torchrl's: ``python -m benchmarks.ray run`` and ``... render``."""

from __future__ import annotations

import os
import sys
import warnings
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.ray.measure import PARTS, measure, whole
from benchmarks.ray.report import markdown, print_tables
from benchmarks.ray.results import RESULTS, RayRun

PAGE = "RAY.md"
HERE = Path(__file__).parents[1]
QUICK = HERE.parent / "runs" / "bench-ray"

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)
Part = Enum("Part", {part: part for part in PARTS}, type=str)  # type: ignore[misc]

Out = Annotated[
    Path | None,
    typer.Option(help="Folder for the results; by default benchmarks/, runs/bench-ray for quick runs."),
]


@app.command()
def run(
    only: Annotated[list[Part] | None, typer.Option(help="May be repeated.")] = None,
    quick: Annotated[bool, typer.Option(help="The smallest sizes, to check that everything works.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds per case; the median is reported.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds per window.")] = 2.5,
    out: Out = None,
) -> None:
    """Measure, and write ray.json and RAY.md.

    With --only, the other parts in ray.json are kept if they were measured on the same machine with the same settings.
    """
    warnings.filterwarnings("ignore")
    console = Console()
    folder = out or (QUICK if quick else HERE)
    asked = [part.value for part in only or ()] or list(PARTS)
    empty = whole(f"python -m benchmarks.ray {' '.join(sys.argv[1:])}".strip(), quick=quick)
    earlier = RayRun.load(folder) if only and (folder / RESULTS).exists() else None
    if earlier is not None and not earlier.same_place(empty):
        raise typer.BadParameter(
            f"{folder / RESULTS} was measured with other settings or elsewhere: pass another --out, or run all parts."
        )
    columns = (TextColumn("{task.description:<44}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=None)

        def on_step(what: str, total: int) -> None:
            progress.update(task, description=what, total=total, advance=1)

        done = measure(empty, asked, quick=quick, rounds=rounds, seconds=seconds, on_step=on_step)
        progress.update(task, description="done", completed=progress.tasks[0].total)
    _write(done if earlier is None else earlier.updated(done), folder, console)


@app.command()
def render(out: Out = None) -> None:
    """Rewrite RAY.md from ray.json."""
    folder = out or HERE
    _write(_load(folder), folder, Console())


def _load(folder: Path) -> RayRun:
    if not (folder / RESULTS).exists():
        raise typer.BadParameter(f"{folder} has no {RESULTS}: run first.")
    return RayRun.load(folder)


def _write(result: RayRun, folder: Path, console: Console) -> None:
    print_tables(result, console)
    result.save(folder)
    (folder / PAGE).write_text(markdown(result), encoding="utf-8")
    console.print(f"written: {', '.join(os.path.relpath(folder / name) for name in (RESULTS, PAGE))}")


if __name__ == "__main__":
    app()
