"""Entropy preservation: tokens with a high covariance of log-prob and advantage are dropped or penalised.

The covariance of a token is ``(log_prob - mean) (A - mean)`` with the means over all masked-in tokens, so the selection
concerns a whole batch: compute it once with :func:`select_clip_cov` or :func:`select_kl_cov`, before splitting into
micro-batches, and pass each its part of ``selected``. Without ``selected`` the objectives select among their own tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import NonNegative, Scalar, Share, check_range, masked_mean
from torchrl_llm_kl.losses._arithmetic import bounded_exp
from torchrl_llm_kl.losses._inputs import LossInputs
from torchrl_llm_kl.losses._objective import LossTerm, Terms, objective
from torchrl_llm_kl.losses.objectives._clipped import clipped_surrogate


@objective(
    "clip_cov",
)
def clip_cov(
    inputs: LossInputs,
    *,
    clip_low: Share = 0.2,
    clip_high: NonNegative = 0.2,
    fraction: float = 2e-4,
    cov_low: Scalar = 1.0,
    cov_high: Scalar = 5.0,
) -> Terms:
    r"""PPO's clipped surrogate (:func:`ppo` without dual clip), and 0 without gradient for the selected tokens.

    Selected tokens keep their place in the denominator. Without ``selected`` they are drawn with the device's global
    generator.

    Hyper-parameters:
        clip_low, clip_high: see :func:`ppo`.
        fraction, cov_low, cov_high: see :func:`select_clip_cov`. verl: ``clip_cov_ratio``, ``clip_cov_lb``, ``clip_cov_ub``.

    Metrics: ``clip_fraction`` as in :func:`ppo`; ``selected_fraction``.

    Example:
        >>> log_prob = old = torch.tensor([[-1.0, -2.0]])
        >>> mask, advantage = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[1.0, -1.0]])
        >>> selected = torch.tensor([[True, False]])
        >>> clip_cov(LossInputs(log_prob, mask, old_log_prob=old, advantage=advantage, selected=selected))[0].value
        tensor([[0., 1.]])

    Source: Cui et al. 2025 (arXiv 2505.22617), section 4.2 (Clip-Cov).
    """
    selected = inputs.get("selected")
    if selected is None:
        selected = select_clip_cov(
            inputs, fraction=fraction, cov_low=cov_low, cov_high=cov_high, clip_low=clip_low, clip_high=clip_high
        )
    value, metrics = clipped_surrogate(
        bounded_exp(inputs.log_ratio), inputs.advantage, inputs.mask, clip_low, clip_high
    )
    metrics["selected_fraction"] = masked_mean(selected.float(), inputs.mask)
    return (LossTerm("objective", torch.where(selected, 0, value), inputs.mask, metrics=metrics),)


@objective("kl_cov")
def kl_cov(inputs: LossInputs, *, coeff: NonNegative = 1.0, fraction: float = 2e-4) -> Terms:
    r"""``-A r`` per token without clipping, plus ``coeff |log r|`` for the selected tokens.

    The penalty pulls a selected token's log-prob back with the constant force ``coeff``, and with none at ``r = 1``.

    Hyper-parameters:
        coeff: of the penalty, per nat, at least 0. verl: ``ppo_kl_coef``.
        fraction: see :func:`select_kl_cov`. verl: ``kl_cov_ratio``.

    Metrics: ``selected_fraction`` and ``ratio_mean``.

    Example:
        >>> log_prob, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.5]])
        >>> mask, advantage = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[1.0, -1.0]])
        >>> selected = torch.tensor([[True, False]])
        >>> kl_cov(LossInputs(log_prob, mask, old_log_prob=old, advantage=advantage, selected=selected))[0].value
        tensor([[-1.1487,  0.6065]])

    Source: Cui et al. 2025 (arXiv 2505.22617), section 4.2 (KL-Cov).
    """
    selected, mask, log_ratio = inputs.get("selected"), inputs.mask, inputs.log_ratio
    if selected is None:
        selected = select_kl_cov(inputs, fraction=fraction)
    ratio = bounded_exp(log_ratio)
    penalty = torch.where(selected, coeff * log_ratio.abs(), 0)
    metrics = {
        "selected_fraction": masked_mean(selected.float(), mask),
        "ratio_mean": masked_mean(ratio.detach(), mask),
    }
    return (LossTerm("objective", -inputs.advantage * ratio + penalty, mask, metrics=metrics),)


# ------------------------------------------------------------------ selections


@torch.no_grad()
def select_clip_cov(
    inputs: LossInputs,
    *,
    fraction: float = 2e-4,
    cov_low: Scalar = 1.0,
    cov_high: Scalar = 5.0,
    clip_low: Scalar = 0.2,
    clip_high: Scalar = 0.2,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Select tokens for :func:`clip_cov`: at random among those whose covariance lies between two bounds.

    Inputs and errors are as in :func:`clip_cov`, for a whole batch. Tokens that :func:`ppo` clips are not selected: they
    have no gradient anyway. The result is True for the selected tokens; bool ``[*B, T]``.

    Hyper-parameters:
        fraction: how many of the masked-in tokens to select, in ``(0, 1]``: rounded down, but at least one (as the authors'
            code).
        cov_low, cov_high: only tokens with a covariance strictly between them.
        clip_low, clip_high: see :func:`ppo`.
        generator: of random numbers, on the device of the mask.

    Example:
        >>> log_prob = old = torch.tensor([[-1.0, -9.0, -5.0, -5.0]])
        >>> mask, advantage = torch.ones(1, 4, dtype=torch.bool), torch.tensor([[1.0, -1.0, 2.0, -2.0]])
        >>> select_clip_cov(LossInputs(log_prob, mask, old_log_prob=old, advantage=advantage), fraction=0.5)
        tensor([[ True,  True, False, False]])

    Source: Cui et al. 2025 (arXiv 2505.22617), section 4.2 (Clip-Cov).
    """
    check_range(above=0.0, high=1.0, fraction=fraction)
    advantage, mask, ratio = inputs.advantage, inputs.mask, bounded_exp(inputs.log_ratio)
    surrogate, _ = clipped_surrogate(ratio, advantage, mask, clip_low, clip_high)
    covariance = _covariance(inputs.log_prob, advantage, mask)
    candidates = mask & (covariance > cov_low) & (covariance < cov_high) & (surrogate == -advantage * ratio)
    chance = torch.rand(mask.shape, generator=generator, device=mask.device)
    return _highest(chance, candidates, mask, fraction)


