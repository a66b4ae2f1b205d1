"""Losses: objectives per token, their reduction, and the modules that tie them to TensorDict keys."""

from __future__ import annotations

from torchrl_llm_kl.estimators import AdaptiveKLCoefficient, FixedKLCoefficient, KLPlacementWarning, check_placement
from torchrl_llm_kl.losses._arithmetic import AGGREGATIONS, Aggregation, aggregate, count
from torchrl_llm_kl.losses._objective import (
    LossTerm,
    ObjectiveArgs,
    ObjectiveName,
    ObjectiveSpec,
    UnknownObjectiveError,
    available_objectives,
    get_objective,
    objective,
    spec_of,
)
from torchrl_llm_kl.losses._parts import (
    Correction,
    EntropyBonus,
    ImportanceWeights,
    KLToReference,
    KLToSampler,
    OffPolicySequenceMask,
    TermPart,
    TopEntropyMask,
)
from torchrl_llm_kl.losses._policy_loss import PolicyLoss
from torchrl_llm_kl.losses._value_loss import ValueLoss, value_error
from torchrl_llm_kl.losses.corrections import (
    apply_correction,
    entropy_threshold,
    importance_weights,
    off_policy_sequence_mask,
    top_entropy_mask,
)
from torchrl_llm_kl.losses.objectives import *  # noqa: F403
from torchrl_llm_kl.losses.objectives import __all__ as _objectives
from torchrl_llm_kl.losses.terms import entropy_bonus, kl_to_ref, kl_to_sampler

__all__ = [
    "AGGREGATIONS",
    "AdaptiveKLCoefficient",
    "Aggregation",
    "Correction",
    "EntropyBonus",
    "FixedKLCoefficient",
    "ImportanceWeights",
    "KLPlacementWarning",
    "KLToReference",
    "KLToSampler",
    "LossTerm",
    "ObjectiveArgs",
    "ObjectiveName",
    "ObjectiveSpec",
    "OffPolicySequenceMask",
    "PolicyLoss",
    "TermPart",
    "TopEntropyMask",
    "UnknownObjectiveError",
    "ValueLoss",
    "aggregate",
    "apply_correction",
    "available_objectives",
    "check_placement",
    "count",
    "entropy_bonus",
    "entropy_threshold",
    "get_objective",
    "importance_weights",
    "kl_to_ref",
    "kl_to_sampler",
    "objective",
    "off_policy_sequence_mask",
    "spec_of",
    "top_entropy_mask",
    "value_error",
    *_objectives,
]
