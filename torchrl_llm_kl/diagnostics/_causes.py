"""What the doctor names: causes in words, declared in ``causes.ini``, and findings of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from torchrl_llm_kl.diagnostics._metrics import read_texts

#: Numbers, or words, by name.
Evidence = Mapping[str, float | str]
#: ``"fault"``: numbers are wrong; ``"note"``: worth knowing.
Severity = Literal["fault", "note"]


@dataclass(frozen=True)
class Cause:
    """What may be wrong with a batch, or is worth knowing of it.

    Args:
        title: the cause in words.
        remedy: what to change; empty where it depends on the numbers.
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
        remedy: what to change.
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
