"""Where the processor's time goes while many callers wait: read from Linux's ``/proc``."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.ray.callers import Callers
from benchmarks.ray.comparison import Case
from benchmarks.ray.sides import SIDES

_PROC = Path("/proc")
CALLER, MODEL, OTHERS, _IDLE = "callers", "actors with a model", "Ray's own", "idle"
#: Names that Ray gives the processes of actors.
_KINDS = {"ray::Caller": CALLER, "ray::Replica": MODEL, "ray::RetrieveKL": MODEL, "ray::_MadeThere": MODEL}


@dataclass(frozen=True)
class Processor:
    """CPU time of a call.

    Args:
        case: what is called.
        side: the library.
        throughput: calls per second, meanwhile.
        seconds: of CPU time per call, by kind of process.
        idle: share of the cores' time that no process used.
    """

    case: Case
    side: str
    throughput: float
    seconds: dict[str, float]
    idle: float

    @property
    def busy(self) -> float:
        """Cores that the actors with a model keep busy."""
        return self.seconds.get(MODEL, 0.0) * self.throughput


def processor_times(
    callers: Callers, cases: Sequence[Case], *, seconds: float, on_window: Callable[[str], None]
) -> list[Processor]:
    """A window of each case and library; none without ``/proc``."""
    found = []
    for case in cases if (_PROC / "stat").exists() else ():
        for side in SIDES:
            on_window(f"processor, {case.served}, {case.callers} x {case.length}: {side}")
            before, began = _spent(), time.monotonic()
            window = callers.window("transform", side, case.served, case.length, callers=case.callers, seconds=seconds)
            after, passed = _spent(), (time.monotonic() - began) * (os.cpu_count() or 1)
            each = {kind: (after[kind] - before[kind]) / len(window.calls) for kind in (CALLER, MODEL, OTHERS)}
            found.append(Processor(case, side, window.throughput, each, (after[_IDLE] - before[_IDLE]) / passed))
    return found


def _spent() -> dict[str, float]:
    """CPU seconds so far of each kind of process, and of idle cores."""
    tick, found = os.sysconf("SC_CLK_TCK"), defaultdict[str, float](float)
    found[_IDLE] = int((_PROC / "stat").read_text().split()[4]) / tick
    for process in _PROC.glob("[0-9]*"):
        with suppress(OSError):  # it ended
            name = (process / "cmdline").read_text().rstrip("\0 ")
            user, system = (process / "stat").read_text().rpartition(")")[2].split()[11:13]
            kind = _KINDS.get(name.split(".")[0], OTHERS if "ray" in name.split("\0")[0] else "")
            found[kind] += (int(user) + int(system)) / tick
    return found
