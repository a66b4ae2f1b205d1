"""Descriptions of all metrics, and of the causes that the doctor can name.

Symbols: ``lp`` is the current policy's log-prob of a token, ``old`` the trainer's at sampling time, ``s`` the sampler's own,
``ref`` the reference's, and ``A`` the advantage. ``r = exp(lp - old)`` and ``d = old - s``. A "mean" is over masked-in tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from configparser import ConfigParser
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Literal, TypeVar

#: The part of the package that reports a metric.
Origin = Literal["every loss", "sampler", "objective", "correction", "distillation", "preferences", "critic", "task"]


@dataclass(frozen=True)
class Metric:
    """The description of one metric.

    Args:
        formula: how the metric is computed.
        unit: ``nats``, ``share`` (0 to 1), ``1`` (a ratio or another pure number), ``tokens``, ``seconds``, ...
        normal: the value in a healthy run.
        deviation: the meaning of another value.
        remedy: how to correct it.
        origin: the part of the package that reports the metric.
    """

    formula: str
    unit: str
    normal: str
    deviation: str
    remedy: str
    origin: Origin


T = TypeVar("T")


def read_texts(name: str, kind: Callable[..., T]) -> dict[str, T]:
    """Read one of this package's ``.ini`` files. Returns one record for each section."""
    texts = ConfigParser(interpolation=None, delimiters=["="])
    texts.read_string(files("torchrl_llm_kl.diagnostics").joinpath(name).read_text(encoding="utf-8"))
    return {section: kind(**texts[section]) for section in texts.sections()}


#: All metrics by name. A word in angle brackets is a placeholder.
METRICS: Mapping[str, Metric] = read_texts("metrics.ini", Metric)


def describe_metric(name: str) -> Metric | None:
    """Look up the description of a metric. Returns None for an unknown metric.

    The suffix of a second or later correction (``_2`` to ``_9``) is ignored.

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
        pattern = re.sub(r"<\w\w+>", r"(?:token|seq_sum|seq_mean|seq_max)_k[1-3]", known.replace("<n>", r"\d"))
        if pattern != known and re.fullmatch(pattern, base):
            return metric
    return None


#: Numbers or words by name, on which a finding rests.
Evidence = Mapping[str, float | str]
#: A ``"fault"`` makes numbers wrong. A ``"note"`` is only worth knowing.
Severity = Literal["fault", "note"]


@dataclass(frozen=True)
class Cause:
    """A possible fault of a batch, or a note about it.

    Args:
        title: the cause in words.
        remedy: the change that corrects it. Empty if the remedy depends on the numbers.
        severity: ``"fault"`` if numbers are wrong, ``"note"`` if the cause is only worth knowing.
    """

    title: str
    remedy: str = ""
    severity: Severity = "fault"


#: All causes by name.
CAUSES: Mapping[str, Cause] = read_texts("causes.ini", Cause)
#: The smallest confidence at which a fault counts.
SURE = 0.5


@dataclass(frozen=True)
class Finding:
    """One fault of a batch, or one note about it.

    Args:
        cause: a name in :data:`CAUSES`.
        confidence: a number in [0, 1].
        evidence: the numbers that support the finding.
        remedy: the change that corrects the fault.
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
        """``"fault"`` if numbers are wrong, ``"note"`` if the cause is only worth knowing."""
        return CAUSES[self.cause].severity

    def to_dict(self) -> dict[str, object]:
        """Convert the finding to JSON values, including title and severity."""
        return {**asdict(self), "title": self.title, "severity": self.severity}


def finding(cause: str, confidence: float, evidence: Evidence, remedy: str | None = None) -> Finding:
    """Create a finding. It has the remedy of its cause unless another one is given."""
    return Finding(cause, max(0.0, min(float(confidence), 0.99)), dict(evidence), remedy or CAUSES[cause].remedy)
