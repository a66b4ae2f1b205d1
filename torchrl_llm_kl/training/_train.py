"""Trains from a configuration: start, resume, the loop, signals and the final folder."""

from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Literal

import tensordict
from filelock import FileLock, Timeout

from torchrl_llm_kl._files import replacing
from torchrl_llm_kl._registry import install_hint
from torchrl_llm_kl.diagnostics import status_line
from torchrl_llm_kl.training import _report
from torchrl_llm_kl.training._alarms import unlogged
from torchrl_llm_kl.training._changes import at_step, changes_of, resume_with
from torchrl_llm_kl.training._checkpoints import Checkpoints
from torchrl_llm_kl.training._config import ConfigError, TrainConfig
from torchrl_llm_kl.training._inputs import check_inputs_stay, load_inputs
from torchrl_llm_kl.training._models import export_policy
from torchrl_llm_kl.training._page import LivePage
from torchrl_llm_kl.training._ranks import Ranks, joined_ranks
from torchrl_llm_kl.training._report import Figures
from torchrl_llm_kl.training._run import Run, Say

#: The files and folders that a run writes into its folder.
WRITTEN: tuple[str, ...] = ("config.yaml", "metrics.jsonl", "evaluations.jsonl", "checkpoints", "logs", "engine")
WRITTEN += ("run.html", "curves.png", "rollouts.html", "diagnosis.txt", "final")

#: The files of a checkpoint that only a resumed run needs.
_TO_RESUME = ("state.pt", "critic.safetensors", "shards")

#: The first line of a config.yaml that a run wrote. Changing it would make earlier files look like the user's own.
_ALL_SETTINGS = "# All settings of the run in this folder; each start of it writes them anew.\n"


@dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    Args:
        outcome: ``"finished"`` after all steps, ``"interrupted"`` after a signal, ``"stopped"`` if the KL or a gradient blew
            up, or a condition of ``run.stop_when`` was met.
        why: the reason of ``"stopped"``.
        step: the number of finished steps.
        folder: the folder of the run.
        rows: the figures of each step, as in ``metrics.jsonl``.
        evaluations: the figures of each evaluation, as in ``evaluations.jsonl``.
        final: the folder with the trained model. None if the run was interrupted.
        chosen: the step whose weights it holds.
        figures: a summary, label -> figure.
    """

    outcome: Literal["finished", "interrupted", "stopped"]
    why: str
    step: int
    folder: Path
    rows: list[Figures]
    evaluations: list[Figures]
    final: Path | None = None
    chosen: int | None = None
    figures: dict[str, str] = field(default_factory=dict)


@contextmanager
def stop_on_signals(say: Say = print, *, twice: bool = True) -> Iterator[Event]:
    """Yield an event that SIGINT (Ctrl-C) and SIGTERM set. A second signal ends the process at once.

    Only the main thread can handle signals. In another thread the event is never set.

    Args:
        say: a function that gets messages for the user.

    Keyword Args:
        twice: False ignores further signals. torchrun passes a Ctrl-C on, which the terminal has already sent to each rank.

    Example:
        >>> with stop_on_signals(say=lambda line: None) as stop:
        ...     signal.raise_signal(signal.SIGTERM)
        >>> stop.is_set()
        True
    """
    stop, before = Event(), {}

    def ask(*_: object) -> None:
        if stop.is_set() and twice:
            raise KeyboardInterrupt
        if not stop.is_set():
            stop.set()
            again = " Interrupt again to end it at once." * twice
            say(f"interrupted: the run ends after this step and a checkpoint.{again}")

    with suppress(ValueError):  # not the main thread
        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ------------------------------------------------------------------ training


def train(
    config: TrainConfig,
    *,
    fresh: bool = False,
    changes: Iterable[str] = (),
    say: Say = print,
    build: Callable[..., Run] = Run,
) -> TrainResult:
    """Train a language model from a configuration, or resume a run that was ended.

    If the folder of the run (``run.out``) holds a checkpoint, the run resumes from it, and ends with the same weights and
    figures as an uninterrupted run. SIGINT and SIGTERM save a checkpoint after the current step. The folder finally holds

    - ``metrics.jsonl`` and ``evaluations.jsonl``, the figures of each step and of each evaluation
    - ``checkpoints/step-000040`` and so on, the last ones and the best. ``model`` in each is for ``from_pretrained``.
    - ``final``, the trained model with its card, ``curves.png``, and ``run.html``, a page that is also written during the run
    - ``rollouts.html`` and ``diagnosis.txt``, tokens of a late step and the doctor's findings
    - ``logs``, the files of the loggers

    Args:
        config: the result of :func:`read_config`.

    Keyword Args:
        fresh: start a new run, and move the files of an earlier run to ``earlier-1``, ``earlier-2`` and so on in the folder.
        changes: settings that change in a run that resumes, such as ``["optimizer.lr=1e-6"]``. They persist in later resumes.
        say: a function that gets messages for the user.
        build: :class:`Run`, or a subclass that makes other parts.

    Returns:
        The outcome and the figures of the run.

    Raises:
        ConfigError: if settings are invalid, or differ from the run to resume.
        ModelError: if a model cannot be loaded.

    Example:
        >>> result = train(read_config("config.yaml", ["run.steps=200"]))  # doctest: +SKIP
        >>> result.outcome, result.step  # doctest: +SKIP
        ('finished', 200)
    """
    tensordict.set_list_to_stack(True).set()  # required by torchrl's LLM components
    out = Path(config.run.out)
    guard = FileLock(out / ".lock", timeout=0)

    def lock() -> None:
        """Two processes would overwrite each other's checkpoints."""
        out.mkdir(parents=True, exist_ok=True)
        try:
            guard.acquire()
        except Timeout:
            raise ConfigError(f"another process trains in {out}: end it, or pass another run.out.") from None

    with joined_ranks(config.model.device) as ranks:
        ranks.check(config)
        ranks.of_first(lock)
        try:
            said = say if ranks.first else _silent
            return _train(config, out, ranks, fresh=fresh, changes=list(changes), say=said, build=build)
        finally:
            guard.release()


