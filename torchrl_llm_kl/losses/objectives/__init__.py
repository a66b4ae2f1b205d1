"""Objectives, by family: pure functions of equal-shaped tensors. Importing this registers all of them."""

from __future__ import annotations

from torchrl_llm_kl.losses.objectives._clipped import cispo, dapo, dr_grpo, gmpo, gspo, luspo, ppo, sapo
from torchrl_llm_kl.losses.objectives._covariance import clip_cov, kl_cov, select_clip_cov, select_kl_cov
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
from torchrl_llm_kl.losses.objectives._preference import apo_zero, dpo, hinge, ipo, robust, sppo_hard
from torchrl_llm_kl.losses.objectives._supervised import mix, mix_chord, mu_schedule, sft, sft_is, sft_phi

# fmt: off
__all__ = [
    "apo_zero", "cispo", "clip_cov", "dapo", "dpo", "dppo", "dr_grpo", "dro", "gmpo", "gpg", "gspo", "hinge",
    "importance_sampling", "ipo", "kl_cov", "luspo", "mix", "mix_chord", "mu_schedule", "opmd", "ppo", "rec", "robust", "sapo",
    "select_clip_cov", "select_kl_cov", "sft", "sft_is", "sft_phi", "sppo", "sppo_hard", "topr", "vespo",
]
# fmt: on
