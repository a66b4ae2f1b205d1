"""Output of a run for people: progress, files of figures, loggers, curves and a model card."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import platform
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from torchrl_llm_kl._files import replacing
from torchrl_llm_kl.training._config import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torchrl.record.loggers import Logger
    from torchrl.record.loggers.mlflow import MLFlowLogger

    from torchrl_llm_kl.training._changes import Change
    from torchrl_llm_kl.training._config import TrainConfig

Figures = dict[str, float]
_SECONDS_BETWEEN_LINES = 10.0
#: Steps of the moving averages in curves.
WINDOW = 10


class FiguresFile:
    """A file with one JSON object per line, which can be read during the run.

    Args:
        path: the file, which is overwritten.
        rows: the rows of earlier steps.

    Keyword Args:
        writes: whether to write the file. Of several ranks only one should.

    Example:
        >>> import tempfile
        >>> file = FiguresFile(Path(tempfile.mkdtemp(), "metrics.jsonl"), [{"step": 0, "reward": 0.5}])
        >>> file.append({"step": 1, "reward": 0.75})
        >>> len(file.path.read_text().splitlines()), file.rows[-1]["reward"]
        (2, 0.75)
    """

    def __init__(self, path: Path, rows: Sequence[Figures] = (), *, writes: bool = True) -> None:
        self.path, self.rows, self._writes = path, list(rows), writes
        if writes:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as part:
                part.write_text(self.text, encoding="utf-8")

    @property
    def text(self) -> str:
        """The content of the file."""
        return "".join(json.dumps(row) + "\n" for row in self.rows)

    def append(self, row: Figures) -> None:
        """Append a row to ``rows`` and to the file."""
        self.rows.append(row)
        if self._writes:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def read_figures(path: Path) -> list[Figures]:
    """Read the rows of a :class:`FiguresFile`. Empty if the file does not exist.

    A last line that a running process has not finished is left out.

    Example:
        >>> read_figures(Path("nowhere.jsonl"))
        []
    """
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def keep_earlier(folder: Path, names: Sequence[str]) -> Path | None:
    """Move the files ``names`` of an earlier run from ``folder`` to ``folder/earlier-1``, ``earlier-2`` and so on.

    Returns:
        The folder that holds them now. None if there were no such files.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "metrics.jsonl").write_text("")
        >>> keep_earlier(folder, ["metrics.jsonl", "final"]).name
        'earlier-1'
    """
    written = [folder / name for name in names if (folder / name).exists()]
    if not written:
        return None
    earlier = next(path for path in (folder / f"earlier-{number}" for number in count(1)) if not path.exists())
    earlier.mkdir()
    for path in written:
        path.rename(earlier / path.name)
    return earlier


# ------------------------------------------------------------------ progress


@contextmanager
def progress(
    name: str,
    total: int,
    *,
    done: int = 0,
    shown: bool = True,
    stream: TextIO | None = None,
    clock: Callable[[], float] | None = None,
) -> Iterator[Callable[..., None]]:
    """Show the progress from ``done`` to ``total`` steps.

    Yields a function that takes a status text after one step or ``n`` steps. A terminal shows a bar. Elsewhere a line is
    printed every ten seconds and after the last step. With ``shown=False`` nothing is shown, as for all but one of several
    ranks. The output goes to ``stream``, by default stdout. ``clock`` gives the shown time in seconds.
    By default it starts now.

    Example:
        >>> with progress("GRPO", 2, shown=False) as advance:
        ...     advance("KL 0.1")
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    start, terminal = time.monotonic(), Console(file=stream)
    clock = clock or (lambda: time.monotonic() - start)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        # This column takes the rest of the line, so that a narrow terminal cuts neither the step nor the time.
        TextColumn(
            "{task.fields[status]}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")
        ),
        expand=True,
        speed_estimate_period=3600.0,  # seconds: with rich's default of 30, longer steps have no estimate
        console=terminal,
        disable=not (shown and terminal.is_terminal),
        get_time=clock,
    )
    printed = clock()

    def advance(status: str, n: int = 1) -> None:
        nonlocal done, printed
        done, now = done + n, clock()
        bar.update(task, advance=n, status=status)
        if bar.disable and shown and (now - printed >= _SECONDS_BETWEEN_LINES or done >= total):
            printed = now
            with suppress(BrokenPipeError):  # the work continues after the reader of the progress has gone
                print(f"{name}: {done:,} of {total:,}, {lasting(now)}  {status}", flush=True, file=stream)

    with bar:
        task = bar.add_task(name, total=total, completed=done, status="")
        bar.tasks[task].start_time = 0.0  # rich then shows the time of the clock, which includes earlier processes
        yield advance


