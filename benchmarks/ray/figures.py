"""The figures of a run as JSON, and the page that shows them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

PAGE, RESULTS = "RAY.md", "ray.json"
#: Figures of the service before it was an application of Ray Serve, on the same kind of machine.
BEFORE = Path(__file__).with_name("before.json")
_INTRO = """# Benchmark of the Ray service

Written by `python -m benchmarks.ray run`; do not edit.

Client processes apply the Ray transforms of torchrl 0.14.1 and of this library, in turn, to TensorDicts of 4 sequences and an
unrelated entry of 8 MiB. The model is a Qwen2 of 2 layers, hidden size 64 and vocabulary 1,000, with one thread per actor.
During each fault, eight callers score 4 x 32 tokens without a pause. Each answer is compared with a local scorer that has the
same version of the weights. The column *before* shows the earlier service, which supervised its own actors.

"""


@dataclass(frozen=True)
class Figure:
    """One number.

    Args:
        what: the quantity.
        value: its median.
        unit: of the value.
        least, most: bounds of the goal.
        note: related numbers.
    """

    what: str
    value: float
    unit: str
    least: float | None = None
    most: float | None = None
    note: str = ""

    @property
    def goal(self) -> str:
        """The goal in words, and whether the value meets it."""
        if self.least is None and self.most is None:
            return ""
        met = (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)
        words = f"at least {self.least:g}" if self.least is not None else f"at most {self.most:g}"
        return f"{words}: {'met' if met else 'missed'}"


@dataclass(frozen=True)
class RayRun:
    """The place and the figures of one run."""

    place: dict[str, str]
    figures: tuple[Figure, ...] = ()

    def updated(self, newer: RayRun) -> RayRun:
        """Replaces figures by those of a newer run."""
        new = {figure.what: figure for figure in newer.figures}
        kept = tuple(new.pop(figure.what, figure) for figure in self.figures)
        return RayRun(newer.place, (*kept, *new.values()))

    def save(self, folder: Path) -> None:
        """Writes the figures and the page."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RESULTS).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        (folder / PAGE).write_text(self.page(), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> RayRun:
        """Reads a run that :meth:`save` wrote."""
        found = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
        return cls(found["place"], tuple(Figure(**each) for each in found["figures"]))

    def page(self) -> str:
        """Renders the page."""
        before = json.loads(BEFORE.read_text(encoding="utf-8"))
        rows = ["| figure | before | now | | goal | |", "|---|---|---|---|---|---|"]
        for figure in self.figures:
            earlier = before.get(figure.what, "")
            rows.append(
                f"| {figure.what} | {earlier} | {figure.value:,.4g} | {figure.unit} | {figure.goal} | {figure.note} |"
            )
        place = [
            "",
            "## Machine and versions",
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in self.place.items()),
        ]
        return _INTRO + "\n".join([*rows, *place]) + "\n"
