"""Conditions on the figures of a run that end it early: the bound of the KL, and ``run.stop_when``."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrl_llm_kl.training._config import CONDITION, TrainConfig, unreadable

if TYPE_CHECKING:
    from torchrl_llm_kl.training._changes import Change

Figures = dict[str, float]

_MEETS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
#: The steps in a row of a condition that gives no number. A single step is noisy.
_STEPS = 3
#: The bound of a KL without a target, in nats per answer, and for long answers in nats per token. A run that learns stays well
#: below both: with 0.5 nats, each token is on average 1.6 times as probable as under the reference.
KL_PER_ANSWER, KL_PER_TOKEN = 50.0, 0.5


@dataclass(frozen=True)
class Alarm:
    """A condition on a figure of the last steps. A run that meets it ends.

    Args:
        figure: the name of the figure in ``metrics.jsonl``.
        sign: ``"<"``, ``"<="``, ``">"`` or ``">="``.
        bound: the number after the sign.
        steps: the number of steps in a row that must meet the condition.
        reason: the beginning of the message, with ``{bound}``. Empty for a condition of ``run.stop_when``.
        advice: the end of the message.
        per_token: raises the bound of a step to this number times its ``answer_tokens``, if that is larger.
    """

    figure: str
    sign: str
    bound: float
    steps: int = _STEPS
    reason: str = ""
    advice: str = "see run.stop_when."
    per_token: float = 0.0

    @classmethod
    def read(cls, text: str) -> Alarm:
        """Read a condition such as ``"kl > 20 for 5"``.

        Raises:
            ValueError: if the text has another form.

        Example:
            >>> Alarm.read("entropy < 0.01").steps
            3
        """
        if error := unreadable(text):
            raise ValueError(error)
        figure, sign, bound, steps = CONDITION.fullmatch(text.strip()).groups()  # type: ignore[union-attr]
        return cls(figure, sign, float(bound), int(steps or _STEPS))

    @property
    def text(self) -> str:
        """The condition in the form of ``run.stop_when``."""
        return f"{self.figure} {self.sign} {self.bound:g} for {self.steps}"

    def last(self, rows: Sequence[Figures]) -> list[float]:
        """The figures of the last ``steps`` steps, or of fewer if some did not log it.

        The doctor logs its figures only at its looks. For them the last ``steps`` looks are read.
        """
        looks = self.figure.startswith("doctor/")
        logged = [row for row in rows if not looks or any(name.startswith("doctor/") for name in row)]
        return [row[self.figure] for row in logged[-self.steps :] if self.figure in row]

    def met(self, rows: Sequence[Figures]) -> str:
        """The reason to end the run after these steps. Empty if the condition is not met. A NaN meets any condition."""
        values = self.last(rows)
        if len(values) < self.steps:
            return ""
        tokens = [row.get("answer_tokens", 0.0) for row in rows[-self.steps :]]
        bounds = [max(self.bound, self.per_token * each) if self.per_token else self.bound for each in tokens]
        pairs = zip(values, bounds, strict=True)
        if not all(math.isnan(value) or _MEETS[self.sign](value, bound) for value, bound in pairs):
            return ""
        begin = self.reason or f"{self.figure} was {self.sign} {{bound}}"
        shown = f"{self.steps} steps in a row ({', '.join(f'{value:.3g}' for value in values)})"
        return f"{begin.format(bound=f'{bounds[-1]:g}')} in {shown}: {self.advice}"


def since_change(rows: Sequence[Figures], changes: Sequence[Change]) -> list[Figures]:
    """The steps after the last change of settings, which gets the full number of steps to take effect."""
    since = max((each["step"] for each in changes), default=0)
    return [row for row in rows if row["step"] >= since]


def alarms_of(config: TrainConfig) -> list[Alarm]:
    """The conditions that end a run: the bound of its KL, and the texts in ``run.stop_when``.

    A KL to a teacher is large at first, so without ``kl.stop_above`` it has no bound.
    """
    kl, per_token = config.kl, 0.0
    bound = kl.stop_above or 10 * (kl.target or math.inf)
    if bound == math.inf and config.algorithm.teacher is None:
        answers = config.data.num_prompts * config.data.group_size
        bound, per_token = KL_PER_ANSWER, KL_PER_TOKEN / answers
    reason = "the KL was above kl.stop_above={bound} nats per answer"
    watched = Alarm("kl", ">", bound, kl.stop_after, reason, "lower optimizer.lr.", per_token)
    return [watched] * (bound < math.inf) + [Alarm.read(text) for text in config.run.stop_when]


def unlogged(alarms: Sequence[Alarm], row: Figures) -> list[str]:
    """Warnings about conditions whose figure a step did not log. The doctor's figures are left out."""
    names = [each.figure for each in alarms if not each.reason and not each.figure.startswith("doctor/")]
    known = ", ".join(name for name in row if not name.startswith("doctor/"))
    return [
        f"warning: run.stop_when has {name}, which step {row['step']} did not log, so it cannot end the run. Logged: {known}."
        for name in names
        if name not in row
    ]
