"""Monitoring of a run: metrics, findings and the inspector's page, for torchrl's loggers and a progress bar."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from typing_extensions import Unpack

from torchrl_llm_kl._numerics import check_range
from torchrl_llm_kl.diagnostics._columns import Reading, read_columns
from torchrl_llm_kl.diagnostics._doctor import Diagnosis, diagnose
from torchrl_llm_kl.diagnostics._inspector import inspect_tokens
from torchrl_llm_kl.masks import Tokenizer
from torchrl_llm_kl.rollouts import TokenisingOptions

if TYPE_CHECKING:
    from torchrl.record.loggers import Logger

#: The parts of a progress bar, in order: title, names in the log (the first that exists is used), and format.
_STATUS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("reward", ("reward",), "{:.2f}"),
    ("KL", ("kl", "kl_to_ref"), "{:.3f}"),
    ("coefficient", ("coefficient", "kl_coefficient"), "{:.3f}"),
    ("clipped", ("clip_fraction",), "{:.1%}"),
    ("ESS", ("ESS",), "{:.2f}"),
)


def status_line(metrics: Mapping[str, float], *, kl_target: float | None = None) -> str:
    """Format a step for a progress bar: reward, KL and its target, coefficient, clip share and effective sample size.

    Args:
        metrics: numbers by name. Missing ones are left out.

    Keyword Args:
        kl_target: the target of the KL, in its unit. Shown after the KL.

    Example:
        >>> status_line({"kl": 0.41, "coefficient": 0.2, "clip_fraction": 0.031, "ESS": 0.98}, kl_target=0.5)
        'KL 0.410/0.5  coefficient 0.200  clipped 3.1%  ESS 0.98'
    """
    parts = []
    for title, names, form in _STATUS:
        value = next((metrics[name] for name in names if name in metrics), None)
        if value is not None:
            target = f"/{kl_target:g}" if title == "KL" and kl_target is not None else ""
            parts.append(f"{title} {form.format(value)}{target}")
    return "  ".join(parts)


class RunMonitor:
    """Logs metrics at every step, and the doctor's findings and the inspector's page at every ``every``-th step.

    In each step, call :meth:`look` with the batch before the first update, :meth:`add` with the output of each loss, and
    :meth:`step` at the end. Numbers of several outputs are averaged. They are copied to the CPU once, in :meth:`step`.

    Args:
        loggers: one, several or no torchrl loggers (``CSVLogger``, ``TensorboardLogger``, ``WandbLogger``, ``MLFlowLogger``).

    Keyword Args:
        every: the number of steps from one look at a batch to the next. The first look is at step 0. 0 disables looks.
        folder: the folder for ``rollouts.html`` and ``diagnosis.txt``, which each look replaces. None writes no files.
        tokenizer: the policy's tokenizer. The page requires it, and the doctor uses it for causes in text.
        kl_target: the target of the KL, shown after the KL.
        end: texts that end an answer, in addition to the tokenizer's end tokens.
        **reading: arguments of :func:`~torchrl_llm_kl.diagnostics.read_columns`. Without a policy nothing is scored, and the
            page shows the batch's own entries.

    Attributes:
        diagnosis: the last diagnosis, or None.

    Raises:
        ValueError: if ``every`` is negative, or ``folder`` is given without a tokenizer.

    Example:
        >>> monitor = RunMonitor(kl_target=0.5, every=0)
        >>> monitor.add({"ESS": torch.tensor(0.9), "clip_fraction": torch.tensor(0.02)})
        >>> monitor.add({"ESS": torch.tensor(0.8), "clip_fraction": torch.tensor(0.04)})
        >>> {name: round(value, 4) for name, value in monitor.step(0, kl=0.3).items()}
        {'ESS': 0.85, 'clip_fraction': 0.03, 'kl': 0.3}
        >>> monitor.status
        'KL 0.300/0.5  clipped 3.0%  ESS 0.85'
    """

    def __init__(
        self,
        loggers: Logger | Sequence[Logger] | None = (),
        *,
        every: int = 20,
        folder: str | Path | None = None,
        tokenizer: Tokenizer | None = None,
        kl_target: float | None = None,
        end: Sequence[str] = (),
        **reading: Unpack[Reading],
    ) -> None:
        check_range(0, every=every)
        if folder is not None and every and tokenizer is None:
            raise ValueError("the page in folder= shows text: pass tokenizer=, or folder=None to log only numbers.")
        self.loggers = tuple(loggers) if isinstance(loggers, (list, tuple)) else () if loggers is None else (loggers,)
        self.folder = None if folder is None else Path(folder)
        self.every, self.tokenizer, self.kl_target, self.end = every, tokenizer, kl_target, end
        if tokenizer is not None:
            reading.setdefault("options", TokenisingOptions(tokenizer))
        self._reading = reading
        self.diagnosis: Diagnosis | None = None
        self.last: dict[str, float] = {}
        self._sums: dict[str, list[Tensor]] = {}
        self._findings: dict[str, float] = {}

    def add(self, metrics: Mapping[str, object] | TensorDictBase) -> None:
        """Collect numbers, such as those in the output of a loss, without a device sync. Other entries are ignored."""
        for name, value in metrics.items():
            if isinstance(value, Tensor) and value.numel() == 1 and isinstance(name, str):
                self._sums.setdefault(name, []).append(value.detach().reshape(()))
            elif isinstance(value, (int, float)):
                self._sums.setdefault(name, []).append(torch.as_tensor(float(value)))

    @property
    def status(self) -> str:
        """The last step in one line, for a progress bar."""
        return status_line(self.last, kl_target=self.kl_target)

    def step(self, step: int, **numbers: float) -> dict[str, float]:
        """Log the numbers and findings collected since the last step, and ``numbers``.

        Args:
            step: the number of the step, from 0.
            numbers: further numbers, logged unchanged.

        Returns:
            The logged numbers.
        """
        # All means are copied from the device at once.
        devices = {x.device for values in self._sums.values() for x in values if x.device.type != "cpu"}
        device = next(iter(devices), torch.device("cpu"))
        means = [torch.stack([x.to(device, torch.float64) for x in values]).mean() for values in self._sums.values()]
        metrics = dict(zip(self._sums, torch.stack(means).tolist() if means else [], strict=True))
        metrics |= {**numbers, **self._findings}
        self._sums, self._findings = {}, {}
        for logger in self.loggers:
            log_metrics(logger, metrics, step)
        self.last = metrics
        return metrics

    def look(self, step: int, batch: TensorDictBase) -> Diagnosis | None:
        """Diagnose a batch and write its page, if this step is due. :meth:`step` logs the numbers.

        Call it before the policy is updated on the batch. After an update, the change of the policy looks like a fault of the
        sampler.

        Args:
            step: the number of the step, from 0.
            batch: the rollouts of this step.

        Returns:
            The diagnosis, or None if this step is not due.
        """
        if not self.every or step % self.every or not batch.batch_size.numel():
            return None
        reading = self._reading.copy()
        if reading.get("policy") is None:
            reading["reference"] = None
        # The doctor and the page share one forward. With strict=False, a bad entry is a finding and does not stop the run.
        columns = read_columns(batch, **reading, strict=False)
        self.diagnosis = diagnosis = diagnose(columns, tokenizer=self.tokenizer, end=self.end, **self._reading)
        report = f"step {step}\n{diagnosis}\n"
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "diagnosis.txt").write_text(report, encoding="utf-8")
            page = self.folder / "rollouts.html"
            assert self.tokenizer is not None
            inspect_tokens(columns, self.tokenizer, html=page, title=f"Rollouts of step {step}")
            for logger in self.loggers:
                log_page(logger, "rollouts", page, step)
        if diagnosis.faults:
            for logger in self.loggers:
                log_text(logger, "diagnosis", report, step)
        # Measures of parts ("@") would be hundreds of curves.
        plain = {name: x for name, x in diagnosis.measures.items() if "@" not in name and math.isfinite(x)}
        plain |= {f"fault/{each.cause}": each.confidence for each in diagnosis.faults}
        self._findings = {f"doctor/{name}": value for name, value in plain.items()}
        return diagnosis


# ------------------------------------------------------------------ loggers


def log_metrics(logger: Logger, metrics: Mapping[str, float], step: int) -> None:
    """Log numbers to one of torchrl's loggers.

    Example:
        >>> class Lines:
        ...     def log_scalar(self, name, value, step): print(step, name, value)
        >>> log_metrics(Lines(), {"KL": 0.5}, 3)
        3 KL 0.5
    """
    if hasattr(logger, "log_metrics"):
        logger.log_metrics(dict(metrics), step=step)
    else:
        for name, value in metrics.items():
            logger.log_scalar(name, value, step=step)


def log_text(logger: Logger, name: str, text: str, step: int) -> None:
    """Log a text to one of torchrl's loggers. A logger without support for texts is skipped.

    W&B and Trackio receive a string, TensorBoard and CSV a text, and MLflow an artifact ``NAME/STEP.txt``.

    Example:
        >>> class Lines:
        ...     def log_str(self, name, value, step): print(step, name, value)
        >>> log_text(Lines(), "diagnosis", "no fault", 3)
        3 diagnosis no fault
    """
    experiment: Any = getattr(logger, "experiment", None)
    if hasattr(logger, "log_str"):
        logger.log_str(name, text, step=step)
    elif hasattr(experiment, "add_text"):
        experiment.add_text(name, text, global_step=step)
    elif _is(logger, "MLFlowLogger"):
        _log_artifact(experiment, f"{name}/{step}.txt", text)


def log_page(logger: Logger, name: str, page: str | Path, step: int) -> None:
    """Log an HTML page to one of torchrl's loggers.

    W&B shows it as a panel. MLflow stores it as the artifact ``NAME/STEP.html``. Loggers that write to a folder (CSV,
    TensorBoard) receive a copy, ``NAME/STEP.html``. Other loggers are skipped.

    Example:
        >>> import tempfile
        >>> from torchrl.record import CSVLogger
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     page = Path(folder, "rollouts.html")
        ...     _ = page.write_text("<p>")
        ...     log_page(CSVLogger("run", log_dir=folder), "rollouts", page, 20)
        ...     Path(folder, "run", "rollouts", "20.html").read_text()
        '<p>'
    """
    page = Path(page)
    experiment: Any = getattr(logger, "experiment", None)
    if _is(logger, "WandbLogger"):
        import wandb

        experiment.log({name: wandb.Html(page.read_text(encoding="utf-8"), inject=False), "step": step})
    elif _is(logger, "MLFlowLogger"):
        _log_artifact(experiment, f"{name}/{step}.html", page.read_text(encoding="utf-8"))
    else:
        folder = getattr(experiment, "log_dir", None)
        if folder is not None and Path(folder).is_dir():
            target = Path(folder) / name / f"{step}.html"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(page, target)  # the next look replaces the page


def _is(logger: Logger, name: str) -> bool:
    """Whether a logger is an instance of the torchrl class with this name."""
    # isinstance would import the class, and with it W&B or MLflow.
    return any(base.__name__ == name for base in type(logger).__mro__)


def _log_artifact(experiment: object, name: str, text: str) -> None:
    import mlflow

    mlflow.log_text(text, name, run_id=getattr(getattr(experiment, "info", None), "run_id", None))
