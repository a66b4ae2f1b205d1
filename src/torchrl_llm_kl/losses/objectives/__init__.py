"""Objectives: one idea per file, pure functions of equal-shaped tensors. Importing this registers all of them."""

from __future__ import annotations

from torchrl_llm_kl.losses.objectives._ppo import ppo

__all__ = ["ppo"]
