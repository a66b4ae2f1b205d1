"""What a batch of rollouts shows of the KL, the sampler and the masks."""

from __future__ import annotations

from torchrl_llm_kl.diagnostics._causes import Cause, Finding
from torchrl_llm_kl.diagnostics._columns import KEYS as KEYS, TokenColumns, read_columns
from torchrl_llm_kl.diagnostics._doctor import Diagnosis, DiagnosisWarning, Doctor, diagnose
from torchrl_llm_kl.diagnostics._inspector import Inspection, inspect_tokens
from torchrl_llm_kl.diagnostics._live import RunMonitor, log_metrics, log_page, log_text, status_line
from torchrl_llm_kl.diagnostics._measures import measure
from torchrl_llm_kl.diagnostics._metrics import METRICS, Metric, Origin, describe_metric
from torchrl_llm_kl.diagnostics._texts import escaped as escaped

__all__ = [
    "METRICS",
    "Cause",
    "Diagnosis",
    "DiagnosisWarning",
    "Doctor",
    "Finding",
    "Inspection",
    "Metric",
    "Origin",
    "RunMonitor",
    "TokenColumns",
    "describe_metric",
    "diagnose",
    "inspect_tokens",
    "log_metrics",
    "log_page",
    "log_text",
    "measure",
    "read_columns",
    "status_line",
]
