"""The parts of a run, on a separate Ray cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version

import torch

from benchmarks import environment
from benchmarks.ray.callers import Callers
from benchmarks.ray.cluster import NICENESS, cluster
from benchmarks.ray.comparison import Case, bytes_on_wire, check_agreement, compare
from benchmarks.ray.faults import STEPS as FAULT_STEPS, faults
from benchmarks.ray.overhead import Overhead, overhead
from benchmarks.ray.processor import processor_times
from benchmarks.ray.results import MANY, RayRun
from benchmarks.ray.scale import STEPS, scale
from benchmarks.ray.sides import SERVED, Sides, size_of
from benchmarks.workloads.base import OURS

PARTS = ("calls", "processor", "overhead", "scale", "faults")
LENGTHS, QUICK_LENGTHS = (32, 512), (16,)
_QUIET = 10.0  # seconds after which the service no longer counts a caller as recent


def whole(command: str, *, quick: bool) -> RayRun:
    """An empty run."""
    settings = {"quick": "yes" if quick else "no", "threads of an actor": "1", "niceness of actors": NICENESS}
    versions = {**environment.versions(), "ray": version("ray")}
    return RayRun(command, settings, environment.machine(torch.device("cpu")), versions, str(size_of(quick)))


def measure(
    empty: RayRun,
    parts: Sequence[str],
    *,
    quick: bool,
    rounds: int,
    seconds: float,
    on_step: Callable[[str, int], None],
) -> RayRun:
    """Run the selected parts.

    Single callers are measured before many: the service waits a moment for recent callers.
    """
    torch.set_num_threads(1)
    size, lengths = size_of(quick), QUICK_LENGTHS if quick else LENGTHS
    rounds, seconds = (1, 0.4) if quick else (rounds, seconds)
    counts = (1, 2) if quick else (1, MANY)
    calls, processor, idle, many, failing = (part in parts for part in PARTS)
    windows = 2 * len(SERVED) * len(lengths) * len(counts) * (rounds + 1)
    total = 4 + calls * (windows + 1) + idle * len(lengths) + many * STEPS + failing * FAULT_STEPS
    total += processor * 2 * len(SERVED) * len(lengths)

    def step(what: str) -> None:
        on_step(what, total)

    sides, found = Sides(size), empty
    with cluster():
        if calls or processor or idle:
            step("starting actors; do both agree?")
            found = replace(found, difference=max(check_agreement(sides, length) for length in lengths))
        if calls:
            step("bytes on the wire")
            found = replace(found, bytes=tuple(bytes_on_wire(sides, lengths)))
        if idle:
            model = sides.make(OURS, "reference").model  # type: ignore[attr-defined]
            overheads: list[Overhead] = []
            for length in lengths:
                step(f"overhead, {length} tokens")
                repeats = 10 if quick else 200 if length < 128 else 60
                overheads.append(overhead(model, size, length, repeats=repeats))
            found = replace(found, overheads=tuple(overheads))
        if many:
            found = replace(found, scale=scale(size, quick=quick, seconds=8 * seconds, repeats=rounds, on_step=step))
        if failing:
            found = replace(found, faults=faults(size, quick=quick, on_step=step))
        if calls or processor:
            last_call = time.monotonic()
            step("starting callers")
            callers = Callers(max(counts), sides)
            if calls:
                step("until it is quiet")
                time.sleep(0 if quick else max(0.0, last_call + _QUIET - time.monotonic()))
                lines = [
                    line
                    for count in counts
                    for line in compare(
                        callers,
                        [Case(served, count, length) for served in SERVED for length in lengths],
                        rounds=rounds,
                        seconds=seconds,
                        on_window=step,
                    )
                ]
                found = replace(found, lines=tuple(lines))
            if processor:
                cases = [Case(served, max(counts), length) for served in SERVED for length in lengths]
                times = processor_times(callers, cases, seconds=2 * seconds, on_window=step)
                found = replace(found, processor=tuple(times))
    return found
