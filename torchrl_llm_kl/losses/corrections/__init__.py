"""Corrections of an objective: weights per token for what the sampler did differently, or for what is worth training.

Each returns ``(weights, metrics)``: weights ``[*B, T]`` without graph, 1 where nothing is corrected, finite, 0 where the
mask is False; and metrics as in :class:`~torchrl_llm_kl.losses.LossTerm`. :func:`apply_correction` multiplies.
"""

from __future__ import annotations

from torchrl_llm_kl.losses.corrections._apply import apply_correction
from torchrl_llm_kl.losses.corrections._importance import importance_weights
from torchrl_llm_kl.losses.corrections._sequence_mask import off_policy_sequence_mask
from torchrl_llm_kl.losses.corrections._top_entropy import entropy_threshold, top_entropy_mask

__all__ = [
    "apply_correction",
    "entropy_threshold",
    "importance_weights",
    "off_policy_sequence_mask",
    "top_entropy_mask",
]
