"""DPPO: a trust region in probability, not in its ratio."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import check_choice, check_range
from torchrl_llm_kl.losses._numerics import Scalar, clamp, masked_mean, probability_ratio
from torchrl_llm_kl.losses._objective import objective
from torchrl_llm_kl.losses._term import LossTerm
from torchrl_llm_kl.losses.objectives._ppo import CLIP_ALIASES

__all__ = ["dppo"]

#: How far each divergence may go: the authors' settings.
BOUNDS = {"tv": 0.15, "kl": 0.05}


@objective(
    "dppo",
    needs=("old_log_prob", "advantage"),
    aliases=CLIP_ALIASES,
    source="Qi et al. 2026 (arXiv 2602.04879), the binary TV and binary KL variants",
)
def dppo(
    log_prob: Tensor,
    mask: Tensor,
    *,
    old_log_prob: Tensor,
    advantage: Tensor,
    divergence: str = "tv",
    clip_low: Scalar | None = None,
    clip_high: Scalar | None = None,
    clip_ratio_c: Scalar | None = 20.0,
) -> tuple[LossTerm, ...]:
    r"""``-A sg(min(r, clip_ratio_c)) log_prob`` per token, and 0 where the policy has gone too far the advantage's way.

    How far is measured between two outcomes, this token or any other, with probabilities ``p`` now and ``q`` at sampling:
    ``"tv"`` is ``|p - q|``, ``"kl"`` is ``q log(q / p) + (1 - q) log((1 - q) / (1 - p))``. A token is left out if ``A > 0``,
    ``p > q`` and it is above ``clip_high``, or ``A <= 0``, ``p < q`` and it is above ``clip_low``. The gradient elsewhere is
    the off-policy policy gradient with bounded weight; unlikely tokens are free to change by large factors.

    Args:
        log_prob: nats, under the current policy, of tokens that the old policy sampled; ``[*B, T]``.
        mask: tokens that count; bool, same shape.

    Keyword Args:
        old_log_prob: the same tokens under the policy that sampled; same shape, without graph.
        advantage: same shape.
        divergence: ``"tv"`` or ``"kl"``: verl's ``dppo_tv`` and ``dppo_kl``.
        clip_low: bound where ``A <= 0``; None for 0.15 (tv, a probability) or 0.05 (kl, nats).
        clip_high: bound where ``A > 0``; None likewise.
        clip_ratio_c: an importance weight is at most this; None for no such bound.

    Returns:
        One term, ``objective``; metrics ``clip_fraction`` (``_low``: A <= 0, ``_high``: A > 0) and ``truncated_fraction``
        (weights lowered), of the tokens that count.

    Raises:
        ValueError: if shapes differ, the divergence is unknown or a bound is out of range.

    Example:
        >>> log_prob, old = torch.tensor([[0.5, 0.02]]).log(), torch.tensor([[0.25, 0.01]]).log()
        >>> mask, advantage = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[1.0, 1.0]])
        >>> dppo(log_prob, mask, old_log_prob=old, advantage=advantage)[0].value
        tensor([[0.0000, 7.8240]])

    Source: Qi et al. 2026 (arXiv 2602.04879), the binary TV and binary KL variants.
    """
    check_choice(tuple(BOUNDS), divergence=divergence)
    clip_low = BOUNDS[divergence] if clip_low is None else clip_low
    clip_high = BOUNDS[divergence] if clip_high is None else clip_high
    check_range(low=0.0, clip_low=clip_low, clip_high=clip_high)
    check_range(above=1.0, clip_ratio_c=clip_ratio_c)
    now = log_prob.detach()
    distance = _binary_tv(now, old_log_prob) if divergence == "tv" else _binary_kl(now, old_log_prob)
    up = advantage > 0
    dropped = torch.where(
        up, (distance > clip_high) & (now > old_log_prob), (distance > clip_low) & (now < old_log_prob)
    )
    ratio = probability_ratio(now, old_log_prob)
    weight = clamp(ratio, high=clip_ratio_c)
    metrics = {
        "clip_fraction": masked_mean(dropped.float(), mask),
        "clip_fraction_low": masked_mean((dropped & ~up).float(), mask),
        "clip_fraction_high": masked_mean((dropped & up).float(), mask),
        "truncated_fraction": masked_mean((weight < ratio).float(), mask),
    }
    value = torch.where(dropped, 0, -advantage * weight * log_prob)
    return (LossTerm("objective", value, mask, metrics=metrics),)


def _binary_tv(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() - log_q.exp()).abs()


def _binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(q || p) of the two outcomes; infinite if p leaves no room for another token and q does."""
    rest_p, rest_q = -torch.expm1(log_p), -torch.expm1(log_q)
    rest = torch.where(rest_q > 0, rest_q * (rest_q.log() - rest_p.log()), 0)
    return log_q.exp() * (log_q - log_p) + rest