@torch.no_grad()
def select_kl_cov(inputs: LossInputs, *, fraction: float = 2e-4) -> Tensor:
    r"""Select tokens for :func:`kl_cov`: those with the highest covariance of log-prob and advantage.

    Inputs and errors are as in :func:`kl_cov`, for a whole batch; ``fraction`` and the result are as for
    :func:`select_clip_cov`.

    Example:
        >>> log_prob, advantage = torch.tensor([[-1.0, -9.0, -4.0, -6.0]]), torch.tensor([[1.0, -2.0, -1.0, 2.0]])
        >>> select_kl_cov(LossInputs(log_prob, torch.ones(1, 4, dtype=torch.bool), advantage=advantage), fraction=0.5)
        tensor([[ True,  True, False, False]])

    Source: Cui et al. 2025 (arXiv 2505.22617), section 4.2 (KL-Cov).
    """
    check_range(above=0.0, high=1.0, fraction=fraction)
    mask = inputs.mask
    return _highest(_covariance(inputs.log_prob, inputs.advantage, mask), mask, mask, fraction)


def _covariance(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return (x - masked_mean(x, mask)) * (y - masked_mean(y, mask))


def _highest(score: Tensor, candidates: Tensor, mask: Tensor, fraction: float) -> Tensor:
    """The candidates with the highest scores, as many as a fraction of the mask; without host synchronisation."""
    number = (mask.sum().double() * fraction).floor().clamp(min=1)
    order = torch.where(candidates, score, -torch.inf).flatten().argsort(descending=True, stable=True)
    return candidates & (order.argsort() < number).view_as(mask)
