"""KL estimators, the exact KL, and their coefficients: pure functions of tensors of one shape.

``docs/estimators.md`` has the table of which estimator to use where. The per-token estimators share their arguments:

Args:
    log_prob: nats, of the sampled token under the current policy; ``[*B, T]``.
    ref_log_prob: the token under the reference, without graph; same shape.
    old_log_prob: the token under the policy that sampled it, without graph; same shape. Only ``corrected_k3`` uses it;
        the others check its shape.

Returns:
    Per token, ``[*B, T]``; not masked, not reduced, nothing detached. Float32 or wider, as is the arithmetic. NaN where
    both log-probs are ``-inf``: mask such positions *before* calling.

Raises:
    ValueError: if the shapes differ.
"""

from __future__ import annotations

from torchrl_llm_kl.estimators._coefficients import (
    AdaptiveEntropyCoefficient,
    AdaptiveKLCoefficient,
    FixedKLCoefficient,
    as_coefficient,
    check_penalty as check_penalty,
)
from torchrl_llm_kl.estimators._controllers import DualKLCoefficient, DualParametrisation, PIKLCoefficient
from torchrl_llm_kl.estimators._exact import exact_kl, exact_kl_from_logits
from torchrl_llm_kl.estimators._outcomes import top_k_divergence
from torchrl_llm_kl.estimators._per_token import (
    EstimatorName,
    StraightThrough,
    UnknownEstimatorError,
    abs_,
    available_estimators,
    corrected_k3,
    get_estimator,
    k1,
    k2,
    k3,
    low_var_kl,
    none_,
)
from torchrl_llm_kl.estimators._table import (
    CONTRACTS,
    QUANTITIES,
    EstimatorContract,
    KLPlacementWarning,
    check_placement,
    estimator_table,
)

__all__ = [
    "CONTRACTS",
    "QUANTITIES",
    "AdaptiveEntropyCoefficient",
    "AdaptiveKLCoefficient",
    "DualKLCoefficient",
    "DualParametrisation",
    "EstimatorContract",
    "EstimatorName",
    "FixedKLCoefficient",
    "KLPlacementWarning",
    "PIKLCoefficient",
    "StraightThrough",
    "UnknownEstimatorError",
    "abs_",
    "as_coefficient",
    "available_estimators",
    "check_placement",
    "corrected_k3",
    "estimator_table",
    "exact_kl",
    "exact_kl_from_logits",
    "get_estimator",
    "k1",
    "k2",
    "k3",
    "low_var_kl",
    "none_",
    "top_k_divergence",
]