# ------------------------------------------------------------------ loggers


def make_loggers(config: TrainConfig, folder: Path) -> list[Logger]:
    """Make the loggers of torchrl. Files of ``csv`` and ``tensorboard`` are removed, since a resumed run writes them again.

    Raises:
        ConfigError: if the package of a logger is not installed.

    Example:
        >>> loggers = make_loggers(config, Path("runs/train/logs"))  # doctest: +SKIP
    """
    from torchrl.record.loggers import get_logger

    logging = config.logging
    check_loggers(logging.loggers)
    name = logging.name or Path(config.run.out).resolve().name
    loggers = []
    for kind in logging.loggers:
        own, settings = folder / kind, {}
        if kind in ("csv", "tensorboard"):
            shutil.rmtree(own, ignore_errors=True)
        own.mkdir(parents=True, exist_ok=True)
        if kind == "wandb":
            run_id = own / "id"  # W&B continues the run with this id when the training resumes
            if not run_id.exists():
                run_id.write_text(uuid.uuid4().hex[:12])
            settings = {"id": run_id.read_text(), "project": logging.project, "config": config.to_dict()}
        own_logger = _mlflow_logger(name, own, logging.project) if kind == "mlflow" else None
        loggers.append(own_logger or get_logger(kind, str(own), name, wandb_kwargs=settings))
    return loggers


def check_loggers(names: Sequence[str]) -> None:
    """Raise a ConfigError if the package of a logger is not installed."""
    for kind in names:
        if kind != "csv" and importlib.util.find_spec(kind) is None:
            raise ConfigError(f"logging.loggers has {kind!r}, which is not installed: pip install {kind}.")


def _mlflow_logger(name: str, folder: Path, project: str) -> MLFlowLogger:
    """Make a logger whose experiment is ``project``. A resumed run continues the MLflow run whose id ``folder`` holds."""
    import mlflow
    from torchrl.record.loggers.mlflow import MLFlowLogger

    mlflow.end_run()  # an earlier logger of this process leaves its run active
    own = folder / "id"
    if own.exists():  # read by mlflow.start_run, which torchrl's logger calls
        os.environ["MLFLOW_RUN_ID"] = own.read_text()
    # A database, since MLflow refuses folders of files from 3.10 on.
    database, artifacts = f"sqlite:///{folder.resolve() / 'mlflow.db'}", (folder / "artifacts").resolve().as_uri()
    logger = MLFlowLogger(project, tracking_uri=database, artifact_location=artifacts)
    os.environ.pop("MLFLOW_RUN_ID", None)
    if not own.exists():
        mlflow.set_tag("mlflow.runName", name)
        own.write_text(logger.experiment.info.run_id)
    return logger


# ------------------------------------------------------------------ curves

LABEL_BOX = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}


def smooth(values: Sequence[float], window: int) -> list[float]:
    """The mean of the last ``window`` values, or of fewer at the start.

    Example:
        >>> smooth([1.0, 3.0, 5.0], 2)
        [1.0, 2.0, 4.0]
    """
    return [sum(values[max(0, i + 1 - window) : i + 1]) / min(i + 1, window) for i in range(len(values))]


