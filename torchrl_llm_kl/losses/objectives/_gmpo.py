"""GMPO: the geometric mean of a sequence's clipped ratios."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import check_range
from torchrl_llm_kl.losses._numerics import Scalar, bounded_exp, clamp, masked_mean, sequence_mean
from torchrl_llm_kl.losses._objective import objective
from torchrl_llm_kl.losses._term import LossTerm
from torchrl_llm_kl.losses.objectives._ppo import CLIP_ALIASES

__all__ = ["gmpo"]


@objective(
    "gmpo",
    needs=("old_log_prob", "advantage"),
    aggregation="seq-mean-token-mean",
    aliases=CLIP_ALIASES,
    source="Zhao et al. 2025 (arXiv 2507.20673), eq. 4 and algorithm 1",
)
def gmpo(
    log_prob: Tensor,
    mask: Tensor,
    *,
    old_log_prob: Tensor,
    advantage: Tensor,
    clip_low: Scalar = 0.4,
    clip_high: Scalar = 0.4,
) -> tuple[LossTerm, ...]:
    r"""``-A exp(mean(c))`` per sequence, where ``c`` are its tokens' log-ratios after PPO's clipping in log space.

    With ``d = log_prob - old_log_prob`` and ``k = clip(d, -clip_low, clip_high)`` a token's ``c`` is ``min(d, k)`` where
    ``A > 0`` and ``max(d, k)`` where ``A < 0``: a ratio between ``exp(-clip_low)`` and ``exp(clip_high)`` or on its way back.
    The gradient reaches the tokens that are not clipped, all with the same weight. verl calls it ``geo_mean``.

    Args:
        log_prob: nats, under the current policy, of tokens that the old policy sampled; ``[*B, T]``.
        mask: tokens that count; bool, same shape.

    Keyword Args:
        old_log_prob: the same tokens under the policy that sampled; same shape, without graph.
        advantage: same shape; the mean of each sequence is taken.
        clip_low: nats: a log-ratio counts as at least ``-clip_low``.
        clip_high: nats: a log-ratio counts as at most ``clip_high``.

    Returns:
        One term, ``objective``, per sequence: ``[*B, 1]``; metrics ``clip_fraction`` (``_low``: A <= 0, ``_high``: A > 0)
        of the tokens that count.

    Raises:
        ValueError: if shapes differ or a bound is negative.

    Example:
        >>> log_prob, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.5]])
        >>> mask, advantage = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[1.0, 1.0]])
        >>> gmpo(log_prob, mask, old_log_prob=old, advantage=advantage)[0].value  # exp((0.4 - 0.5) / 2)
        tensor([[-0.9512]])

    Source: Zhao et al. 2025 (arXiv 2507.20673), eq. 4 and algorithm 1.
    """
    check_range(low=0.0, clip_low=clip_low, clip_high=clip_high)
    advantage = sequence_mean(advantage, mask)
    free = log_prob - old_log_prob
    bound = clamp(free, -clip_low, clip_high)
    up = advantage > 0
    clipped = torch.where(up, bound < free, bound > free)
    value = -advantage * bounded_exp(sequence_mean(torch.where(clipped, bound, free), mask))
    metrics = {
        "clip_fraction": masked_mean(clipped.float(), mask),
        "clip_fraction_low": masked_mean((clipped & ~up).float(), mask),
        "clip_fraction_high": masked_mean((clipped & up).float(), mask),
    }
    return (LossTerm("objective", value, mask.any(-1, keepdim=True), metrics=metrics),)
