"""Losses: per-token objectives, their reduction, and the modules that bind them to TensorDict keys."""

from __future__ import annotations

from torchrl_llm_kl.estimators import (
    AdaptiveEntropyCoefficient,
    AdaptiveKLCoefficient,
    DualKLCoefficient,
    FixedKLCoefficient,
    KLPlacementWarning,
    PIKLCoefficient,
    check_placement,
)
from torchrl_llm_kl.losses._arithmetic import AGGREGATIONS, Aggregation, aggregate, count
from torchrl_llm_kl.losses._objective import (
    LossTerm,
    ObjectiveArgs,
    ObjectiveName,
    ObjectiveSpec,
    Once,
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
    RejectionMask,
    RolloutArgs,
    TermPart,
    TopEntropyMask,
    rollout_corrections,
)
from torchrl_llm_kl.losses._policy_loss import PolicyLoss
from torchrl_llm_kl.losses._token_loss import LossOutput
from torchrl_llm_kl.losses._value_loss import ValueLoss, value_error
from torchrl_llm_kl.losses.corrections import (
    Divergence,
    apply_correction,
    correction_metrics,
    entropy_threshold,
    importance_weights,
    mismatch_metrics,
    off_policy_sequence_mask,
    rejection_mask,
    top_entropy_mask,
)
from torchrl_llm_kl.losses.objectives import (
    aot,
    aot_match,
    aot_reference_point,
    aot_unpaired,
    apo_down,
    apo_zero,
    bco,
    bco_pair,
    bco_reference_point,
    cispo,
    clip_cov,
    cpo,
    dapo,
    discopop,
    dpo,
    dppo,
    dr_grpo,
    dro,
    exo_pair,
    gmpo,
    gpg,
    gspo,
    hinge,
    importance_sampling,
    ipo,
    kl_cov,
    kto,
    kto_reference_point,
    luspo,
    mix,
    mix_chord,
    mu_schedule,
    nca_pair,
    opmd,
    orpo,
    ppo,
    rec,
    robust,
    sapo,
    select_clip_cov,
    select_kl_cov,
    sft,
    sft_is,
    sft_phi,
    simpo,
    sppo,
    sppo_hard,
    topr,
    vespo,
)
from torchrl_llm_kl.losses.terms import entropy_bonus, kl_to_ref, kl_to_sampler

# fmt: off
__all__ = [
    "AGGREGATIONS", "AdaptiveEntropyCoefficient", "AdaptiveKLCoefficient", "Aggregation", "Correction", "Divergence",
    "DualKLCoefficient", "EntropyBonus", "FixedKLCoefficient", "ImportanceWeights", "KLPlacementWarning",
    "KLToReference", "KLToSampler", "LossOutput", "LossTerm", "ObjectiveArgs", "ObjectiveName", "ObjectiveSpec",
    "OffPolicySequenceMask", "Once", "PIKLCoefficient", "PolicyLoss", "RejectionMask", "RolloutArgs", "TermPart",
    "TopEntropyMask", "UnknownObjectiveError", "ValueLoss",
    "aggregate", "aot", "aot_match", "aot_reference_point", "aot_unpaired", "apo_down", "apo_zero",
    "apply_correction", "available_objectives", "bco", "bco_pair", "bco_reference_point", "check_placement", "cispo",
    "clip_cov", "correction_metrics", "count", "cpo", "dapo", "discopop", "dpo", "dppo", "dr_grpo", "dro", "entropy_bonus",
    "entropy_threshold", "exo_pair", "get_objective", "gmpo", "gpg", "gspo", "hinge", "importance_sampling",
    "importance_weights", "ipo", "kl_cov", "kl_to_ref", "kl_to_sampler", "kto", "kto_reference_point", "luspo",
    "mismatch_metrics", "mix", "mix_chord", "mu_schedule", "nca_pair", "objective", "off_policy_sequence_mask",
    "opmd", "orpo", "ppo", "rec", "rejection_mask", "robust", "rollout_corrections", "sapo", "select_clip_cov",
    "select_kl_cov", "sft", "sft_is", "sft_phi", "simpo", "spec_of", "sppo", "sppo_hard", "top_entropy_mask", "topr",
    "value_error", "vespo",
]
# fmt: on
