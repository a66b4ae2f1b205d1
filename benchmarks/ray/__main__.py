"""The Ray service compared with torchrl's: ``python -m benchmarks.ray run``, ``... capacity``, ``... render``."""

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

from benchmarks.ray.capacity import Limits, Work, replicas_needed, with_model
from benchmarks.ray.measure import PARTS, measure, whole
from benchmarks.ray.plot import PLOT, save_plot
from benchmarks.ray.report import markdown, print_answer, print_tables
from benchmarks.ray.results import RESULTS, RayRun

PAGE = "RAY.md"
HERE = Path(__file__).parents[1]
PICTURES = HERE.parent / "docs"
QUICK = HERE.parent / "runs" / "bench-ray"

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)
Part = Enum("Part", {part: part for part in PARTS}, type=str)  # type: ignore[misc]

Out = Annotated[
    Path | None,
    typer.Option(help="Folder for the results; by default benchmarks/ and docs/, runs/bench-ray for quick runs."),
]


@app.command()
def run(
    only: Annotated[list[Part] | None, typer.Option(help="May be repeated.")] = None,
    quick: Annotated[bool, typer.Option(help="The smallest sizes, to check that everything works.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds per case; the median is reported.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds per window.")] = 2.5,
    out: Out = None,
) -> None:
    """Measure, and write ray.json, RAY.md and ray_capacity.png.

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
    _write(done if earlier is None else earlier.updated(done), folder, out, console)


@app.command()
def render(out: Out = None) -> None:
    """Rewrite RAY.md and ray_capacity.png from ray.json."""
    folder = out or HERE
    _write(_load(folder), folder, out, Console())


@app.command()
def capacity(
    collectors: Annotated[int, typer.Option(min=1, help="Number of collectors.")],
    tokens_per_second: Annotated[
        float, typer.Option(min=0.001, help="Tokens per second that each collector generates.")
    ],
    sequences: Annotated[int, typer.Option(min=1, help="Sequences per request.")] = Work.sequences,
    prompt: Annotated[int, typer.Option(min=0, help="Tokens per prompt.")] = Work.prompt,
    response: Annotated[int, typer.Option(min=1, help="Tokens per response.")] = Work.response,
    prompts: Annotated[int, typer.Option(min=1, help="Distinct prompts per request.")] = Work.prompts,
    lost: Annotated[
        float, typer.Option(help="Share of a collector's time that it may lose to waiting for others.")
    ] = Limits.lost,
    p99_ms: Annotated[float | None, typer.Option(help="Milliseconds that 99 of 100 requests may take.")] = None,
    fixed_ms: Annotated[
        float | None, typer.Option(help="Milliseconds per batch of your model, instead of the calibrated ones.")
    ] = None,
    model_tokens_per_second: Annotated[
        float | None, typer.Option(min=1, help="Tokens per second of your model, instead of the calibrated ones.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of ray.json.")] = None,
) -> None:
    """Predict the number of replicas for a number of collectors."""
    console = Console()
    calibration = _load(out or HERE).calibration
    if calibration is None:
        raise typer.BadParameter(f"{RESULTS} holds no calibration: run `python -m benchmarks.ray run --only capacity`.")
    replica, link = calibration.model()
    replica = with_model(replica, fixed=None if fixed_ms is None else fixed_ms / 1e3, rate=model_tokens_per_second)
    work = Work(tokens_per_second, sequences, prompt, response, prompts)
    limits = Limits(lost, None if p99_ms is None else p99_ms / 1e3)
    with console.status("simulating"):
        answer = replicas_needed(work, collectors, replica, link, limits)
    print_answer(answer, console)
    if answer.replicas is None:
        console.print(
            "No number of replicas keeps within the limits: even a dedicated service is too slow for a collector."
        )
        raise typer.Exit(1)


def _load(folder: Path) -> RayRun:
    if not (folder / RESULTS).exists():
        raise typer.BadParameter(f"{folder} has no {RESULTS}: run first.")
    return RayRun.load(folder)


def _write(result: RayRun, folder: Path, out: Path | None, console: Console) -> None:
    print_tables(result, console)
    result.save(folder)
    (folder / PAGE).write_text(markdown(result), encoding="utf-8")
    pictures = PICTURES if folder == HERE else folder
    written = [folder / RESULTS, folder / PAGE]
    if result.answers:
        save_plot(result, pictures)
        written.append(pictures / PLOT)
    console.print(f"written: {', '.join(map(os.path.relpath, written))}")


if __name__ == "__main__":
    app()
