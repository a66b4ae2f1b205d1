"""Compare with torchrl: ``python -m benchmarks run``, ``python -m benchmarks render``."""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import environment
from benchmarks.plot import save_plot
from benchmarks.report import markdown, terminal_table
from benchmarks.results import RESULTS, Result, Run, Targets
from benchmarks.workloads import WORKLOADS, Settings

PAGE = "RESULTS.md"
HERE = Path(__file__).parent

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)


class Device(str, Enum):
    """Where the models run."""

    cpu = "cpu"
    cuda = "cuda"


class Weights(str, Enum):
    """The dtype of the models."""

    float32 = "float32"
    bfloat16 = "bfloat16"


Out = Annotated[
    Path | None, typer.Option(help="Folder of the results. Default: benchmarks, or runs/bench for quick runs.")
]


@app.command()
def run(
    only: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(WORKLOADS)}; may be repeated.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs per contender; the result is their median.")] = 7,
    quick: Annotated[bool, typer.Option(help="Use the smallest sizes, as a smoke test.")] = False,
    device: Annotated[Device, typer.Option()] = Device.cpu,
    dtype: Annotated[Weights, typer.Option(help="Dtype of the weights.")] = Weights.float32,
    threads: Annotated[int | None, typer.Option(min=1, help="Number of torch threads. Default: torch's own.")] = None,
    out: Out = None,
) -> None:
    """Measure, and write results.json, RESULTS.md and results.png.

    With --only, the other results in results.json are kept if they come from the same machine, versions and settings.
    """
    console = Console()
    if device is Device.cuda and not torch.cuda.is_available():
        console.print("--device cuda: torch found no CUDA device. Run `make bench` for the comparison on the CPU.")
        raise typer.Exit(1)
    if threads is not None:
        torch.set_num_threads(threads)
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("default", message=".*LogProbScorer")  # show if a scorer takes a slower path
    settings = Settings(repeats, quick, torch.device(device.value), getattr(torch, dtype.value))
    asked = [_known(name) for name in only or WORKLOADS]
    folder = out or _default_folder(settings)
    empty = Run(
        command=f"python -m benchmarks {' '.join(sys.argv[1:])}".strip(),
        settings=environment.described(settings),
        machine=environment.machine(settings.device),
        versions=environment.versions(),
        results=(),
    )
    earlier = Run.load(folder) if only and (folder / RESULTS).exists() else None
    if earlier is not None and not earlier.same_place(empty):
        raise typer.BadParameter(
            f"{folder / RESULTS} has other settings, versions or another machine: pass another --out, or run all."
        )
    names = [name for name in asked if device is Device.cpu or WORKLOADS[name].cuda]
    names = [name for name in names if dtype is Weights.float32 or WORKLOADS[name].half]
    done = _measure(names, settings, empty, console)
    _write(done if earlier is None else earlier.updated(done), folder, console)


@app.command()
def render(out: Out = None) -> None:
    """Rewrite RESULTS.md and results.png from results.json."""
    folder = out or HERE
    if not (folder / RESULTS).exists():
        raise typer.BadParameter(f"no {RESULTS} in {folder}: run the benchmark first.")
    _write(Run.load(folder), folder, Console())


def _known(name: str) -> str:
    if name not in WORKLOADS:
        raise typer.BadParameter(f"no workload {name!r}: expected one of {', '.join(WORKLOADS)}.")
    return name


def _measure(names: list[str], settings: Settings, empty: Run, console: Console) -> Run:
    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    results = []
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(names))
        for name in names:
            workload = WORKLOADS[name]
            progress.update(task, description=f"{name}: check agreement")
            told = replace(settings, on_run=lambda who, name=name: progress.update(task, description=f"{name}: {who}"))
            targets = workload.targets if settings.device.type == "cpu" else Targets()
            results.append(Result(name, workload.title, targets, workload.measure(told), workload.peer))
            progress.advance(task)
            console.print(f"{name}: {results[-1].faster:.1f} times faster")
    return replace(empty, results=tuple(results))


def _write(result: Run, folder: Path, console: Console) -> None:
    console.print(terminal_table(result))
    result.save(folder)
    (folder / PAGE).write_text(markdown(result), encoding="utf-8")
    save_plot(result, folder)
    console.print(f"written: {', '.join(os.path.relpath(folder / name) for name in (RESULTS, PAGE, 'results.png'))}")


def _default_folder(settings: Settings) -> Path:
    if settings.quick:
        return HERE.parent / "runs" / "bench"
    return HERE / "cuda" if settings.device.type == "cuda" else HERE


if __name__ == "__main__":
    app()
