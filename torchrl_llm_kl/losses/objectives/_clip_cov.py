"""Clip-Cov: no gradient for some of the tokens that would cost the most entropy."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import check_range
from torchrl_llm_kl.losses._numerics import Scalar, masked_mean, probability_ratio
from torchrl_llm_kl.losses._objective import objective
from torchrl_llm_kl.losses._term import LossTerm
from torchrl_llm_kl.losses.objectives._covariance import select_clip_cov
from torchrl_llm_kl.losses.objectives._ppo import CLIP_ALIASES, clipped_surrogate

__all__ = ["clip_cov"]


@objective(
    "clip_cov",
    needs=("old_log_prob", "advantage"),
    aliases={**CLIP_ALIASES, "clip_cov_ratio": "fraction", "clip_cov_lb": "cov_low", "clip_cov_ub": "cov_high"},
    source="Cui et al. 2025 (arXiv 2505.22617), section 4.2 (Clip-Cov)",
)
def clip_cov(
    log_prob: Tensor,
    mask: Tensor,
    *,
    old_log_prob: Tensor,
    advantage: Tensor,
    selected: Tensor | None = None,
    clip_low: Scalar = 0.2,
    clip_high: Scalar = 0.2,
    fraction: float = 2e-4,
    cov_low: Scalar = 1.0,
    cov_high: Scalar = 5.0,
) -> tuple[LossTerm, ...]:
    r"""PPO's clipped surrogate, and 0 for tokens chosen by the covariance of their log-prob and advantage.

    The gradient is that of :func:`ppo` (without dual clip), and none for the chosen tokens. The choice depends on the whole
    batch: make it with :func:`select_clip_cov` before cutting micro-batches, and hand each its part of ``selected``.

    Args:
        log_prob: nats, under the current policy, of tokens that the old policy sampled; ``[*B, T]``.
        mask: tokens that count; bool, same shape.

    Keyword Args:
        old_log_prob: the same tokens under the policy that sampled; same shape, without graph.
        advantage: same shape.
        selected: the chosen tokens; bool, same shape. They keep their place in the denominator. None: choose among the tokens
            at hand, with the global random numbers of the device.
        clip_low: the ratio counts as at least ``1 - clip_low``.
        clip_high: the ratio counts as at most ``1 + clip_high``.
        fraction: as for :func:`select_clip_cov`, where ``selected`` is None. verl: ``clip_cov_ratio``.
        cov_low: likewise. verl: ``clip_cov_lb``.
        cov_high: likewise. verl: ``clip_cov_ub``.

    Returns:
        One term, ``objective``; metrics as those of :func:`ppo` and ``selected_fraction``, of the tokens that count.

    Raises:
        ValueError: if shapes differ or a bound is out of range.

    Example:
        >>> log_prob = old = torch.tensor([[-1.0, -2.0]])
        >>> mask, advantage = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[1.0, -1.0]])
        >>> selected = torch.tensor([[True, False]])
        >>> clip_cov(log_prob, mask, old_log_prob=old, advantage=advantage, selected=selected)[0].value
        tensor([[0., 1.]])

    Source: Cui et al. 2025 (arXiv 2505.22617), section 4.2 (Clip-Cov).
    """
    check_range(low=0.0, high=1.0, clip_low=clip_low)
    check_range(low=0.0, clip_high=clip_high)
    if selected is None:
        selected = select_clip_cov(
            log_prob,
            mask,
            old_log_prob=old_log_prob,
            advantage=advantage,
            fraction=fraction,
            cov_low=cov_low,
            cov_high=cov_high,
            clip_low=clip_low,
            clip_high=clip_high,
        )
    ratio = probability_ratio(log_prob, old_log_prob)
    value, metrics = clipped_surrogate(ratio, advantage, mask, clip_low=clip_low, clip_high=clip_high)
    metrics["selected_fraction"] = masked_mean(selected.float(), mask)
    return (LossTerm("objective", torch.where(selected, 0, value), mask, metrics=metrics),)
