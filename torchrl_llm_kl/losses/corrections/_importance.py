"""Weights for tokens whose sampler is another program than the trainer and computed other probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import check_choice, check_same_shape
from torchrl_llm_kl.losses._numerics import (
    LARGEST_LOG_RATIO,
    Scalar,
    bounded_exp,
    clamp,
    clean,
    masked_mean,
    sequence_mean,
    sequence_sum,
)
from torchrl_llm_kl.losses._term import check_is_mask

__all__ = ["importance_weights"]

_LEVELS = ("token", "sequence", "geometric")
_MODES = ("truncate", "mask")


@torch.no_grad()
def importance_weights(
    old_log_prob: Tensor,
    sampler_log_prob: Tensor,
    mask: Tensor,
    *,
    level: str = "token",
    mode: str = "truncate",
    low: Scalar | None = None,
    high: Scalar | None = 2.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    r""":math:`\pi_{old} / \pi_{sampler}` of the same weights in trainer and sampler, bounded.

    The product of a token's loss and its weight has, but for the bounds, the mean that it would have if the trainer's own
    probabilities had been sampled from.

    ========================== ============================================================== ===========================
    setting                    known as                                                       bounds there
    ========================== ============================================================== ===========================
    ``token``, ``truncate``    truncated importance sampling (TIS)                            ``high=2``
    ``token``, ``mask``        IcePop                                                         ``low=0.5, high=5``
    ``sequence``, ``truncate`` sequence TIS                                                   ``high=2`` (verl), ``3`` (TRL)
    ``sequence``, ``mask``     masked importance sampling, TRL's default                      ``high=3``
    ``geometric``, ``mask``    geometric mask of long answers                                 close to 1
    ========================== ============================================================== ===========================

    Args:
        old_log_prob: nats, of the sampled tokens, computed by the trainer before its first update on them; ``[*B, T]``.
        sampler_log_prob: the same tokens, computed by the sampler; same shape. NaN, for a token that it did not score, stands
            for no difference.
        mask: tokens that count; bool, same shape.

    Keyword Args:
        level: ``"token"``: the ratio of each token; ``"sequence"``: the product of all of a sequence's, for all of its tokens;
            ``"geometric"``: the geometric mean of a sequence's. verl: ``rollout_is``; TRL: in
            ``vllm_importance_sampling_mode``.
        mode: ``"truncate"`` moves weights outside the bounds to the nearest bound; ``"mask"`` makes them 0, and leaves those
            inside as they are.
        low: smallest weight; None for no such bound. TRL: ``vllm_importance_sampling_clip_min``.
        high: largest weight; None for no such bound. verl: ``rollout_is_threshold``; TRL:
            ``vllm_importance_sampling_clip_max``.

    Returns:
        Weights, ``[*B, T]``, float32 or wider, without graph, 0 where the mask is False. Log-ratios (of tokens, and their sums)
        beyond +-80 nats count as 80, so that they are finite. Metrics, over tokens, or over sequences for the other levels:
        ``weight_mean`` and ``weight_max`` before the bounds, ``truncated_fraction`` or ``masked_fraction`` for what is out of
        them, and of the weights after them ``effective_sample_size``, as a share of all, ``(mean w)**2 / mean w**2``.

    Raises:
        ValueError: if shapes differ, a name is unknown, or ``low`` is above ``high``.

    Example:
        >>> old, sampler = torch.tensor([[-1.0, -1.0, -3.0]]), torch.tensor([[-1.0, -3.0, -1.0]])
        >>> mask = torch.ones(1, 3, dtype=torch.bool)
        >>> importance_weights(old, sampler, mask)[0]
        tensor([[1.0000, 2.0000, 0.1353]])
        >>> importance_weights(old, sampler, mask, mode="mask", low=0.5, high=5.0)[0]
        tensor([[1., 0., 0.]])

    Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (TIS); Ling team 2025
    (arXiv 2510.18855), IcePop; Li et al. 2025, "When Speed Kills Stability" (sequence and geometric).
    """
    check_choice(_LEVELS, level=level)
    check_choice(_MODES, mode=mode)
    if isinstance(high, (int, float)) and not high > 0:
        raise ValueError(f"high must be greater than 0, got {high}")
    if isinstance(low, (int, float)) and not low >= 0:
        raise ValueError(f"low must be at least 0, got {low}")
    if isinstance(low, (int, float)) and isinstance(high, (int, float)) and low > high:
        raise ValueError(f"low must be at most high, got low={low} and high={high}")
    check_same_shape(mask=mask, old_log_prob=old_log_prob, sampler_log_prob=sampler_log_prob)
    check_is_mask(mask=mask)
    difference = clean(old_log_prob, mask) - clean(sampler_log_prob, mask)
    log_ratio = difference.nan_to_num(nan=0.0).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    counts = mask
    if level != "token":
        log_ratio = (sequence_sum if level == "sequence" else sequence_mean)(log_ratio, mask)
        counts = mask.any(-1, keepdim=True)
    ratio = bounded_exp(log_ratio)
    weight = clamp(ratio, low, high)
    outside = weight != ratio
    if mode == "mask":
        weight = torch.where(outside, 0, ratio)
    fraction = "truncated_fraction" if mode == "truncate" else "masked_fraction"
    metrics = {
        "weight_mean": masked_mean(ratio, counts),
        "weight_max": torch.where(counts, ratio, 0).max() if ratio.numel() else ratio.new_zeros(()),
        fraction: masked_mean(outside.to(ratio.dtype), counts),
        "effective_sample_size": _effective_sample_size(weight, counts),
    }
    return torch.where(mask, weight, 0), metrics


def _effective_sample_size(weight: Tensor, mask: Tensor) -> Tensor:
    # Of no consequence for the result; the squares of large weights would not be finite.
    weight = weight / weight.amax().clamp(min=1.0) if weight.numel() else weight
    square = masked_mean(weight.square(), mask)
    return masked_mean(weight, mask).square() / torch.where(square == 0, 1, square)
