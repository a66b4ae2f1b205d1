"""Names of the package: it loads them on first use, type checkers read them here."""

from collections.abc import Sequence
from typing import Literal, TypedDict

from torch import Tensor, nn

from torchrl_llm_kl.estimators import (
    AdaptiveEntropyCoefficient as AdaptiveEntropyCoefficient,
    AdaptiveKLCoefficient as AdaptiveKLCoefficient,
    DualKLCoefficient as DualKLCoefficient,
    FixedKLCoefficient as FixedKLCoefficient,
    KLPlacementWarning as KLPlacementWarning,
    PIKLCoefficient as PIKLCoefficient,
    ScheduledCoefficient as ScheduledCoefficient,
    check_placement as check_placement,
)
from torchrl_llm_kl.losses import (
    corrections as corrections,
    objectives as objectives,
    terms as terms,
)
from torchrl_llm_kl.losses._arithmetic import (
    AGGREGATIONS as AGGREGATIONS,
    Aggregation as Aggregation,
    aggregate as aggregate,
    count as count,
)
from torchrl_llm_kl.losses._metrics import (
    improvement_bound as improvement_bound,
)
from torchrl_llm_kl.losses._objective import (
    LossInputs as LossInputs,
    LossTerm as LossTerm,
    MissingInputError as MissingInputError,
    ObjectiveSpec as ObjectiveSpec,
    Once as Once,
    UnknownObjectiveError as UnknownObjectiveError,
    available_objectives as available_objectives,
    get_objective as get_objective,
    objective as objective,
    spec_of as spec_of,
)
from torchrl_llm_kl.losses._parts import (
    Correction as Correction,
    DivergenceToTeacher as DivergenceToTeacher,
    EntropyBonus as EntropyBonus,
    ImportanceWeights as ImportanceWeights,
    KLToReference as KLToReference,
    KLToSampler as KLToSampler,
    OffPolicySequenceMask as OffPolicySequenceMask,
    RejectionMask as RejectionMask,
    StalenessMask as StalenessMask,
    TermPart as TermPart,
    TopEntropyMask as TopEntropyMask,
    TotalVariationMask as TotalVariationMask,
    rollout_corrections as rollout_corrections,
)
from torchrl_llm_kl.losses._policy_loss import (
    PolicyLoss as PolicyLoss,
)
from torchrl_llm_kl.losses._token_loss import (
    LossOutput as LossOutput,
    ValueInputs as ValueInputs,
    ValueLoss as ValueLoss,
    value_error as value_error,
)
from torchrl_llm_kl.losses.corrections import (
    Divergence as Divergence,
    apply_correction as apply_correction,
    correction_metrics as correction_metrics,
    entropy_threshold as entropy_threshold,
    importance_weights as importance_weights,
    mismatch_metrics as mismatch_metrics,
    off_policy_sequence_mask as off_policy_sequence_mask,
    rejection_mask as rejection_mask,
    staleness_mask as staleness_mask,
    staleness_metrics as staleness_metrics,
    top_entropy_mask as top_entropy_mask,
    total_variation_mask as total_variation_mask,
)
from torchrl_llm_kl.losses.objectives._clipped import (
    a3po as a3po,
    cispo as cispo,
    clip_cov as clip_cov,
    ctpo as ctpo,
    dapo as dapo,
    dr_grpo as dr_grpo,
    fipo as fipo,
    gmpo as gmpo,
    gspo as gspo,
    kl_cov as kl_cov,
    luspo as luspo,
    ppo as ppo,
    ppo_on_policy as ppo_on_policy,
    sapo as sapo,
    select_clip_cov as select_clip_cov,
    select_kl_cov as select_kl_cov,
)
from torchrl_llm_kl.losses.objectives._off_policy import (
    a2po as a2po,
    dppo as dppo,
    dro as dro,
    gpg as gpg,
    importance_sampling as importance_sampling,
    mask_ipo as mask_ipo,
    opmd as opmd,
    rec as rec,
    ref_kl as ref_kl,
    sppo as sppo,
    topr as topr,
    vespo as vespo,
)
from torchrl_llm_kl.losses.objectives._preference import (
    apo_down as apo_down,
    apo_zero as apo_zero,
    discopop as discopop,
    dpo as dpo,
    exo_pair as exo_pair,
    hinge as hinge,
    ipo as ipo,
    nca_pair as nca_pair,
    preference_sum as preference_sum,
    robust as robust,
    sppo_hard as sppo_hard,
)
from torchrl_llm_kl.losses.objectives._relative import (
    aot as aot,
    aot_match as aot_match,
    aot_reference_point as aot_reference_point,
    aot_unpaired as aot_unpaired,
    bco as bco,
    bco_pair as bco_pair,
    bco_reference_point as bco_reference_point,
    kto as kto,
    kto_reference_point as kto_reference_point,
    real as real,
)
from torchrl_llm_kl.losses.objectives._supervised import (
    ROLES as ROLES,
    distill as distill,
    echo as echo,
    mix as mix,
    mix_chord as mix_chord,
    sdar as sdar,
    sft as sft,
    sft_is as sft_is,
    sft_phi as sft_phi,
    vapo as vapo,
)
from torchrl_llm_kl.losses.objectives._without_reference import (
    cpo as cpo,
    orpo as orpo,
    simpo as simpo,
    tpo as tpo,
)
from torchrl_llm_kl.losses.terms import (
    divergence_to_teacher as divergence_to_teacher,
    entropy_bonus as entropy_bonus,
    kl_to_ref as kl_to_ref,
    kl_to_sampler as kl_to_sampler,
)