def plot_curves(
    rows: Sequence[Figures],
    path: Path,
    *,
    kl_target: float | None = None,
    held_out: Sequence[tuple[float, ...]] = (),
    title: str = "",
    reward_label: str = "reward of sampled answers",
    held_out_label: str = "held-out prompts",
    held_out_format: str = "{:.3g}",
    reward_range: tuple[float, float] | None = None,
    changes: Sequence[tuple[int, str]] = (),
    kl_to: str = "reference",
) -> None:
    """Plot reward, KL and coefficient by step, and the rewards on held-out prompts.

    Args:
        rows: the figures of each step: ``step``, at least one of ``reward``, ``kl`` and ``kl_to_ref``, and optionally
            ``penalised_reward`` and ``coefficient``. Without ``penalised_reward`` the coefficient is labelled as the weight of
            a KL in the loss.
        path: the image to write.

    Keyword Args:
        kl_target: the target of the KL, in nats per answer.
        held_out: (step, mean reward) of each evaluation, or (step, mean, low, high) with the ends of its interval.
        title: the title above the picture.
        reward_label: the label of the rewards.
        held_out_label: the label of the evaluations.
        held_out_format: the format of the values of the first and the last evaluation.
        reward_range: the limits of the axis of rewards.
        changes: (step, label) of each change of a setting, which a vertical line marks.
        kl_to: the model from which the KL is measured, such as the teacher.

    Raises:
        ImportError: if matplotlib is not installed.

    Example:
        >>> plot_curves([{"step": 0, "reward": 0.1}, {"step": 1, "reward": 0.2}], Path("curves.png"))  # doctest: +SKIP
    """
    import matplotlib

    matplotlib.use("Agg")  # a backend that needs no display
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    window = min(WINDOW, max(1, len(rows)))
    of_kl, unit = ("kl", "answer") if all("kl" in row for row in rows) else ("kl_to_ref", "token")
    names = [name for name in ("reward", of_kl, "coefficient") if all(name in row for row in rows)]
    heights = [2 if name == "coefficient" else 3 for name in names]
    size, mosaic = (8, 8.5 * sum(heights) / 8), cast(Any, [[name] for name in names])
    figure, axes = plt.subplot_mosaic(mosaic, figsize=size, sharex=True, layout="constrained", height_ratios=heights)
    steps, dot = [row["step"] for row in rows], "o" if len(rows) == 1 else None  # a line of one step is invisible

    def draw(axis: Axes, key: str, label: str, color: str) -> None:
        values = [row[key] for row in rows]
        axis.plot(steps, values, color=color, alpha=0.25, linewidth=1)
        axis.plot(steps, smooth(values, window), color=color, linewidth=2, label=label, marker=dot)

    reward, kl, coefficient = axes.get("reward"), axes.get(of_kl), axes.get("coefficient")
    figure.suptitle(title)
    if reward is not None:
        draw(reward, "reward", reward_label, "tab:blue")
        if all("penalised_reward" in row for row in rows):
            draw(reward, "penalised_reward", "reward − coefficient × KL, which is maximised", "tab:orange")
        _draw_held_out(reward, held_out, held_out_label, held_out_format)
        reward.set(ylabel="mean per answer (dimensionless)")
        reward.margins(y=0.12)
        if reward_range is not None:
            reward.set_ylim(*reward_range)
        # Above the axes, since inside it would hide points.
        reward.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, frameon=False)
    if kl is not None:
        draw(kl, of_kl, f"KL(policy ‖ {kl_to})", "tab:red")
        if kl_target is not None:
            kl.axhline(kl_target, color="black", linestyle="--", linewidth=1.2, label=f"target: {kl_target:g} nats")
        values = [0.0, *(row[of_kl] for row in rows), kl_target or 0.0]
        # The estimate may be negative. `None` leaves the limit to matplotlib if all values are 0.
        kl.set(ylabel=f"KL (nats per {unit})", ylim=(min(values), 1.1 * max(values) or None))
        kl.legend(loc="lower right")
    if coefficient is not None:
        coefficient.plot(steps, [row["coefficient"] for row in rows], color="tab:purple", linewidth=2, marker=dot)
        of = "in the reward\n(reward per nat)" if "penalised_reward" in rows[0] else "in the loss\n(weight)"
        coefficient.set(ylabel=f"KL coefficient\n{of}", ylim=(0, None))
    for step in dict.fromkeys(step for step, _ in changes):
        for axis in axes.values():
            axis.axvline(step, color="black", linewidth=0.8, alpha=0.6)
        text = "\n".join(label for at, label in changes if at == step)
        place = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "va": "bottom", "fontsize": 8}
        axes[names[0]].annotate(text, (step, 0), (3, 2), bbox=LABEL_BOX, **place)
    axes[names[-1]].set(xlabel="RL step" + f" (thick lines: mean of {window} steps)" * (window > 1))
    # All axes share this one.
    axes[names[0]].xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    for axis in axes.values():
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


