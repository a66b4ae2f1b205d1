"""Throughput, latency and bytes of both libraries, interleaved."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.agreement import largest_difference
from benchmarks.ray.callers import Callers, quantile
from benchmarks.ray.sides import SEQUENCES, SERVED, Served, Sides, data, numbers
from benchmarks.ray.wire import bytes_of
from benchmarks.workloads.base import OURS, THEIRS

TOLERANCE = 1e-4


@dataclass(frozen=True)
class Case:
    """One line of the comparison.

    Args:
        served: the models behind the service.
        callers: concurrent ones.
        length: tokens per sequence.
    """

    served: Served
    callers: int
    length: int

    @property
    def tokens(self) -> int:
        """Tokens per call."""
        return SEQUENCES * self.length


@dataclass(frozen=True)
class Calls:
    """Results of one library: calls per second of each round, and latencies in seconds over all rounds."""

    throughputs: list[float]
    latency_p50: float
    latency_p99: float
    count: int

    @property
    def throughput(self) -> float:
        """Calls per second of the median round."""
        return statistics.median(self.throughputs)


@dataclass(frozen=True)
class Line:
    """A case, with the results of both libraries."""

    case: Case
    theirs: Calls
    ours: Calls

    @property
    def faster(self) -> float:
        """Ratio of throughputs: the median over rounds, whose two windows are adjacent in time."""
        rounds = zip(self.ours.throughputs, self.theirs.throughputs, strict=True)
        return statistics.median([ours / theirs for ours, theirs in rounds if theirs > 0] or [math.nan])


@dataclass(frozen=True)
class Bytes:
    """Bytes of a call on the wire, both ways, with and without an entry that no model reads."""

    served: Served
    length: int
    side: str
    sent: int
    received: int
    sent_unrelated: int
    received_unrelated: int


def check_agreement(sides: Sides, length: int) -> float:
    """The largest difference between the numbers of the two libraries.

    Raises:
        DisagreementError: if it is above 1e-4 nats.
    """
    differences = []
    for served in SERVED:
        found, expected = (
            numbers(sides.make(side, served)(data(sides.size, length, seed=7)), served) for side in (OURS, THEIRS)
        )
        differences.append(largest_difference(found, expected, tolerance=TOLERANCE, what=f"{served}, {length} tokens"))
    return max(differences)


def compare(
    callers: Callers, cases: Sequence[Case], *, rounds: int, seconds: float, on_window: Callable[[str], None]
) -> list[Line]:
    """Every case, interleaved: torchrl, ours, torchrl, ours, ...; the first, shorter round is a warm-up."""
    throughputs: dict[tuple[Case, str], list[float]] = {(case, side): [] for case in cases for side in (THEIRS, OURS)}
    latencies: dict[tuple[Case, str], list[float]] = {key: [] for key in throughputs}
    for i in range(rounds + 1):
        for case in cases:
            for side in (THEIRS, OURS):
                what = f"{case.served}, {case.callers} x {case.length}: {side}"
                on_window(what)
                window = callers.window(
                    "transform",
                    side,
                    case.served,
                    case.length,
                    callers=case.callers,
                    seconds=seconds if i else min(seconds, 0.3),
                )
                if i:
                    throughputs[case, side].append(window.throughput)
                    latencies[case, side] += window.latencies
    return [Line(case, *(_calls(throughputs[case, s], latencies[case, s]) for s in (THEIRS, OURS))) for case in cases]


def _calls(throughputs: list[float], latencies: list[float]) -> Calls:
    return Calls(throughputs, quantile(latencies, 0.5), quantile(latencies, 0.99), len(latencies))


def bytes_on_wire(sides: Sides, lengths: Sequence[int]) -> list[Bytes]:
    """Bytes of every kind of call."""
    found = []
    for served in SERVED:
        for side in (THEIRS, OURS):
            transform = sides.make(side, served)
            for length in lengths:
                plain, more = (data(sides.size, length, seed=1, unrelated=unrelated) for unrelated in (False, True))
                transform(plain.copy())  # one-time exchanges are not part of a call
                without = bytes_of(lambda t=transform, d=plain: t(d.copy()))  # type: ignore[misc]
                with_it = bytes_of(lambda t=transform, d=more: t(d.copy()))  # type: ignore[misc]
                found.append(
                    Bytes(
                        served,
                        length,
                        side,
                        without.sent,
                        without.received,
                        with_it.sent,
                        with_it.received,
                    )
                )
    return found
