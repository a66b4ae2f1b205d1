"""A workload, and the settings of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from benchmarks.measure import Contender, Measured, alternate, meter_of
from benchmarks.models import QUICK, ModelSize
from benchmarks.results import Outcome, Targets

THEIRS, OURS, PRODUCTS = "torchrl", "here", "products"
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Settings:
    """The settings of a run.

    Args:
        repeats: runs per contender. The result is their median.
        quick: use the smallest models and batches, as a smoke test.
        device: device of models and data.
        dtype: dtype of the weights.
        on_run: called with the name of each contender before it runs.
        clock: the clock of all times. On a machine that others use it is the processor's clock of one thread.
    """

    repeats: int = 3
    quick: bool = False
    device: torch.device = CPU
    dtype: torch.dtype = torch.float32
    on_run: Callable[[str], None] = lambda name: None
    clock: Callable[[], float] = time.perf_counter

    def size(self, full: ModelSize) -> ModelSize:
        """The model size of this run."""
        return QUICK if self.quick else full

    def at_least(self, repeats: int) -> int:
        """Number of repeats of a short workload, which needs more of them."""
        return self.repeats if self.quick else max(self.repeats, repeats)

    def alternate(
        self,
        contenders: Mapping[str, Contender],
        *,
        repeats: int | None = None,
        warm_up: int = 0,
        memory_apart: bool = False,
    ) -> dict[str, Measured]:
        """Measure all contenders, interleaved."""
        return alternate(
            contenders,
            meter_of(self.device),
            repeats=self.repeats if repeats is None else repeats,
            warm_up=warm_up,
            memory_apart=memory_apart,
            on_run=self.on_run,
            clock=self.clock,
        )


@dataclass(frozen=True)
class Workload:
    """One comparison.

    Args:
        name: for the command line.
        title: for the tables.
        measure: checks that the libraries agree, then measures both.
        targets: on a CPU.
        cuda: whether it is meaningful on a GPU.
        peer: the library that it is compared with.
        half: whether it is meaningful in half precision.
    """

    name: str
    title: str
    measure: Callable[[Settings], Outcome]
    targets: Targets
    cuda: bool = False
    peer: str = THEIRS
    half: bool = True
