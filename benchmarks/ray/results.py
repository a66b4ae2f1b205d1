"""All measurements, as JSON from which the page is rendered."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.ray.comparison import Bytes, Calls, Case, Line
from benchmarks.ray.faults import Fault
from benchmarks.ray.overhead import Overhead
from benchmarks.ray.processor import Processor
from benchmarks.ray.scale import Scale
from benchmarks.results import Goal

RESULTS = "ray.json"
MOST_OVERHEAD_MS, MANY = 3.0, 8
#: Times torchrl's throughput: of short calls, and of long ones, where the model's own speed bounds both sides.
LEAST_FASTER, LEAST_FASTER_LONG, LONG = 8.0, 2.5, 128


@dataclass(frozen=True)
class RayRun:
    """One run: machine, settings and results. Parts that were not run are empty.

    Args:
        command: the command line.
        settings: sizes and durations.
        machine: description of the machine.
        versions: of the libraries.
        model: description of the model.
        difference: largest one between the libraries' numbers, in nats.
        lines: throughput and latency.
        processor: where its time goes in those lines.
        bytes: on the wire.
        overheads: of a call over a local scorer.
        scale: many callers, prompts and replicas.
        faults: what callers noticed of them.
    """

    command: str
    settings: dict[str, str]
    machine: dict[str, str]
    versions: dict[str, str]
    model: str
    difference: float | None = None
    lines: tuple[Line, ...] = ()
    processor: tuple[Processor, ...] = ()
    bytes: tuple[Bytes, ...] = ()
    overheads: tuple[Overhead, ...] = ()
    scale: Scale | None = None
    faults: tuple[Fault, ...] = ()

    @property
    def goals(self) -> list[Goal]:
        """Every target, with the measured value."""
        goals = [
            Goal(f"ms of a call over a local scorer, {o.length} tokens", "ms", o.seconds * 1e3, MOST_OVERHEAD_MS, False)
            for o in self.overheads
        ]
        for line in self.lines:
            case = line.case
            if case.callers >= MANY:
                what = (
                    f"times torchrl's throughput, {case.callers} callers, {case.length} tokens, {served(case.served)}"
                )
                least = LEAST_FASTER if case.length < LONG else LEAST_FASTER_LONG
                goals.append(Goal(what, "faster", line.faster, least))
        goals += [] if self.scale is None else self.scale.goals
        ours = [b for b in self.bytes if b.side == "here"]
        if ours:
            more = max(b.sent_unrelated + b.received_unrelated - b.sent - b.received for b in ours)
            goals.append(Goal("bytes more with an unrelated entry", "bytes", float(more), 0.0, False))
        if self.faults:
            goals.append(
                Goal("answers lost in all faults", "lost", float(sum(f.lost for f in self.faults)), 0.0, False)
            )
            goals.append(
                Goal("answers wrong in all faults", "wrong", float(sum(f.wrong for f in self.faults)), 0.0, False)
            )
        return goals

    def same_place(self, other: RayRun) -> bool:
        """Whether the figures of both are comparable."""
        return all(getattr(self, name) == getattr(other, name) for name in ("settings", "machine", "versions", "model"))

    def updated(self, newer: RayRun) -> RayRun:
        """This run with its parts replaced by the parts of ``newer``."""
        parts = {name: value for name in _PARTS if (value := getattr(newer, name)) not in ((), None)}
        return replace(self, **parts)

    def save(self, folder: Path) -> None:
        """Write the run to ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RESULTS).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> RayRun:
        """Read a run that :meth:`save` wrote."""
        data = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
        kinds: dict[str, Any] = {"bytes": Bytes, "overheads": Overhead, "faults": Fault}
        parts = {name: tuple(kind(**item) for item in data.get(name, ())) for name, kind in kinds.items()}
        lines = tuple(Line(Case(**x["case"]), Calls(**x["theirs"]), Calls(**x["ours"])) for x in data["lines"])
        processor = tuple(Processor(**{**x, "case": Case(**x["case"])}) for x in data.get("processor", ()))
        scale = data.get("scale") and Scale.read(data["scale"])
        parts |= {"lines": lines, "processor": processor}
        return cls(**{**data, **parts, "scale": scale})


_PARTS = ("difference", "lines", "processor", "bytes", "overheads", "scale", "faults")


def served(name: str) -> str:
    """Description for tables."""
    return {"both": "both models served", "reference": "reference served"}[name]
