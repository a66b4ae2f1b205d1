"""What is added to an objective: functions with the inputs and outputs of one, but in no registry."""

from __future__ import annotations

from torchrl_llm_kl.losses.terms._entropy import entropy_bonus
from torchrl_llm_kl.losses.terms._kl import kl_to_ref, kl_to_sampler

__all__ = ["entropy_bonus", "kl_to_ref", "kl_to_sampler"]
