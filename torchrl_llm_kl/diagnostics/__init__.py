"""What a batch of rollouts shows of the KL, the sampler and the masks."""

from __future__ import annotations

from torchrl_llm_kl.diagnostics._causes import Cause, Finding
from torchrl_llm_kl.diagnostics._columns import KEYS as KEYS, TokenColumns, read_columns
from torchrl_llm_kl.diagnostics._doctor import Diagnosis, DiagnosisWarning, Doctor, diagnose
from torchrl_llm_kl.diagnostics._measures import measure

__all__ = [
    "Cause",
    "Diagnosis",
    "DiagnosisWarning",
    "Doctor",
    "Finding",
    "TokenColumns",
    "diagnose",
    "measure",
    "read_columns",
]
