"""CISPO: the importance weight is clipped, the gradient is not."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import check_range
from torchrl_llm_kl.losses._numerics import Scalar, clamp, masked_mean, probability_ratio
from torchrl_llm_kl.losses._objective import objective
from torchrl_llm_kl.losses._term import LossTerm
from torchrl_llm_kl.losses.objectives._ppo import CLIP_ALIASES

__all__ = ["cispo"]


@objective(
    "cispo",
    needs=("old_log_prob", "advantage"),
    aliases={**CLIP_ALIASES, "mask_clip_range_low": "mask_clip_low", "mask_clip_range_high": "mask_clip_high"},
    source="MiniMax-M1 2025 (arXiv 2506.13585), eq. 4-5; token mask: eq. 6-7",
)
def cispo(
    log_prob: Tensor,
    mask: Tensor,
    *,
    old_log_prob: Tensor,
    advantage: Tensor,
    clip_low: Scalar = 1.0,
    clip_high: Scalar = 0.28,
    enable_mask_clip: bool = False,
    mask_clip_low: Scalar = 1.0,
    mask_clip_high: Scalar = 0.28,
) -> tuple[LossTerm, ...]:
    r"""REINFORCE with a bounded importance weight: ``-A sg(clip(r, 1 - clip_low, 1 + clip_high)) log_prob`` per token.

    ``r`` is the probability ratio of the policy to the one that sampled. The gradient is the off-policy policy gradient with
    the weight cut off at the bounds: a clipped token weighs less and never nothing.

    Args:
        log_prob: nats, under the current policy, of tokens that the old policy sampled; ``[*B, T]``.
        mask: tokens that count; bool, same shape.

    Keyword Args:
        old_log_prob: the same tokens under the policy that sampled; same shape, without graph.
        advantage: same shape.
        clip_low: a weight is at least ``1 - clip_low``: 1 for no lower bound. Trinity: ``clip_range_low``.
        clip_high: a weight is at most ``1 + clip_high``. Trinity: ``clip_range_high``. (TRL's ``epsilon_high`` is the bound
            itself: ``1 + clip_high``.)
        enable_mask_clip: leave out tokens that PPO would clip: ``A > 0`` and ``r > 1 + mask_clip_high``, or ``A < 0`` and
            ``r < 1 - mask_clip_low``. They keep their place in the denominator.
        mask_clip_low: used with ``enable_mask_clip`` only. Trinity: ``mask_clip_range_low``.
        mask_clip_high: used with ``enable_mask_clip`` only. Trinity: ``mask_clip_range_high``.

    Returns:
        One term, ``objective``; metrics ``clip_fraction`` (``_low``: weights raised, ``_high``: weights lowered) and, with the
        token mask, ``token_masked_fraction``, all of the tokens that count.

    Raises:
        ValueError: if shapes differ or a bound is out of range.

    Example:
        >>> log_prob, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.5]])
        >>> mask, advantage = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[1.0, -1.0]])
        >>> cispo(log_prob, mask, old_log_prob=old, advantage=advantage)[0].value
        tensor([[ 1.2800, -1.2131]])

    Source: MiniMax-M1 2025 (arXiv 2506.13585), eq. 4-5; token mask: eq. 6-7.
    """
    check_range(low=0.0, high=1.0, clip_low=clip_low, mask_clip_low=mask_clip_low)
    check_range(low=0.0, clip_high=clip_high, mask_clip_high=mask_clip_high)
    ratio = probability_ratio(log_prob, old_log_prob).detach()
    value = -advantage * clamp(ratio, 1 - clip_low, 1 + clip_high) * log_prob
    below, above = ratio < 1 - clip_low, ratio > 1 + clip_high
    metrics = {
        "clip_fraction": masked_mean((below | above).float(), mask),
        "clip_fraction_low": masked_mean(below.float(), mask),
        "clip_fraction_high": masked_mean(above.float(), mask),
    }
    if enable_mask_clip:
        too_likely = (ratio > 1 + mask_clip_high) & (advantage > 0)
        too_unlikely = (ratio < 1 - mask_clip_low) & (advantage < 0)
        dropped = too_likely | too_unlikely
        metrics["token_masked_fraction"] = masked_mean(dropped.float(), mask)
        value = torch.where(dropped, 0, value)
    return (LossTerm("objective", value, mask, metrics=metrics),)
