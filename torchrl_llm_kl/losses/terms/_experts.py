"""Penalties on what the policy wrote, and not on what experts wrote."""

from __future__ import annotations

from torch import Tensor

__all__ = ["without_experts"]


def without_experts(mask: Tensor, expert_mask: Tensor | None, leave_out_experts: bool) -> Tensor:
    """The mask, without tokens of experts if ``leave_out_experts``.

    Raises:
        ValueError: if they are to be left out and nobody says which they are.
    """
    if not leave_out_experts:
        return mask
    if expert_mask is None:
        raise ValueError("leave_out_experts=True needs expert_mask: pass expert_mask=, of the shape of log_prob")
    return mask & ~expert_mask