# ------------------------------------------------------------------ the model card


def _draw_held_out(axis: Axes, held_out: Sequence[tuple[float, ...]], label: str, form: str) -> None:
    """Draw the evaluations with their intervals, and the values of the first and the last one."""
    if held_out:
        at, means = zip(*(each[:2] for each in held_out), strict=True)
        axis.plot(at, means, "o", color="black", label=label, clip_on=False)
    intervals = [each for each in held_out if len(each) == 4]
    if intervals:
        places, _, lows, highs = zip(*intervals, strict=True)
        axis.vlines(places, lows, highs, color="black", linewidth=1, label="their 95 % interval", clip_on=False)
    for step, value, *_ in dict.fromkeys((*held_out[:1], *held_out[-1:])):
        place = {"xytext": (0, 9), "textcoords": "offset points", "ha": "center"}
        axis.annotate(form.format(value), (step, value), bbox=LABEL_BOX, **cast(Any, place))


def summary(
    config: TrainConfig, rows: Sequence[Figures], evaluations: Sequence[Figures], *, chosen: int | None = None
) -> dict[str, str]:
    """The figures of a run as texts, label -> figure.

    Args:
        config: the settings of the run.
        rows: the figures of its steps.
        evaluations: the figures on held-out prompts.

    Keyword Args:
        chosen: the step whose weights are kept, by default the last one.

    Example:
        >>> summary(config, rows, evaluations)  # doctest: +SKIP
    """
    figures: dict[str, str] = {}
    by_step = {int(row["step"]): row for row in evaluations}
    at = len(rows) if chosen is None else chosen
    for label, step in (("before", min(by_step, default=-1)), ("after", at)):
        if step in by_step:
            row = by_step[step]
            held_out = counted(int(row["num_prompts"]), "held-out prompt")
            names = ["reward", *(name for name in row if name.startswith("reward/"))]
            figures |= {f"{x.removeprefix('reward/')} on {held_out}, {label}": with_interval(row, x) for x in names}
    # Only the last half, since the KL needs some steps to reach its target.
    kls = [row.get("kl", math.nan) for row in rows[len(rows) // 2 :]]
    mean = sum(kls) / max(1, len(kls))
    if kls and not math.isnan(mean):
        target = "" if config.kl.target is None else f", target {config.kl.target:g}"
        figures["KL to the reference, mean of the last half"] = f"{mean:.3g} nats per answer{target}"
    shares = [row["equal_rewards"] for row in rows if "equal_rewards" in row]
    if shares and config.algorithm.teacher is None:  # a run with a teacher needs no rewards
        share, nothing = sum(shares) / len(shares), "all: nothing was learnt from the rewards"
        figures["groups with equal rewards"] = nothing if share == 1 else f"{100 * share:.3g} %, mean of all steps"
    if rows:
        tokens, seconds = sum(row.get("tokens", 0.0) for row in rows), rows[-1]["seconds"]
        figures["training"] = f"{counted(len(rows), 'step')}, {counted(int(tokens), 'token')}, {lasting(seconds)}"
    return figures


def with_interval(row: Figures, name: str = "reward") -> str:
    """A mean of an evaluation as a text, with its 95 % interval if it has one.

    Example:
        >>> with_interval({"reward": 0.74512, "low/reward": 0.68, "high/reward": 0.812}), with_interval({"reward": 0.5})
        ('0.7451 (95 %: 0.68 to 0.81)', '0.5')
    """
    ends = f" (95 %: {row[f'low/{name}']:.2g} to {row[f'high/{name}']:.2g})" if f"low/{name}" in row else ""
    return f"{row[name]:.4g}{ends}"


def counted(number: int, what: str) -> str:
    """A number with its noun, in the plural unless it is 1.

    Example:
        >>> counted(1, "step"), counted(38_812, "token")
        ('1 step', '38,812 tokens')
    """
    return f"{number:,} {what}{'s' * (number != 1)}"


def lasting(seconds: float) -> str:
    """A time as a text, in its two largest units.

    Example:
        >>> lasting(8.4), lasting(200.0), lasting(7_500.0)
        ('8 s', '3 min 20 s', '2 h 5 min')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def write_card(
    config: TrainConfig,
    folder: Path,
    *,
    rows: Sequence[Figures],
    evaluations: Sequence[Figures],
    chosen: int,
    curves: Path | None = None,
    changes: Sequence[Change] = (),
) -> None:
    """Write ``README.md`` of a final folder: a description of the model, its figures, the curves and the configuration.

    Args:
        config: the settings of the run.
        folder: the folder with the model.

    Keyword Args:
        rows: the figures of the run's steps.
        evaluations: the figures on held-out prompts.
        chosen: the step whose weights are kept.
        curves: a picture, which is copied into the folder.
        changes: settings that changed in the middle of the run.

    Example:
        >>> write_card(config, Path("final"), rows=rows, evaluations=evaluations, chosen=100)  # doctest: +SKIP
    """
    from huggingface_hub import ModelCard, ModelCardData

    if curves is not None:
        shutil.copyfile(curves, folder / curves.name)
    base, lora = config.model.name, config.lora
    holds = "the whole model" if lora is None else "the whole model, adapters merged"
    reference = {"start": "its weights before training", "base": "its weights without adapters"}
    about = ModelCardData(
        base_model=None
        if Path(base).is_absolute() or Path(base).is_dir()
        else base,  # a path has no meaning on the hub
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["torchrl-llm-kl", config.algorithm.name, "reinforcement-learning"],
    )
    card = ModelCard.from_template(
        about,
        template_path=str(Path(__file__).with_name("card.md.jinja")),
        config=config,
        title=config.logging.name or folder.resolve().parent.name,
        folder=str(folder),
        steps=counted(chosen, "step"),
        kl=any("kl" in row for row in rows),
        reference=reference.get(config.reference.name, config.reference.name),
        holds=holds if lora is None or lora.merge else "LoRA adapters of it, which need peft",
        figures=summary(config, rows, evaluations, chosen=chosen),
        curves=None if curves is None else curves.name,
        changes=changes,
        evaluations=evaluations,
        with_kl=bool(evaluations) and all("kl" in row for row in evaluations),
        # Longer than any run of backticks in the settings, such as a system prompt with a code block.
        fence="`" * max(3, 1 + max(map(len, re.findall("`+", config.to_yaml())), default=0)),
        versions=versions(),
    )
    card.save(folder / "README.md")


def versions(
    packages: Iterable[str] = ("torchrl-llm-kl", "torch", "tensordict", "torchrl", "transformers", "peft"),
) -> dict[str, str]:
    """The versions of Python and of installed packages, by default of those that affect the figures of a run.

    Example:
        >>> "torch" in versions()
        True
    """
    installed = {"python": platform.python_version()}
    for name in packages:
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed
