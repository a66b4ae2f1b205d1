"""HTML pages about runs: ``run.html``, which a run rewrites while it goes on, and several runs beside each other."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import jinja2
import yaml

from torchrl_llm_kl._files import replacing
from torchrl_llm_kl._registry import flatten
from torchrl_llm_kl.training import _report
from torchrl_llm_kl.training._alarms import Alarm, since_change
from torchrl_llm_kl.training._changes import Change
from torchrl_llm_kl.training._config import SETTINGS, ConfigError, TrainConfig, as_yaml
from torchrl_llm_kl.training._report import Figures, FiguresFile, read_figures, smooth

#: Figures that are exact, and drawn without a mean.
_EXACT = ("coefficient", "lr")
#: Seconds between two writes. A write may also take at most a fiftieth of the time.
_SECONDS, _SHARE = 5.0, 50.0
#: The figures that are shown first. The template has their titles.
_FIRST = ("reward", "kl", "coefficient", "entropy", "doctor/surprisal/entropy", "grad_norm", "lr")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 420.0, 190.0, 52.0, 22.0, 10.0, 10.0
#: The largest number of points of a line, so that a page of a long run stays small.
_POINTS = 400
_LINKS = ("final/README.md", "curves.png", "rollouts.html", "metrics.jsonl", "config.yaml")

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class RunFiles:
    """A run on disk or in this process.

    Args:
        name: its name on the page.
        config: its settings, by key.
        rows: the figures of its steps.
        evaluations: the figures of its evaluations.
        changes: settings that changed in the middle of the run.
    """

    name: str
    config: Mapping[str, object]
    rows: Sequence[Figures]
    evaluations: Sequence[Figures]
    changes: Sequence[Change] = ()

    @classmethod
    def read(cls, folder: Path) -> RunFiles:
        """Read the files of a run, which may still go on.

        Raises:
            ConfigError: if the folder holds no run.
        """
        if not (folder / "metrics.jsonl").exists() or not (folder / "config.yaml").exists():
            raise ConfigError(f"{folder} has no metrics.jsonl and config.yaml: expected the run.out of a run.")
        config = flatten(yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")))
        rows, evaluations = (read_figures(folder / f"{name}.jsonl") for name in ("metrics", "evaluations"))
        return cls(str(folder), config, rows, evaluations)

    def points(self, figure: str, *, held_out: bool = False) -> Points:
        """The finite values of a figure by step."""
        rows = self.evaluations if held_out else self.rows
        pairs = [(row["step"], row[figure]) for row in rows if row.get(figure) is not None]
        return [(x, y) for x, y in pairs if math.isfinite(y)]


# ------------------------------------------------------------------ charts


class Line(NamedTuple):
    """A line or dots of a chart, in the coordinates of the picture. ``style`` is a class of the style sheet."""

    points: Points
    style: str
    color: int = 0
    text: str = ""

    @property
    def path(self) -> str:
        """The points in the form of SVG."""
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in self.points)


@dataclass
class Chart:
    """A picture of one figure by step. Lines are added in its own units, and :meth:`placed` scales them."""

    figure: str
    last: str = ""
    lines: list[Line] = field(default_factory=list)
    marks: Sequence[tuple[float, str]] = ()

    def placed(self) -> dict[str, object]:
        """The chart in the coordinates of the picture, for the template."""
        xs, ys = ([point[i] for line in self.lines for point in line.points] for i in (0, 1))
        (left, right), (low, high) = ((min(values), max(values)) for values in (xs, ys))
        low, high = (low, high) if high > low else (low - abs(low) / 2 - 1e-9, high + abs(high) / 2 + 1e-9)
        low, high, right = low - (high - low) / 20, high + (high - low) / 20, max(right, left + 1)

        def across(x: float) -> float:
            return _LEFT + (x - left) / (right - left) * (_WIDTH - _LEFT - _RIGHT)

        def down(y: float) -> float:
            return _TOP + (high - y) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

        lines = [line._replace(points=[(across(x), down(y)) for x, y in line.points]) for line in self.lines]
        return {
            **vars(self),
            "lines": lines,
            "marks": [(across(x), text) for x, text in self.marks if left <= x <= right],
            "x_ticks": [(across(x), f"{x:,.0f}") for x in ticks(left, right) if x == round(x)],
            "y_ticks": [(down(y), f"{y:.4g}") for y in ticks(low, high)],
            "size": (_WIDTH, _HEIGHT, _LEFT, _WIDTH - _RIGHT, _TOP, _HEIGHT - _BOTTOM),
        }


def ticks(low: float, high: float) -> list[float]:
    """About four round numbers between two numbers.

    Example:
        >>> ticks(0.0, 99.0)
        [0.0, 20.0, 40.0, 60.0, 80.0]
    """
    rough = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * (1 - 1e-9))
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def thinned(points: Points, most: int = _POINTS) -> Points:
    """At most ``most`` points: the means of neighbours.

    Example:
        >>> thinned([(0.0, 1.0), (1.0, 3.0), (2.0, 5.0)], 2)
        [(0.5, 2.0), (2.0, 5.0)]
    """
    size = math.ceil(len(points) / most)
    parts = [points[i : i + size] for i in range(0, len(points), size)] if size > 1 else [[each] for each in points]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def _chart(figure: str, runs: Sequence[RunFiles]) -> Chart:
    """The chart of a figure. One run also gets its raw values, intervals, the target and its changes."""
    chart, single = Chart(figure), len(runs) == 1
    for color, run in enumerate(runs):
        points = run.points(figure)
        if not points:
            continue
        steps, values = zip(*points, strict=True)
        window = 1 if figure in _EXACT else min(_report.WINDOW, len(values))
        means = smooth(values, window)
        if single:
            chart.lines.append(Line(thinned(points), "raw", color))
            chart.last = f"{values[-1]:.4g}"
            chart.marks = [(each["step"], each["key"]) for each in run.changes]
        text = f"{run.name}: {values[-1]:.4g}, mean of the last {window} {means[-1]:.4g}"
        style = "line" if len(points) > 1 else "dots"
        chart.lines.append(Line(thinned(list(zip(steps, means, strict=True))), style, color, text))
        target = run.config.get("kl.target")
        if figure == "kl" and isinstance(target, (int, float)):
            begin = max([steps[0], *(each["step"] for each in run.changes if each["key"] == "kl.target")])
            ends: Points = [(begin, float(target)), (max(steps[-1], begin + 1), float(target))]
            chart.lines.append(Line(ends, "target", color, f"target: {target:g} nats"))
        if figure in ("reward", "kl"):
            chart.lines += _held_out(run, figure, color, bars=single and figure == "reward")
    return chart


def _held_out(run: RunFiles, figure: str, color: int, *, bars: bool) -> list[Line]:
    """The values on held-out prompts as dots, and their intervals as bars."""
    points = run.points(figure, held_out=True)
    rows = [row for row in run.evaluations if bars and "low/reward" in row]
    ends: list[Points] = [[(row["step"], row["low/reward"]), (row["step"], row["high/reward"])] for row in rows]
    dots = [Line([each], "dots", color, f"held-out prompts, step {each[0]:g}: {each[1]:.4g}") for each in points]
    return [Line(bar, "bar", color) for bar in ends] + dots


def charts_of(runs: Sequence[RunFiles]) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """The charts of the main figures, and of all other figures."""
    names = dict.fromkeys(name for run in runs for row in (*run.rows[-100:], *run.rows[:1]) for name in row)
    first = [name for name in _FIRST if name in names]
    if "entropy" in first and "doctor/surprisal/entropy" in first:
        first.remove("doctor/surprisal/entropy")
    # Runs of several turns.
    first += [name for name in names if name in ("turns", "tool_errors") or name.startswith("tools/")]
    others = sorted(name for name in names if name not in (*first, "step", "seconds"))
    pairs = ([_chart(name, runs) for name in each] for each in (first, others))
    main, rest = ([chart.placed() for chart in each if chart.lines] for each in pairs)
    return main, rest


def _write(path: Path, **values: object) -> None:
    strict = jinja2.StrictUndefined
    environment = jinja2.Environment(autoescape=True, undefined=strict, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(Path(__file__).with_name("run.html.jinja").read_text(encoding="utf-8"))
    with replacing(path) as part:
        part.write_text(template.render(written=time.strftime("%Y-%m-%d %H:%M:%S"), **values), encoding="utf-8")


# ------------------------------------------------------------------ the page of a run


class LiveRun(Protocol):
    """The parts of a :class:`Run` that its page shows."""

    config: TrainConfig
    out: Path
    step: int
    rows: FiguresFile
    evaluations: FiguresFile
    changes: list[Change]
    alarms: list[Alarm]

    @property
    def elapsed(self) -> float:
        """The seconds of the run."""


class LivePage:
    """Writes ``run.html`` in the folder of a run: its state, curves, findings, conditions and settings.

    While the run goes on, the page reloads itself. It is written at most every few seconds, and never takes more than two
    hundredths of the time. As a context manager it writes the page at the start, and after an error.

    Args:
        run: the run.
    """

    def __init__(self, run: LiveRun) -> None:
        self.run, self._next = run, 0.0

    def __enter__(self) -> LivePage:
        self.write("running")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is not None:
            self.write("failed", f"{kind.__name__}: {error}")

    def after(self, advance: Callable[[str], None]) -> Callable[[str], None]:
        """A function that calls ``advance``, and then writes the page if that is due."""

        def both(status: str) -> None:
            advance(status)
            if time.monotonic() >= self._next:
                self.write("running")

        return both

    def write(self, outcome: str, why: str = "") -> None:
        """Write the page. Neither a full disk nor an extreme figure ends the run here."""
        begun = time.monotonic()
        with suppress(OSError, ArithmeticError, ValueError):
            _write(self.run.out / "run.html", **self._values(outcome, why))
        self._next = time.monotonic() + max(_SECONDS, _SHARE * (time.monotonic() - begun))

    def _values(self, outcome: str, why: str) -> dict[str, object]:
        run, config = self.run, self.run.config
        rows, evaluations = run.rows.rows, run.evaluations.rows
        main, rest = charts_of([RunFiles("this run", flatten(config.to_dict()), rows, evaluations, run.changes)])
        done, left, elapsed = run.step, config.run.steps - run.step, run.elapsed
        progress = f"step {done:,} of {config.run.steps:,}, {_report.lasting(elapsed)}"
        if outcome == "running" and done and left > 0:
            progress += f", about {_report.lasting(elapsed / done * left)} left"
        diagnosis, counted = run.out / "diagnosis.txt", since_change(rows, run.changes)
        return {
            "title": config.logging.name or run.out.resolve().name,
            "about": f"{config.model.name}, {config.algorithm.name}",
            "state": (outcome, why, progress, done, config.run.steps),
            "refresh": max(_SECONDS, 2 * elapsed / done if done else 0) if outcome == "running" else 0,
            "figures": _report.summary(config, rows, evaluations),
            "runs": [],
            "charts": main,
            "others": rest,
            "diagnosis": diagnosis.read_text(encoding="utf-8") if diagnosis.exists() else "",
            "alarms": [(each.text, each.last(counted), each.met(counted)) for each in run.alarms],
            "changes": run.changes,
            "settings": _own_settings(config.to_dict()),
            "links": [name for name in _LINKS if (run.out / name).exists()],
        }


def _own_settings(config: Mapping[str, object]) -> list[tuple[str, str, str]]:
    """The settings that differ from their defaults: key, value and default."""
    rows = []
    for key, about in SETTINGS.items():
        section, _, leaf = key.rpartition(".")
        values = config[section] if section else config
        if isinstance(values, Mapping) and (section == "lora" or values[leaf] != about.default):
            default = "" if about.default == "???" else as_yaml(about.default)
            rows.append((key, as_yaml(values[leaf]), default))
    return rows


# ------------------------------------------------------------------ several runs


def compare_runs(folders: Sequence[Path], html: Path | None = None) -> tuple[list[list[str]], list[list[str]]]:
    """Compare runs by their files, and optionally draw their curves into one page.

    Args:
        folders: the folders ``run.out`` of the runs.
        html: the page to write.

    Returns:
        A table of the figures with a row for each run, and a table of the settings that differ. Each begins with its header.

    Raises:
        ConfigError: if a folder holds no run.

    Example:
        >>> compare_runs([Path("runs/a"), Path("runs/b")], Path("runs.html"))  # doctest: +SKIP
    """
    runs = [RunFiles.read(folder) for folder in dict.fromkeys(folders)]
    header = ["run", "step", "reward", "held out, first", "held out, last", "KL", "coefficient"]
    figures = [header, *(_figures_of(run) for run in runs)]
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in ("run.out", "logging.name"))
    differing = [key for key in keys if len({as_yaml(run.config.get(key)) for run in runs}) > 1]
    settings = [[key, *(as_yaml(run.config.get(key)) for run in runs)] for key in differing]
    settings = [["setting", *(run.name for run in runs)], *settings]
    if html is not None:
        main, rest = charts_of(runs)
        values = {"title": f"{len(runs)} runs", "charts": main, "others": rest, "runs": figures, "settings": settings}
        empty = dict.fromkeys(("state", "figures", "links", "alarms", "changes", "about", "diagnosis", "refresh"), "")
        _write(html, **empty | values)
    return figures, settings


def _figures_of(run: RunFiles) -> list[str]:
    """The row of a run in the table: means of its last steps, and its evaluations."""

    def mean(name: str) -> str:
        values = [y for _, y in run.points(name)][-_report.WINDOW :]
        return f"{sum(values) / len(values):.4g}" if values else "—"

    held_out = [f"{y:.4g}" for _, y in run.points("reward", held_out=True)] or ["—"]
    steps = f"{len(run.rows)}/{run.config.get('run.steps')}"
    return [run.name, steps, mean("reward"), held_out[0], held_out[-1], mean("kl"), mean("coefficient")]
