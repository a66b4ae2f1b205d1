"""Time and peak memory of functions that do the same work, alternating in one process."""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

MIB = 1024**2


@dataclass(frozen=True)
class Measured:
    """Medians over repeats: seconds, and MiB above what the process held before."""

    seconds: float
    peak_mib: float

    def ratios(self, ours: Measured) -> tuple[float, float]:
        """How many times slower, and how many times larger, this is than ``ours``."""
        return self.seconds / ours.seconds, self.peak_mib / max(ours.peak_mib, 1.0)


def alternate(contenders: Mapping[str, Callable[[], object]], *, repeats: int, warm_up: int = 1) -> dict[str, Measured]:
    """Run all contenders in turn, ``repeats`` times, so that a noisy machine is noisy for all of them."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    peaks: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(warm_up + repeats):
        for name, run in contenders.items():
            seconds, peak = _once(run)
            if i >= warm_up:
                times[name].append(seconds)
                peaks[name].append(peak)
    return {name: Measured(statistics.median(times[name]), statistics.median(peaks[name])) for name in contenders}


def _once(run: Callable[[], object]) -> tuple[float, float]:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # freed memory goes back, so that nobody lives on another's leftovers
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _status("VmRSS")
    start = time.perf_counter()
    result = run()
    seconds = time.perf_counter() - start
    peak = _status("VmHWM") - before
    del result
    return seconds, peak


def _status(field: str) -> float:
    """A field of the kernel's accounting of this process, in MiB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024 / MIB
