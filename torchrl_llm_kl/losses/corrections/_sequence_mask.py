"""Leaving out failures that the policy would no longer produce."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import check_range, check_same_shape
from torchrl_llm_kl.losses._numerics import Scalar, clean, masked_mean, sequence_mean
from torchrl_llm_kl.losses._term import check_is_mask

__all__ = ["off_policy_sequence_mask"]


@torch.no_grad()
def off_policy_sequence_mask(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, mask: Tensor, *, delta: Scalar
) -> tuple[Tensor, dict[str, Tensor]]:
    """0 for tokens with a negative advantage in sequences that have become unlikely, 1 for all others.

    Unlikely is a sequence whose mean of ``old_log_prob - log_prob`` over its tokens is above ``delta``.

    Args:
        log_prob: nats, under the current policy; ``[*B, T]``.
        old_log_prob: the same tokens under the policy that sampled them, or as the sampler computed them; same shape.
        advantage: same shape.
        mask: tokens that count; bool, same shape.

    Keyword Args:
        delta: nats per token. Trinity: ``delta_sequence_masking``; TRL: ``off_policy_mask_threshold``.

    Returns:
        Weights, ``[*B, T]``, without graph, 0 where the mask is False; metric ``sequence_masked_fraction`` of the tokens that
        count.

    Raises:
        ValueError: if shapes differ or ``delta`` is negative.

    Example:
        >>> old, log_prob = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-2.0, -1.0]])
        >>> mask = torch.ones(1, 2, dtype=torch.bool)
        >>> off_policy_sequence_mask(log_prob, old, torch.tensor([[1.0, -1.0]]), mask, delta=0.1)[0]
        tensor([[1., 0.]])

    Source: DeepSeek-V3.2 (arXiv 2512.02556), eq. 9.
    """
    check_range(low=0.0, delta=delta)
    check_same_shape(mask=mask, log_prob=log_prob, old_log_prob=old_log_prob, advantage=advantage)
    check_is_mask(mask=mask)
    drift = sequence_mean(clean(old_log_prob, mask) - clean(log_prob, mask), mask)
    dropped = (drift > delta) & (clean(advantage, mask) < 0)
    return (mask & ~dropped).to(drift.dtype), {"sequence_masked_fraction": masked_mean(dropped.to(drift.dtype), mask)}
