"""REC: REINFORCE off-policy, by its parts: what is clipped, how it is weighted, what holds it back."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import check_choice, check_range
from torchrl_llm_kl.losses._numerics import Scalar, bounded_exp, masked_mean, probability_ratio, sequence_mean
from torchrl_llm_kl.losses._objective import objective
from torchrl_llm_kl.losses._term import LossTerm

__all__ = ["rec"]

CLIP_MODES = ("none", "one-side", "two-side", "ring", "gspo-one-side")
WEIGHTS = ("none", "importance_sampling", "gspo_importance_sampling", "advantage")
REGULARIZERS = ("none", "k2", "forward-kl")


@objective("rec", needs=("old_log_prob", "advantage"), source="Yao et al. 2025 (arXiv 2509.24203), sections 3-4")
def rec(
    log_prob: Tensor,
    mask: Tensor,
    *,
    old_log_prob: Tensor,
    advantage: Tensor,
    clip_mode: str = "none",
    epsilon_low: Scalar = 0.2,
    epsilon_high: Scalar = 0.2,
    epsilon_low_prime: Scalar = 0.6,
    epsilon_high_prime: Scalar = 2.0,
    weight: str = "none",
    temp: Scalar = 1.0,
    regularizer: str = "none",
    regularizer_coef: Scalar = 0.0,
) -> tuple[LossTerm, ...]:
    r"""``-A sg(w) log_prob`` per token where the ratio is in range, else 0, plus a regularizer on every token.

    With ``r`` the probability ratio of the policy to the one that sampled, and ``s`` the geometric mean of a sequence's
    ratios, a token is in range where

    ================= ==================================================================================================
    ``none``          always
    ``one-side``      ``r <= 1 + epsilon_high`` if A > 0, ``r >= 1 - epsilon_low`` if A < 0: where PPO has a gradient
    ``two-side``      both
    ``ring``          both; or ``r <= 1 - epsilon_low_prime`` if A > 0, ``r >= 1 + epsilon_high_prime`` if A < 0
    ``gspo-one-side`` as ``one-side``, with ``s``; the loss is then averaged per sequence, ``seq-mean-token-mean``
    ================= ==================================================================================================

    The gradient in range is ``-A w``: the policy gradient, off-policy unless ``w`` corrects for it.

    Args:
        log_prob: nats, under the current policy, of tokens that the old policy sampled; ``[*B, T]``.
        mask: tokens that count; bool, same shape.

    Keyword Args:
        old_log_prob: the same tokens under the policy that sampled; same shape, without graph.
        advantage: same shape.
        clip_mode: a row of the table.
        epsilon_low: see the table; in ``(0, 1]``.
        epsilon_high: see the table.
        epsilon_low_prime: of ``ring``; in ``(0, 1]``.
        epsilon_high_prime: of ``ring``.
        weight: ``w``: 1 (``none``), ``r`` (``importance_sampling``), ``s`` (``gspo_importance_sampling``), or ``exp(A / temp)``
            (``advantage``). Each goes with each clip mode.
        temp: of the weight ``advantage``, in units of the advantage.
        regularizer: ``k2``: ``regularizer_coef (log_prob - old_log_prob)^2``, which holds the policy near the old one;
            ``forward-kl``: ``-regularizer_coef log_prob``, which imitates it.
        regularizer_coef: at least 0. (All names and values are Trinity's.)

    Returns:
        One term, ``objective``; metrics ``clip_fraction`` (``_low``: A < 0, ``_high``: A > 0) of the tokens that count.

    Raises:
        ValueError: if shapes differ, or a hyper-parameter is unknown or out of range.

    Example:
        >>> log_prob, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.5]])
        >>> mask, advantage = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[1.0, 1.0]])
        >>> rec(log_prob, mask, old_log_prob=old, advantage=advantage, clip_mode="one-side")[0].value
        tensor([[0., 2.]])

    Source: Yao et al. 2025 (arXiv 2509.24203), sections 3-4.
    """
    check_choice(CLIP_MODES, clip_mode=clip_mode)
    check_choice(WEIGHTS, weight=weight)
    check_choice(REGULARIZERS, regularizer=regularizer)
    check_range(above=0.0, high=1.0, epsilon_low=epsilon_low, epsilon_low_prime=epsilon_low_prime)
    check_range(above=0.0, epsilon_high=epsilon_high, epsilon_high_prime=epsilon_high_prime, temp=temp)
    check_range(low=0.0, regularizer_coef=regularizer_coef)

    log_ratio = log_prob - old_log_prob
    ratio = probability_ratio(log_prob.detach(), old_log_prob)
    sequence_ratio = bounded_exp(sequence_mean(log_ratio.detach(), mask)).expand_as(ratio)

    measured = sequence_ratio if clip_mode == "gspo-one-side" else ratio
    low_enough, high_enough = measured <= 1 + epsilon_high, measured >= 1 - epsilon_low
    good, bad = advantage > 0, advantage < 0
    if clip_mode == "none":
        in_range = torch.ones_like(mask)
    elif clip_mode in ("one-side", "gspo-one-side"):
        in_range = (low_enough | ~good) & (high_enough | ~bad)
    else:
        in_range = low_enough & high_enough
    if clip_mode == "ring":
        in_range = in_range | (good & (ratio <= 1 - epsilon_low_prime)) | (bad & (ratio >= 1 + epsilon_high_prime))

    if weight == "importance_sampling":
        advantage = advantage * ratio
    elif weight == "gspo_importance_sampling":
        advantage = advantage * sequence_ratio
    elif weight == "advantage":
        advantage = advantage * bounded_exp(advantage / temp)
    value = torch.where(in_range, -advantage * log_prob, 0)

    if regularizer == "k2":
        value = value + regularizer_coef * log_ratio.square()
    elif regularizer == "forward-kl":
        value = value - regularizer_coef * log_prob
    metrics = {
        "clip_fraction": masked_mean((~in_range).float(), mask),
        "clip_fraction_low": masked_mean((~in_range & bad).float(), mask),
        "clip_fraction_high": masked_mean((~in_range & good).float(), mask),
    }
    per_sequence = "seq-mean-token-mean" if clip_mode == "gspo-one-side" else None
    return (LossTerm("objective", value, mask, metrics=metrics, aggregation=per_sequence),)
