"""Which tokens make the policy lose its entropy: those with a high covariance of log-prob and advantage."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import check_range, check_same_shape
from torchrl_llm_kl.losses._numerics import Scalar, masked_mean, probability_ratio
from torchrl_llm_kl.losses._term import check_is_mask
from torchrl_llm_kl.losses.objectives._ppo import clipped_surrogate

__all__ = ["select_clip_cov", "select_kl_cov"]


def select_clip_cov(
    log_prob: Tensor,
    mask: Tensor,
    *,
    old_log_prob: Tensor,
    advantage: Tensor,
    fraction: float = 2e-4,
    cov_low: Scalar = 1.0,
    cov_high: Scalar = 5.0,
    clip_low: Scalar = 0.2,
    clip_high: Scalar = 0.2,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Choose tokens for :func:`clip_cov`: at random among those whose covariance lies between two bounds.

    The covariance of a token is ``(log_prob - mean) (A - mean)`` with the means of all tokens that count. So the choice
    belongs to a whole batch: make it once, before micro-batches are cut, and hand them their part.

    Args:
        log_prob: nats, under the current policy; ``[*B, T]``. No gradient is taken.
        mask: tokens that count; bool, same shape.

    Keyword Args:
        old_log_prob: under the policy that sampled; same shape.
        advantage: same shape.
        fraction: how many to choose, of the tokens that count: rounded down, but one at least (as the authors' code).
        cov_low: only tokens with a covariance above this.
        cov_high: only tokens with a covariance below this.
        clip_low: tokens that :func:`ppo` clips with these bounds are not chosen: they have no gradient already.
        clip_high: the other bound.
        generator: of random numbers, on the device of the mask.

    Returns:
        True for the chosen tokens; bool, same shape.

    Raises:
        ValueError: if shapes differ or ``fraction`` is not in ``(0, 1]``.

    Example:
        >>> log_prob = old = torch.tensor([[-1.0, -9.0, -5.0, -5.0]])
        >>> mask, advantage = torch.ones(1, 4, dtype=torch.bool), torch.tensor([[1.0, -1.0, 2.0, -2.0]])
        >>> select_clip_cov(log_prob, mask, old_log_prob=old, advantage=advantage, fraction=0.5)
        tensor([[ True,  True, False, False]])

    Source: Cui et al. 2025 (arXiv 2505.22617), section 4.2 (Clip-Cov).
    """
    check_range(above=0.0, high=1.0, fraction=fraction)
    log_prob, old_log_prob, advantage = _clean(mask, log_prob=log_prob, old_log_prob=old_log_prob, advantage=advantage)
    ratio = probability_ratio(log_prob, old_log_prob)
    surrogate, _ = clipped_surrogate(ratio, advantage, mask, clip_low=clip_low, clip_high=clip_high)
    covariance = _covariance(log_prob, mask, advantage)
    candidates = mask & (covariance > cov_low) & (covariance < cov_high) & (surrogate == -advantage * ratio)
    chance = torch.rand(mask.shape, generator=generator, device=mask.device)
    return _highest(chance, candidates, mask, fraction)


def select_kl_cov(log_prob: Tensor, mask: Tensor, *, advantage: Tensor, fraction: float = 2e-4) -> Tensor:
    r"""Choose tokens for :func:`kl_cov`: those with the highest covariance of log-prob and advantage.

    The covariance of a token is ``(log_prob - mean) (A - mean)`` with the means of all tokens that count. So the choice
    belongs to a whole batch: make it once, before micro-batches are cut, and hand them their part.

    Args:
        log_prob: nats, under the current policy; ``[*B, T]``. No gradient is taken.
        mask: tokens that count; bool, same shape.

    Keyword Args:
        advantage: same shape.
        fraction: how many to choose, of the tokens that count: rounded down, but one at least (as the authors' code).

    Returns:
        True for the chosen tokens; bool, same shape.

    Raises:
        ValueError: if shapes differ or ``fraction`` is not in ``(0, 1]``.

    Example:
        >>> log_prob, advantage = torch.tensor([[-1.0, -9.0, -4.0, -6.0]]), torch.tensor([[1.0, -2.0, -1.0, 2.0]])
        >>> select_kl_cov(log_prob, torch.ones(1, 4, dtype=torch.bool), advantage=advantage, fraction=0.5)
        tensor([[ True,  True, False, False]])

    Source: Cui et al. 2025 (arXiv 2505.22617), section 4.2 (KL-Cov).
    """
    check_range(above=0.0, high=1.0, fraction=fraction)
    log_prob, advantage = _clean(mask, log_prob=log_prob, advantage=advantage)
    return _highest(_covariance(log_prob, mask, advantage), mask, mask, fraction)


def _clean(mask: Tensor, **tensors: Tensor) -> tuple[Tensor, ...]:
    check_same_shape(mask=mask, **tensors)
    check_is_mask(mask=mask)
    wide = (x.detach().to(torch.promote_types(x.dtype, torch.float32)) for x in tensors.values())
    return tuple(torch.where(mask, x, 0) for x in wide)


def _covariance(log_prob: Tensor, mask: Tensor, advantage: Tensor) -> Tensor:
    return (log_prob - masked_mean(log_prob, mask)) * (advantage - masked_mean(advantage, mask))


def _highest(score: Tensor, candidates: Tensor, mask: Tensor, fraction: float) -> Tensor:
    """The candidates with the highest scores, as many as a fraction of the tokens that count; without host synchronisation."""
    number = (mask.sum().double() * fraction).floor().clamp(min=1)
    order = torch.where(candidates, score, -torch.inf).flatten().argsort(descending=True, stable=True)
    return candidates & (order.argsort() < number).view_as(mask)
