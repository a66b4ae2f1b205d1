"""KL estimators, the exact KL, and the coefficients that weigh them.

Pure functions of equal-shaped tensors: nothing here knows of keys, environments or models. ``docs/estimators.md`` has
the table of which one to use where.
"""

from __future__ import annotations

from torchrl_llm_kl.estimators._coefficients import AdaptiveKLCoefficient, FixedKLCoefficient, as_coefficient
from torchrl_llm_kl.estimators._exact import exact_kl, exact_kl_from_logits
from torchrl_llm_kl.estimators._per_token import abs_, corrected_k3, k1, k2, k3, low_var_kl, none_
from torchrl_llm_kl.estimators._registry import UnknownEstimatorError, available_estimators, get_estimator
from torchrl_llm_kl.estimators._straight_through import StraightThrough
from torchrl_llm_kl.estimators._table import CONTRACTS, QUANTITIES, EstimatorContract, estimator_table

__all__ = [
    "CONTRACTS",
    "QUANTITIES",
    "AdaptiveKLCoefficient",
    "EstimatorContract",
    "FixedKLCoefficient",
    "StraightThrough",
    "UnknownEstimatorError",
    "abs_",
    "as_coefficient",
    "available_estimators",
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
]