# isort: split
# For the layers above, not public:
from torchrl_llm_kl.losses._objective import (
    KLLevel as KLLevel,
    Terms as Terms,
    Weights as Weights,
    name_of as name_of,
)
from torchrl_llm_kl.losses._policy_inputs import (
    check_actor_options as check_actor_options,
)

# Generated by `make stubs` from what is registered.
#: The names of :func:`get_objective`.
ObjectiveName = Literal[
    "a2po",
    "a3po",
    "aot",
    "aot_unpaired",
    "apo_down",
    "apo_zero",
    "bco",
    "bco_pair",
    "cispo",
    "clip_cov",
    "cpo",
    "ctpo",
    "dapo",
    "discopop",
    "distill",
    "dpo",
    "dppo",
    "dr_grpo",
    "dro",
    "echo",
    "exo_pair",
    "fipo",
    "gmpo",
    "gpg",
    "gspo",
    "hinge",
    "importance_sampling",
    "ipo",
    "kl_cov",
    "kto",
    "luspo",
    "mask_ipo",
    "mix",
    "mix_chord",
    "nca_pair",
    "opmd",
    "orpo",
    "ppo",
    "ppo_on_policy",
    "preference_sum",
    "real",
    "rec",
    "ref_kl",
    "robust",
    "sapo",
    "sdar",
    "sft",
    "sft_is",
    "sft_phi",
    "simpo",
    "sppo",
    "sppo_hard",
    "topr",
    "tpo",
    "vapo",
    "vespo",
]

class ObjectiveArgs(TypedDict, total=False):
    """Every hyper-parameter of every registered objective."""

    advantage_threshold: Tensor | float | nn.Module
    alpha: Tensor | float | nn.Module | None
    beta: Tensor | float | nn.Module
    clip_c: Tensor | float | nn.Module | None
    clip_high: Tensor | float | nn.Module | None
    clip_low: Tensor | float | nn.Module | None
    clip_mode: Literal["none", "one-side", "two-side", "ring", "gspo-one-side"]
    clip_ratio_c: Tensor | float | nn.Module | None
    coeff: Tensor | float | nn.Module
    cov_high: Tensor | float | nn.Module
    cov_low: Tensor | float | nn.Module
    cutoff_prob: Tensor | float | nn.Module
    delta_sequence_masking: Tensor | float | nn.Module
    desirable_weight: Tensor | float | nn.Module
    distribution: Literal["top_k", "exact"]
    divergence: Literal["tv", "kl"]
    enable_mask_clip: bool
    enable_phi_function: bool
    enable_sequence_masking: bool
    epsilon: Tensor | float | nn.Module
    epsilon_high: Tensor | float | nn.Module
    epsilon_high_prime: Tensor | float | nn.Module
    epsilon_low: Tensor | float | nn.Module
    epsilon_low_prime: Tensor | float | nn.Module
    expert_aggregation: Aggregation | None
    f_alpha: Tensor | float | nn.Module
    f_divergence: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]
    fraction: float
    half_life: Tensor | float | nn.Module
    k_neg: Tensor | float | nn.Module
    k_pos: Tensor | float | nn.Module
    kl_tau: Tensor | float | nn.Module
    label_smoothing: Tensor | float | nn.Module
    lambda_neg: Tensor | float | nn.Module
    lambda_pos: Tensor | float | nn.Module
    ld_alpha: Tensor | float | nn.Module | None
    length_normalised: bool
    level: Literal["token", "sequence"]
    log_prob_min: Tensor | float | nn.Module | None
    loss: Literal["logistic", "hinge", "ipo"]
    losses: Sequence[str]
    margin: Tensor | float | nn.Module
    mask_clip_high: Tensor | float | nn.Module
    mask_clip_low: Tensor | float | nn.Module
    mu: Tensor | float | nn.Module
    nll_aggregation: Aggregation | None
    nll_coeff: Tensor | float | nn.Module
    one_sided: bool
    power: Tensor | float | nn.Module
    ratio_max: Tensor | float | nn.Module | None
    regularizer: Literal["none", "k2", "forward-kl"]
    regularizer_coef: Tensor | float | nn.Module
    roles: dict | None
    safe_ratio: Tensor | float | nn.Module | None
    tau: Tensor | float | nn.Module
    tau_neg: Tensor | float | nn.Module
    tau_pos: Tensor | float | nn.Module
    teacher_weights: Sequence[float] | None
    temp: Tensor | float | nn.Module
    undesirable_weight: Tensor | float | nn.Module
    usual_aggregation: Aggregation | None
    value_max: Tensor | float | nn.Module | None
    weight: Literal["none", "importance_sampling", "gspo_importance_sampling", "advantage"]
    weight_high: Tensor | float | nn.Module
    weight_low: Tensor | float | nn.Module
    weight_max: Tensor | float | nn.Module | None
    weighting: Literal["none", "probability", "aligned"]
    weights: Sequence[float] | None
