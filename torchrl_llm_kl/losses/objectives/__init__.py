"""Objectives, by family: pure functions of equal-shaped tensors. Importing this registers all of them."""

from __future__ import annotations

from torchrl_llm_kl.losses.objectives import (  # noqa: F401  (they register themselves)
    _clipped,
    _covariance,
    _distillation,
    _off_policy,
    _preference,
    _relative,
    _supervised,
)