def _silent(line: str) -> None:
    pass


def _train(
    config: TrainConfig,
    out: Path,
    ranks: Ranks,
    *,
    fresh: bool,
    changes: list[str],
    say: Say,
    build: Callable[..., Run],
) -> TrainResult:
    if fresh and changes:
        raise ConfigError(f"--fresh begins a new run: pass {' '.join(changes)} without --change.")
    saved, news = None, list[str]()
    if not fresh:
        given = config
        config, saved, news = ranks.of_first(lambda: resume_with(given, changes, Checkpoints(out / "checkpoints")))
    if saved is not None and bool(saved.numbers.get("ranks")) != ranks.active:
        started = ("without torchrun", "with torchrun, on any number of ranks")[not ranks.active]
        raise ConfigError(  # the two draw answers from different random numbers
            f"{out} has a run that was started {started}: start it in the same way, or begin anew with --fresh."
        )
    if saved is None:
        ranks.of_first(lambda: check_inputs_stay(config, WRITTEN))

    # Run calls this between loading and the first write.
    def begin() -> None:
        """Move earlier files. This comes after everything is loaded, so that a run that cannot start moves nothing."""
        earlier = _report.keep_earlier(out, WRITTEN) if fresh else None
        if earlier is not None:
            say(f"{out} held an earlier run: moved it to {earlier}.")
        settings = out / "config.yaml"
        if settings.exists() and not settings.read_text(encoding="utf-8").startswith(_ALL_SETTINGS):
            say(f"moved {settings}, which no run wrote, to {_report.keep_earlier(out, [settings.name])}.")
        with replacing(settings) as part:
            part.write_text(_ALL_SETTINGS + config.to_yaml(), encoding="utf-8")
        if saved is not None and at_step(changes_of(saved), saved.step):
            checkpoints.renumber(saved)  # so that a change persists if the run ends before its next checkpoint

    checkpoints = Checkpoints(out / "checkpoints", keep=config.checkpoints.keep, to_resume=_TO_RESUME)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="torchrl|tensordict|transformers")
        warnings.filterwarnings("ignore", message="size_average and reduce")  # raised in torchrl's cross_entropy
        with ranks.together():
            inputs = load_inputs(config)
        run = build(config, saved=saved, say=say, inputs=inputs, begin=begin)
        if saved is not None:
            say(f"resuming after step {run.step} of {config.run.steps}, from {saved.folder}.")
            for line in news:
                say(line)
            before = saved.numbers.get("files", run.inputs.files)
            files = run.inputs.files.items()
            for name in (name for name, digest in files if before.get(name, digest) != digest):
                say(f"{name} has changed since the checkpoint: the run is not bit-equal to one without a stop.")
        name, steps = config.algorithm.name, config.run.steps
        bar = _report.progress(
            name, steps, done=run.step, shown=ranks.first, stream=sys.stderr, clock=lambda: run.elapsed
        )
        # stderr, so that stdout holds only the table of the results.
        shown = LivePage(run) if ranks.first else nullcontext(None)
        with closing(run), stop_on_signals(say, twice=not ranks.active) as stop, shown as page, bar as advance:
            last = None if saved is None else saved.step
            told = advance if page is None else page.after(advance)
            outcome, why = _train_on(run, checkpoints, stop, told, saved=last)
    result = TrainResult(outcome, why, run.step, out, run.rows.rows, run.evaluations.rows)
    if outcome == "interrupted":
        folder = checkpoints.folder / f"step-{run.step:06d}"
        say(f"interrupted after step {run.step} of {config.run.steps}: saved {folder}. Run the same command to resume.")
        if page is not None:
            page.write(outcome)
        return result
    if outcome == "stopped":
        say(f"stopped after step {run.step} of {config.run.steps}: {why}")

    def finish() -> TrainResult:
        """Write the final folder and the last page. Only the first rank does."""
        assert page is not None
        with page:
            final = _write_final(run, checkpoints, result)
        page.write(outcome, why)
        return final

    return ranks.of_first(finish)


