"""Objectives, by family: pure functions of equal-shaped tensors. Importing this registers all of them."""

from __future__ import annotations

from torchrl_llm_kl.losses.objectives._clipped import cispo, dapo, dr_grpo, gmpo, gspo, luspo, ppo, sapo
from torchrl_llm_kl.losses.objectives._covariance import clip_cov, kl_cov, select_clip_cov, select_kl_cov
from torchrl_llm_kl.losses.objectives._distillation import (
    DISTILLATION_INPUTS as DISTILLATION_INPUTS,
    Distribution as Distribution,
    distill,
)
from torchrl_llm_kl.losses.objectives._off_policy import (
    dppo,
    dro,
    gpg,
    importance_sampling,
    opmd,
    rec,
    sppo,
    topr,
    vespo,
)
from torchrl_llm_kl.losses.objectives._preference import (
    apo_down,
    apo_zero,
    cpo,
    discopop,
    dpo,
    exo_pair,
    hinge,
    ipo,
    nca_pair,
    orpo,
    robust,
    simpo,
    sppo_hard,
)
from torchrl_llm_kl.losses.objectives._relative import (
    aot,
    aot_match,
    aot_reference_point,
    aot_unpaired,
    bco,
    bco_pair,
    bco_reference_point,
    kto,
    kto_reference_point,
)
from torchrl_llm_kl.losses.objectives._supervised import mix, mix_chord, mu_schedule, sft, sft_is, sft_phi

# fmt: off
__all__ = [
    "aot", "aot_match", "aot_reference_point", "aot_unpaired", "apo_down", "apo_zero", "bco", "bco_pair",
    "bco_reference_point", "cispo", "clip_cov", "cpo", "dapo", "discopop", "distill", "dpo", "dppo", "dr_grpo", "dro",
    "exo_pair", "gmpo", "gpg", "gspo", "hinge", "importance_sampling", "ipo", "kl_cov", "kto", "kto_reference_point",
    "luspo", "mix", "mix_chord", "mu_schedule", "nca_pair", "opmd", "orpo", "ppo", "rec", "robust", "sapo",
    "select_clip_cov", "select_kl_cov", "sft", "sft_is", "sft_phi", "simpo", "sppo", "sppo_hard", "topr", "vespo",
]
# fmt: on
