"""Names of the package: it loads them on first use, type checkers read them here."""

from torchrl_llm_kl.diagnostics._attribution import (
    Attribution as Attribution,
    PredictedMismatch as PredictedMismatch,
    attribute_mismatch as attribute_mismatch,
    predict_mismatch as predict_mismatch,
)
from torchrl_llm_kl.diagnostics._catalog import (
    CAUSES as CAUSES,
    METRICS as METRICS,
    Cause as Cause,
    Finding as Finding,
    Metric as Metric,
    Origin as Origin,
    describe_metric as describe_metric,
)
from torchrl_llm_kl.diagnostics._check_loss import (
    LossReport as LossReport,
    check_loss as check_loss,
)
from torchrl_llm_kl.diagnostics._columns import (
    Reading as Reading,
    TokenColumns as TokenColumns,
    read_columns as read_columns,
)
from torchrl_llm_kl.diagnostics._doctor import (
    Diagnosis as Diagnosis,
    DiagnosisWarning as DiagnosisWarning,
    Doctor as Doctor,
    diagnose as diagnose,
)
from torchrl_llm_kl.diagnostics._inspector import (
    Inspection as Inspection,
    inspect_tokens as inspect_tokens,
)
from torchrl_llm_kl.diagnostics._live import (
    RunMonitor as RunMonitor,
    log_metrics as log_metrics,
    log_page as log_page,
    log_text as log_text,
    status_line as status_line,
)
from torchrl_llm_kl.diagnostics._measures import (
    measure as measure,
)

# isort: split
# For the layers above, not public:
from torchrl_llm_kl.diagnostics._quantities import (
    escaped as escaped,
)
