"""The clipped surrogate of PPO, with what later work added to it."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import check_range
from torchrl_llm_kl.losses._numerics import Scalar, clamp, masked_mean, probability_ratio
from torchrl_llm_kl.losses._objective import objective
from torchrl_llm_kl.losses._term import LossTerm
from torchrl_llm_kl.losses.corrections._sequence_mask import off_policy_sequence_mask

__all__ = ["CLIP_ALIASES", "clipped_surrogate", "ppo"]

#: Trinity-RFT's names of the clip bounds, torchrl's, and verl's.
CLIP_ALIASES = {
    "clip_range": ("clip_low", "clip_high"),
    "clip_range_low": "clip_low",
    "clip_range_high": "clip_high",
    "clip_epsilon": ("clip_low", "clip_high"),
    "clip_ratio": ("clip_low", "clip_high"),
    "clip_ratio_low": "clip_low",
    "clip_ratio_high": "clip_high",
}


def clipped_surrogate(
    ratio: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    clip_low: Scalar,
    clip_high: Scalar,
    clip_ratio_c: Scalar | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    r"""``max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))``, and for ``A < 0`` no more than ``-A clip_ratio_c``.

    Returns:
        The value per token, and how often each bound took the gradient away.
    """
    free = -advantage * ratio
    bound = -advantage * clamp(ratio, 1 - clip_low, 1 + clip_high)
    value = torch.maximum(free, bound)
    clipped = bound > free
    metrics = {
        "clip_fraction": masked_mean(clipped.float(), mask),
        "clip_fraction_low": masked_mean((clipped & (advantage < 0)).float(), mask),
        "clip_fraction_high": masked_mean((clipped & (advantage > 0)).float(), mask),
    }
    if clip_ratio_c is not None:
        ceiling = -advantage * clip_ratio_c
        metrics["clip_fraction_dual"] = masked_mean(((value > ceiling) & (advantage < 0)).float(), mask)
        value = torch.where(advantage < 0, torch.minimum(value, ceiling), value)
    return value, metrics


@objective(
    "ppo",
    needs=("advantage",),
    aliases=CLIP_ALIASES,
    source="Schulman et al. 2017 (arXiv 1707.06347), eq. 7; dual clip: Ye et al. 2020 (arXiv 1912.09729), eq. 5",
)
def ppo(
    log_prob: Tensor,
    mask: Tensor,
    *,
    advantage: Tensor,
    old_log_prob: Tensor | None = None,
    clip_low: Scalar = 0.2,
    clip_high: Scalar = 0.2,
    clip_ratio_c: Scalar | None = 3.0,
    enable_sequence_masking: bool = False,
    delta_sequence_masking: Scalar = 0.1,
    fallback_to_policy_gradient: bool = False,
) -> tuple[LossTerm, ...]:
    r"""PPO's clipped surrogate: ``max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))`` per token.

    ``r`` is the probability ratio of the policy to the one that sampled. The gradient is that of ``-A r`` where the ratio is
    inside the bounds or moves back towards them, and 0 elsewhere.

    Args:
        log_prob: nats, under the current policy, of tokens that the old policy sampled; ``[*B, T]``.
        mask: tokens that count; bool, same shape.

    Keyword Args:
        advantage: same shape.
        old_log_prob: the same tokens under the policy that sampled; same shape, without graph.
        clip_low: the ratio counts as at least ``1 - clip_low``. Trinity: ``clip_range_low``.
        clip_high: the ratio counts as at most ``1 + clip_high``. Trinity: ``clip_range_high``; ``clip_range`` sets both.
        clip_ratio_c: dual clip: the value of a token with ``A < 0`` is at most ``-A clip_ratio_c``; None for no such bound.
        enable_sequence_masking: leave out tokens with ``A < 0`` of sequences that have become unlikely: mean of
            ``old_log_prob - log_prob`` above ``delta_sequence_masking``. They keep their place in the denominator.
        delta_sequence_masking: nats per token.
        fallback_to_policy_gradient: take the old policy to be the current one: the plain policy gradient ``-A log_prob``,
            no clipping, ``old_log_prob`` not needed.

    Returns:
        One term, ``objective``; metrics ``clip_fraction`` (``_low``: A < 0, ``_high``: A > 0, ``_dual``) and, with sequence
        masking, ``sequence_masked_fraction``, all of the tokens that count.

    Raises:
        ValueError: if shapes differ, ``old_log_prob`` is missing or a bound is out of range.

    Example:
        >>> log_prob, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.5]])
        >>> mask, advantage = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[1.0, -1.0]])
        >>> ppo(log_prob, mask, old_log_prob=old, advantage=advantage)[0].value
        tensor([[-1.2000,  0.8000]])

    Source: Schulman et al. 2017 (arXiv 1707.06347), eq. 7; dual clip: Ye et al. 2020 (arXiv 1912.09729), eq. 5;
    sequence masking: DeepSeek-V3.2 (arXiv 2512.02556), section 3.1.
    """
    check_range(low=0.0, high=1.0, clip_low=clip_low)
    check_range(low=0.0, clip_high=clip_high)
    check_range(above=1.0, clip_ratio_c=clip_ratio_c)
    if fallback_to_policy_gradient:
        old_log_prob = log_prob.detach()
    elif old_log_prob is None:
        raise ValueError("ppo needs old_log_prob: pass old_log_prob=, or fallback_to_policy_gradient=True")
    value, metrics = clipped_surrogate(
        probability_ratio(log_prob, old_log_prob),
        advantage,
        mask,
        clip_low=clip_low,
        clip_high=clip_high,
        clip_ratio_c=clip_ratio_c,
    )
    if enable_sequence_masking:
        kept, dropped = off_policy_sequence_mask(log_prob, old_log_prob, advantage, mask, delta=delta_sequence_masking)
        metrics |= dropped
        value = torch.where(kept == 0, 0, value)
    return (LossTerm("objective", value, mask, metrics=metrics),)