def _train_on(
    run: Run, checkpoints: Checkpoints, stop: Event, advance: Callable[[str], None], *, saved: int | None
) -> tuple[Literal["finished", "interrupted", "stopped"], str]:
    """Train until the last step or an early end. Returns the outcome and its reason.

    ``saved`` is the step of the last checkpoint.
    """
    settings, begun = run.config, len(run.rows.rows)
    while True:
        # The evaluation comes before the checkpoint, since it decides whether this step is the best.
        ending = run.ranks.any(stop.is_set())
        if not ending and run.evaluation_is_due():
            row = run.evaluate()
            run.say(f"step {run.step}: reward on held-out prompts {_report.with_interval(row)}")
        why, last = run.blow_up(), run.step >= settings.run.steps  # a resumed run may set run.steps below its step
        due = run.step > 0 and run.step % settings.checkpoints.every == 0
        if saved != run.step and (due or last or ending or why or run.best == run.step):
            run.save(checkpoints)
            saved = run.step
        if last:
            return "finished", ""
        if why:
            return "stopped", why
        if ending:
            return "interrupted", ""
        try:
            row = run.take_step()
        except FloatingPointError as error:
            return "stopped", str(error)
        if len(run.rows.rows) == begun + 1:
            for line in unlogged(run.alarms, row):
                run.say(line)
        advance(status_line(row, kl_target=settings.kl.target))


def _write_final(run: Run, checkpoints: Checkpoints, result: TrainResult) -> TrainResult:
    """Write the curves and the final folder."""
    config, out = run.config, run.out
    rows, evaluations = run.rows.rows, run.evaluations.rows
    curves = out / "curves.png"
    try:
        if rows and not {"reward", "kl", "kl_to_ref"}.isdisjoint(rows[0]):
            names = ("step", "reward", "low/reward", "high/reward")
            held_out = [tuple(row[name] for name in names if name in row) for row in evaluations]
            _report.plot_curves(
                rows,
                curves,
                kl_target=config.kl.target,
                held_out=held_out,
                title=config.algorithm.name,
                changes=[(each["step"], each["key"]) for each in run.changes],
                kl_to="reference" if config.algorithm.teacher is None else "teacher",
            )
    except ImportError:
        run.say(f"curves.png is left out: it needs matplotlib: {install_hint('train')}.")
    chosen = checkpoints.latest()
    if config.checkpoints.final == "best" and run.best is not None:
        chosen = checkpoints.at(run.best) or chosen
    if chosen is None:  # a gradient was not finite before the first checkpoint
        return result
    final = out / "final"
    export_policy(config, chosen.folder / "model", run.tokenizer, final)
    picture = curves if curves.exists() else None
    write_card = partial(_report.write_card, config, final, rows=rows, evaluations=evaluations)
    write_card(chosen=chosen.step, curves=picture, changes=run.changes)
    figures = _report.summary(config, rows, evaluations, chosen=chosen.step)
    return replace(result, final=final, chosen=chosen.step, figures=figures)
