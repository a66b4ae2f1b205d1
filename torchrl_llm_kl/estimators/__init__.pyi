"""Names of the package: it loads them on first use, type checkers read them here."""

from torchrl_llm_kl.estimators._coefficients import (
    AdaptiveEntropyCoefficient as AdaptiveEntropyCoefficient,
    AdaptiveKLCoefficient as AdaptiveKLCoefficient,
    FixedKLCoefficient as FixedKLCoefficient,
    as_coefficient as as_coefficient,
)
from torchrl_llm_kl.estimators._controllers import (
    DualKLCoefficient as DualKLCoefficient,
    DualParametrisation as DualParametrisation,
    PIKLCoefficient as PIKLCoefficient,
)
from torchrl_llm_kl.estimators._exact import (
    exact_kl as exact_kl,
    exact_kl_from_logits as exact_kl_from_logits,
)
from torchrl_llm_kl.estimators._outcomes import (
    top_k_divergence as top_k_divergence,
)
from torchrl_llm_kl.estimators._per_token import (
    EstimatorName as EstimatorName,
    StraightThrough as StraightThrough,
    UnknownEstimatorError as UnknownEstimatorError,
    abs_ as abs_,
    available_estimators as available_estimators,
    corrected_k3 as corrected_k3,
    get_estimator as get_estimator,
    k1 as k1,
    k2 as k2,
    k3 as k3,
    low_var_kl as low_var_kl,
    none_ as none_,
)
from torchrl_llm_kl.estimators._table import (
    CONTRACTS as CONTRACTS,
    QUANTITIES as QUANTITIES,
    EstimatorContract as EstimatorContract,
    KLPlacementWarning as KLPlacementWarning,
    check_placement as check_placement,
    estimator_table as estimator_table,
)

# isort: split
# For the layers above, not public:
from torchrl_llm_kl.estimators._coefficients import (
    check_penalty as check_penalty,
)
