"""Time and peak memory of functions that do the same work, interleaved in one process."""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

MIB = 1024**2
_CLEAR_PEAK = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Contender:
    """A function to time.

    Args:
        run: called with the result of ``prepare``.
        prepare: called before every run, outside the measurement: copies inputs that a run modifies, empties a cache.
    """

    run: Callable[[Any], object]
    prepare: Callable[[], Any] = lambda: None


@dataclass(frozen=True)
class Measured:
    """Seconds of each repeat, and its peak in MiB above the memory held before (empty if not measured)."""

    all_seconds: list[float]
    all_peaks_mib: list[float]

    @property
    def seconds(self) -> float:
        """Median time."""
        return statistics.median(self.all_seconds)

    @property
    def peak_mib(self) -> float | None:
        """Median peak. None if memory was not measured."""
        return statistics.median(self.all_peaks_mib) if self.all_peaks_mib else None


class Meter(Protocol):
    """Measures peak memory on a device and waits for its work."""

    def reset(self) -> None:
        """Start a new peak measurement."""

    def wait(self) -> None:
        """Wait until all work is done."""

    def peak_mib(self) -> float | None:
        """Peak since the reset, above the memory held then. None if unknown."""


class HostMeter:
    """Memory of this process as the Linux kernel reports it. Other systems report nothing."""

    def reset(self) -> None:
        """Start a new peak measurement."""
        gc.collect()
        if _CLEAR_PEAK.exists():
            ctypes.CDLL("libc.so.6").malloc_trim(
                0
            )  # return freed memory to the system, so that no run reuses another's
            _CLEAR_PEAK.write_text("5")
            self._before = _status_mib("VmRSS")

    def wait(self) -> None:
        """Nothing to wait for: work on the host is synchronous."""

    def peak_mib(self) -> float | None:
        """Peak since the reset, above the memory held then."""
        return _status_mib("VmHWM") - self._before if _CLEAR_PEAK.exists() else None


class CudaMeter:
    """Memory that torch has allocated on the current CUDA device."""

    def reset(self) -> None:
        """Start a new peak measurement."""
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()

    def wait(self) -> None:
        """Wait until the device is idle."""
        torch.cuda.synchronize()

    def peak_mib(self) -> float | None:
        """Peak since the reset, above the memory held then."""
        return (torch.cuda.max_memory_allocated() - self._before) / MIB


def meter_of(device: torch.device) -> Meter:
    return CudaMeter() if device.type == "cuda" else HostMeter()


def alternate(
    contenders: Mapping[str, Contender],
    meter: Meter,
    *,
    repeats: int,
    warm_up: int = 0,
    memory_apart: bool = False,
    on_run: Callable[[str], None] = lambda name: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Measured]:
    """Interleave ``repeats`` runs of all contenders, so that other load on the machine affects all of them equally.

    A peak is measured from an empty heap, and requesting its pages from the system takes milliseconds. ``memory_apart``
    measures times and peaks in different runs, for functions that are as fast as that.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    peaks: dict[str, list[float]] = {name: [] for name in contenders}
    with _everything_old():
        for i in range(warm_up + repeats):
            for name, contender in contenders.items():
                on_run(name)
                took, peak = _once(contender, None if memory_apart else meter, clock)
                if i >= warm_up:
                    seconds[name].append(took)
                    peaks[name] += [] if peak is None else [peak]
        for name, contender in contenders.items() if memory_apart else ():
            peak = _once(contender, meter, clock)[1]
            peaks[name] += [] if peak is None else [peak]
    return {name: Measured(seconds[name], peaks[name]) for name in contenders}


@contextmanager
def _everything_old() -> Iterator[None]:
    """Hide existing objects from the garbage collector: with torch loaded, a full collection takes a quarter of a second."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _once(contender: Contender, meter: Meter | None, clock: Callable[[], float]) -> tuple[float, float | None]:
    given = contender.prepare()
    if meter is not None:
        meter.reset()
    start = clock()
    result = contender.run(given)
    if meter is not None:
        meter.wait()
    seconds = clock() - start
    peak = None if meter is None else meter.peak_mib()
    del result
    return seconds, peak


def _status_mib(field: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024 / MIB
