"""Measures the Ray service and torchrl's: ``python -m benchmarks.ray run`` and ``... render``."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from enum import Enum
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks import environment
from benchmarks.ray.callers import Callers
from benchmarks.ray.calls import MANY, agreement, beside_torchrl, over_local, size_of_code
from benchmarks.ray.cluster import NICENESS, cluster
from benchmarks.ray.faults import faults, many_callers
from benchmarks.ray.figures import PAGE, RESULTS, Figure, RayRun
from benchmarks.ray.sides import Sides, size_of

HERE = Path(__file__).parents[1]
QUICK = HERE.parent / "runs" / "bench-ray"
PARTS = ("local", "torchrl", "many", "faults")

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)
Part = Enum("Part", {part: part for part in PARTS}, type=str)  # type: ignore[misc]
Out = Annotated[
    Path | None, typer.Option(help="Folder of the results. By default benchmarks/, or runs/bench-ray for quick runs.")
]


def measure(parts: Sequence[str], *, quick: bool, rounds: int, seconds: float) -> list[Figure]:
    """Measures some parts on a local cluster."""
    torch.set_num_threads(1)
    size, lengths = size_of(quick), (16,) if quick else (32, 512)
    rounds, seconds = (1, 0.4) if quick else (rounds, seconds)
    few = 2 if quick else MANY
    figures = [size_of_code()]
    with cluster():
        if "local" in parts:
            for length in lengths:
                typer.echo(f"a call of {length} tokens")
                figures += over_local(size, length, 5 if quick else 150 if length < 128 else 50)
        if "torchrl" in parts:
            typer.echo("eight callers beside torchrl's")
            sides = Sides(size)
            agreement(sides, lengths[0])
            callers = Callers(few, sides)
            for length in lengths:
                figures += beside_torchrl(callers, length, rounds=rounds, seconds=seconds, count=few)
        if "many" in parts:
            typer.echo("64 callers")
            figures += many_callers(size, count=4 if quick else 64, answers=20 if quick else 1500)
        if "faults" in parts:
            figures += faults(size, quick=quick, on_step=typer.echo)
    return figures


@app.command()
def run(
    only: Annotated[list[Part] | None, typer.Option(help="May be repeated.")] = None,
    quick: Annotated[bool, typer.Option(help="Use the smallest sizes, to check that everything works.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds per case, of which the median is reported.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds per window.")] = 2.5,
    out: Out = None,
) -> None:
    """Measure, and write ray.json and RAY.md. With --only, keep the other figures in ray.json."""
    warnings.filterwarnings("ignore")
    folder = out or (QUICK if quick else HERE)
    place = {
        **environment.machine(torch.device("cpu")),
        "niceness of actors": NICENESS,
        "quick": "yes" if quick else "no",
    }
    place |= {**environment.versions(), "ray": version("ray")}
    asked = [part.value for part in only or ()] or list(PARTS)
    done = RayRun(place, tuple(measure(asked, quick=quick, rounds=rounds, seconds=seconds)))
    if only and (folder / RESULTS).exists():
        done = RayRun.load(folder).updated(done)
    done.save(folder)
    typer.echo(f"wrote {folder / PAGE}")


@app.command()
def render(out: Out = None) -> None:
    """Rewrite RAY.md from ray.json."""
    folder = out or HERE
    if not (folder / RESULTS).exists():
        raise typer.BadParameter(f"{folder} has no {RESULTS}: run first.")
    RayRun.load(folder).save(folder)


if __name__ == "__main__":
    app()
