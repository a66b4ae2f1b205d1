"""The texts of this package: each metric, and each cause that the doctor names.

Symbols: ``lp`` the current policy's log-prob of a token, ``old`` the one at sampling by the trainer, ``s`` the sampler's own,
``ref`` the reference's, ``A`` the advantage, ``r = exp(lp - old)``, ``d = old - s``. "mean" is over masked-in tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from configparser import ConfigParser
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Literal, TypeVar

#: Where a metric comes from.
Origin = Literal["every loss", "sampler", "objective", "correction", "distillation", "preferences", "critic", "task"]


@dataclass(frozen=True)
class Metric:
    """One metric.

    Args:
        formula: how it is computed.
        unit: ``nats``, ``share`` (0 to 1), ``1`` (a ratio or another pure number), ``tokens``, ``seconds``, ...
        normal: its value in a healthy run.
        deviation: the meaning of another value.
        remedy: how to correct it.
        origin: the part that reports it.
    """

    formula: str
    unit: str
    normal: str
    deviation: str
    remedy: str
    origin: Origin


T = TypeVar("T")


def read_texts(name: str, kind: Callable[..., T]) -> dict[str, T]:
    """A record of texts for each section of one of this package's ``.ini`` files."""
    texts = ConfigParser(interpolation=None, delimiters=["="])
    texts.read_string(files("torchrl_llm_kl.diagnostics").joinpath(name).read_text(encoding="utf-8"))
    return {section: kind(**texts[section]) for section in texts.sections()}


#: All metrics, by name. A name in angle brackets stands for any word.
METRICS: Mapping[str, Metric] = read_texts("metrics.ini", Metric)


def describe_metric(name: str) -> Metric | None:
    """The meaning of a metric, or None for one that is not of this package. ``_2`` for a second correction is understood.

    Example:
        >>> describe_metric("mismatch_k3").unit
        'nats per token'
        >>> describe_metric("token_k1_masked_fraction").origin, describe_metric("speed")
        ('correction', None)
    """
    base = re.sub(r"_[2-9]$", "", name)
    if base in METRICS:
        return METRICS[base]
    for known, metric in METRICS.items():
        pattern = re.sub(r"<\w+>", r"(?:token|seq_sum|seq_mean|seq_max)_k[1-3]", known)
        if pattern != known and re.fullmatch(pattern, base):
            return metric
    return None


#: Numbers, or words, by name.
Evidence = Mapping[str, float | str]
#: ``"fault"``: numbers are wrong; ``"note"``: worth knowing.
Severity = Literal["fault", "note"]


@dataclass(frozen=True)
class Cause:
    """A possible fault of a batch, or a note about it.

    Args:
        title: the cause in words.
        remedy: the change that corrects it. Empty where it depends on the numbers.
        severity: ``"fault"``: numbers are wrong; ``"note"``: worth knowing.
    """

    title: str
    remedy: str = ""
    severity: Severity = "fault"


#: All causes, by name.
CAUSES: Mapping[str, Cause] = read_texts("causes.ini", Cause)
#: Confidence from which a fault counts.
SURE = 0.5


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or worth knowing.

    Args:
        cause: a name of :data:`CAUSES`.
        confidence: in [0, 1].
        evidence: the numbers that it rests on.
        remedy: the change that corrects it.
    """

    cause: str
    confidence: float
    evidence: dict[str, float | str]
    remedy: str

    @property
    def title(self) -> str:
        """The cause in words."""
        return CAUSES[self.cause].title

    @property
    def severity(self) -> Severity:
        """``"fault"``: numbers are wrong; ``"note"``: worth knowing."""
        return CAUSES[self.cause].severity

    def to_dict(self) -> dict[str, object]:
        """All of it, for JSON."""
        return {**asdict(self), "title": self.title, "severity": self.severity}


def finding(cause: str, confidence: float, evidence: Evidence, remedy: str | None = None) -> Finding:
    """A finding, by default with the remedy of its cause."""
    return Finding(cause, max(0.0, min(float(confidence), 0.99)), dict(evidence), remedy or CAUSES[cause].remedy)
