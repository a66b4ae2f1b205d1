"""Concurrent client processes."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.ray.sides import SIDES, Sides, data

_HEAD_START = 0.1  # seconds for the start message to reach all clients


def quantile(values: Sequence[float], share: float) -> float:
    """Returns a quantile: one of the values, or the next larger one where it falls between two."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


@dataclass(frozen=True)
class Window:
    """Calls in a window of time.

    Args:
        seconds: length of the window.
        calls: start and end of each call, in seconds after the start of the window. A caller makes at least one call, and
            finishes a call that it has started.
    """

    seconds: float
    calls: list[tuple[float, float]]

    @property
    def throughput(self) -> float:
        """Calls per second. A call that ends after the window counts in part."""
        inside = [max(min(end, self.seconds) - begin, 0.0) / (end - begin) for begin, end in self.calls]
        return sum(inside) / self.seconds

    @property
    def latencies(self) -> list[float]:
        """Seconds per call."""
        return [end - begin for begin, end in self.calls]


class Caller:
    """One client process."""

    def __init__(self, index: int, sides: Sides) -> None:
        warnings.filterwarnings("ignore")
        torch.set_num_threads(1)
        self._index, self._sides = index, sides
        self._transforms = {side: sides.make(side) for side in SIDES}

    def ready(self) -> bool:
        """Return once the process is constructed."""
        return True

    def transform(self, side: str, length: int, start: float, seconds: float) -> Any:
        """Apply a transform repeatedly to a TensorDict of this process."""
        transform = self._transforms[side]
        own = data(self._sides.size, length, seed=self._index)
        return _repeat(lambda: transform(own.copy()), start, seconds)


def _repeat(call: Callable[[], object], start: float, seconds: float) -> list[tuple[float, float]]:
    time.sleep(max(start - time.monotonic(), 0.0))
    calls: list[tuple[float, float]] = []
    while True:
        begin = time.monotonic() - start
        if calls and begin >= seconds:
            return calls
        call()
        calls.append((begin, time.monotonic() - start))


class Callers:
    """Several client processes that start together.

    Args:
        count: number of processes.
        sides: the transforms that they call.
    """

    def __init__(self, count: int, sides: Sides) -> None:
        import ray

        remote: Any = ray.remote(num_cpus=0)(Caller)
        self._actors = [remote.remote(index, sides) for index in range(count)]
        ray.get([actor.ready.remote() for actor in self._actors])

    def window(self, method: str, *args: Any, callers: int, seconds: float, **kwargs: Any) -> Window:
        """Let some of the processes call for one window."""
        import ray

        start = time.monotonic() + _HEAD_START
        told = [
            getattr(actor, method).remote(*args, start=start, seconds=seconds, **kwargs)
            for actor in self._actors[:callers]
        ]
        found: Sequence[list[tuple[float, float]]] = ray.get(told)
        return Window(seconds, [call for calls in found for call in calls])
