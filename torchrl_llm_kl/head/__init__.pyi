"""Names of the package: it loads them on first use, type checkers read them here."""

from torchrl_llm_kl.head._functions import (
    Direction as Direction,
    HeadOptions as HeadOptions,
    PairOptions as PairOptions,
    linear_kept as linear_kept,
    linear_log_prob as linear_log_prob,
    linear_outcomes as linear_outcomes,
    linear_pair as linear_pair,
    linear_top_k as linear_top_k,
    logits_kl as logits_kl,
)
from torchrl_llm_kl.head._tiles import (
    HeadOutput as HeadOutput,
    Kept as Kept,
    OutcomesOutput as OutcomesOutput,
    PairOutput as PairOutput,
    TopKOutput as TopKOutput,
    Truncation as Truncation,
)

# isort: split
# For the layers above, not public:
from torchrl_llm_kl.head._functions import fused_failure as fused_failure, fused_obstacle as fused_obstacle
from torchrl_llm_kl.head._tiles import (
    WHOLE as WHOLE,
    dropped as dropped,
    floor_of as floor_of,
    log_softmax as log_softmax,
)
