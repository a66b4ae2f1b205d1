"""Objectives: one idea per file, pure functions of equal-shaped tensors. Importing this registers all of them."""

from __future__ import annotations

from torchrl_llm_kl.losses.objectives._anchored_preference import apo_zero, sppo_hard
from torchrl_llm_kl.losses.objectives._cispo import cispo
from torchrl_llm_kl.losses.objectives._clip_cov import clip_cov
from torchrl_llm_kl.losses.objectives._covariance import select_clip_cov, select_kl_cov
from torchrl_llm_kl.losses.objectives._dapo import dapo
from torchrl_llm_kl.losses.objectives._dpo import dpo, robust
from torchrl_llm_kl.losses.objectives._dppo import dppo
from torchrl_llm_kl.losses.objectives._dr_grpo import dr_grpo
from torchrl_llm_kl.losses.objectives._gmpo import gmpo
from torchrl_llm_kl.losses.objectives._gpg import gpg
from torchrl_llm_kl.losses.objectives._gspo import gspo
from torchrl_llm_kl.losses.objectives._importance_sampling import importance_sampling
from torchrl_llm_kl.losses.objectives._kl_cov import kl_cov
from torchrl_llm_kl.losses.objectives._margin import hinge, ipo
from torchrl_llm_kl.losses.objectives._mix import mix
from torchrl_llm_kl.losses.objectives._mix_chord import mix_chord, mu_schedule
from torchrl_llm_kl.losses.objectives._opmd import opmd
from torchrl_llm_kl.losses.objectives._ppo import ppo
from torchrl_llm_kl.losses.objectives._rec import rec
from torchrl_llm_kl.losses.objectives._sapo import sapo
from torchrl_llm_kl.losses.objectives._sft import sft, sft_is, sft_phi
from torchrl_llm_kl.losses.objectives._sppo import sppo
from torchrl_llm_kl.losses.objectives._topr import topr
from torchrl_llm_kl.losses.objectives._vespo import vespo

__all__ = [
    "apo_zero",
    "cispo",
    "clip_cov",
    "dapo",
    "dpo",
    "dppo",
    "dr_grpo",
    "gmpo",
    "gpg",
    "gspo",
    "hinge",
    "importance_sampling",
    "ipo",
    "kl_cov",
    "mix",
    "mix_chord",
    "mu_schedule",
    "opmd",
    "ppo",
    "rec",
    "robust",
    "sapo",
    "select_clip_cov",
    "select_kl_cov",
    "sft",
    "sft_is",
    "sft_phi",
    "sppo",
    "sppo_hard",
    "topr",
    "vespo",
]
