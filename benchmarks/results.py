"""Measured figures and their targets, stored as JSON, so that the report can be rewritten without a new run."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.measure import Measured

RESULTS = "results.json"


@dataclass(frozen=True)
class Targets:
    """Targets of a workload. None for no target.

    Args:
        faster: minimum speed-up.
        smaller: minimum factor of peak memory saved.
        growth: maximum time of a new token in the last turn, relative to the first turn.
        share: minimum share of the time that the matrix products and the attention of the distinct tokens take.
    """

    faster: float | None = None
    smaller: float | None = None
    growth: float | None = None
    share: float | None = None


@dataclass(frozen=True)
class Turns:
    """A conversation scored at every turn: seconds and new tokens per turn."""

    new_tokens: list[int]
    theirs: list[float]
    ours: list[float]

    def growth(self, seconds: list[float]) -> float:
        """Time of a new token in the last turn, relative to the first."""
        return seconds[-1] / self.new_tokens[-1] / (seconds[0] / self.new_tokens[0])


@dataclass(frozen=True)
class Goal:
    """A figure and its target. ``short`` is its name where space is limited."""

    what: str
    short: str
    found: float
    target: float
    at_least: bool = True

    @property
    def met(self) -> bool:
        """Whether the target is reached."""
        return self.found >= self.target if self.at_least else self.found <= self.target


@dataclass(frozen=True)
class Counts:
    """The work of one forward of a batch. The pairs are of a query and a key. The products are multiplications."""

    tokens: int
    pairs: int
    positions: int  # of the head
    products: int


@dataclass(frozen=True)
class Outcome:
    """The measurements of a workload.

    Args:
        work: its size in words.
        theirs: measured for the peer.
        ours: measured for this library.
        difference: the largest difference between the numbers of the two. None if the workload computes no numbers.
        turns: of a conversation.
        notes: remarks for the reader.
        others: measured for further contenders that do the same work.
        products: measured for the matrix products and the attention of the distinct tokens. None if they were not measured.
        further: more figures of this library, with their targets on a CPU.
        counts: the work of each way to compute it, also of one that did not run.
    """

    work: str
    theirs: Measured
    ours: Measured
    difference: float | None = None
    turns: Turns | None = None
    notes: tuple[str, ...] = ()
    others: dict[str, Measured] = field(default_factory=dict)
    products: Measured | None = None
    further: tuple[Goal, ...] = ()
    counts: dict[str, Counts] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """A workload with its measurements and targets."""

    name: str
    title: str
    targets: Targets
    outcome: Outcome
    peer: str = "torchrl"

    @property
    def faster(self) -> float:
        """Time of the peer, relative to this library."""
        return self.outcome.theirs.seconds / self.outcome.ours.seconds

    @property
    def quartiles(self) -> tuple[float, float] | None:
        """The quartiles of ``faster`` over the interleaved runs. None for a single run."""
        pairs = zip(self.outcome.theirs.all_seconds, self.outcome.ours.all_seconds, strict=True)
        ratios = [theirs / ours for theirs, ours in pairs]
        if len(ratios) < 2:
            return None
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return low, high

    @property
    def smaller(self) -> float | None:
        """Peak memory of the peer, relative to this library. Below 1 MiB the page size is too coarse."""
        theirs, ours = self.outcome.theirs.peak_mib, self.outcome.ours.peak_mib
        return None if theirs is None or ours is None or theirs < 1 else theirs / max(ours, 1.0)

    @property
    def share(self) -> float | None:
        """The share of the time that the products of the distinct tokens take. It may exceed 1: see the page."""
        products = self.outcome.products
        return None if products is None else products.seconds / self.outcome.ours.seconds

    @property
    def goals(self) -> list[Goal]:
        """The figures that have a target."""
        targets, turns = self.targets, self.outcome.turns
        goals = list(self.outcome.further)
        if targets.faster is not None:
            goals.append(Goal("times faster", "faster", self.faster, targets.faster))
        if targets.smaller is not None and self.smaller is not None:
            goals.append(Goal("times less memory", "memory", self.smaller, targets.smaller))
        if targets.share is not None and self.share is not None:
            goals.append(Goal("share of the products", "share", self.share, targets.share))
        if targets.growth is not None and turns is not None:
            found = turns.growth(turns.ours)
            goals.append(
                Goal("last turn over first, time of a new token", "growth", found, targets.growth, at_least=False)
            )
        return goals


@dataclass(frozen=True)
class Run:
    """One run of the benchmark: its environment and its results."""

    command: str
    settings: dict[str, str]
    machine: dict[str, str]
    versions: dict[str, str]
    results: tuple[Result, ...]

    def same_place(self, other: Run) -> bool:
        """Whether both runs have the same settings, machine and versions, so that one table may hold both."""
        return all(getattr(self, name) == getattr(other, name) for name in ("settings", "machine", "versions"))

    def updated(self, newer: Run) -> Run:
        """A copy in which the results of ``newer`` replace results of the same name."""
        results = {result.name: result for result in (*self.results, *newer.results)}
        return replace(self, results=tuple(results.values()))

    def save(self, folder: Path) -> None:
        """Write the run to ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RESULTS).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Run:
        """Read a run that :meth:`save` wrote."""
        data = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
        return cls(**{**data, "results": tuple(_result(item) for item in data["results"])})


def _result(data: dict[str, Any]) -> Result:
    outcome = data["outcome"]
    return Result(
        data["name"],
        data["title"],
        Targets(**data["targets"]),
        Outcome(
            work=outcome["work"],
            theirs=Measured(**outcome["theirs"]),
            ours=Measured(**outcome["ours"]),
            difference=outcome["difference"],
            turns=outcome["turns"] and Turns(**outcome["turns"]),
            notes=tuple(outcome["notes"]),
            others={name: Measured(**other) for name, other in outcome.get("others", {}).items()},
            products=Measured(**outcome["products"]) if outcome.get("products") else None,
            further=tuple(Goal(**goal) for goal in outcome.get("further", ())),
            counts={name: Counts(**each) for name, each in outcome.get("counts", {}).items()},
        ),
        data.get("peer", "torchrl"),
    )
