"""Dr. GRPO: PPO's surrogate, summed without a preference for short or long sequences."""

from __future__ import annotations

from torch import Tensor

from torchrl_llm_kl._numerics import check_range
from torchrl_llm_kl.losses._numerics import Scalar, probability_ratio
from torchrl_llm_kl.losses._objective import objective
from torchrl_llm_kl.losses._term import LossTerm
from torchrl_llm_kl.losses.objectives._ppo import CLIP_ALIASES, clipped_surrogate

__all__ = ["dr_grpo"]


@objective(
    "dr_grpo",
    needs=("old_log_prob", "advantage"),
    aggregation="seq-mean-token-sum-norm",
    aliases=CLIP_ALIASES,
    source="Liu et al. 2025 (arXiv 2503.20783), section 3.2",
)
def dr_grpo(
    log_prob: Tensor,
    mask: Tensor,
    *,
    old_log_prob: Tensor,
    advantage: Tensor,
    clip_low: Scalar = 0.2,
    clip_high: Scalar = 0.2,
    clip_ratio_c: Scalar | None = None,
) -> tuple[LossTerm, ...]:
    r"""PPO's clipped surrogate, summed over tokens and divided by a length that does not depend on the sequence.

    The gradient is that of :func:`ppo`. What differs is outside: the aggregation, ``seq-mean-token-sum-norm``, and the
    advantage, which is not divided by its group's deviation.

    Args:
        log_prob: nats, under the current policy, of tokens that the old policy sampled; ``[*B, T]``.
        mask: tokens that count; bool, same shape.

    Keyword Args:
        old_log_prob: the same tokens under the policy that sampled; same shape, without graph.
        advantage: a group's reward, centred only; same shape.
        clip_low: the ratio counts as at least ``1 - clip_low``. Trinity: ``clip_range_low``.
        clip_high: the ratio counts as at most ``1 + clip_high``. Trinity: ``clip_range_high``; ``clip_range`` sets both.
        clip_ratio_c: dual clip as in :func:`ppo`, which the paper does without: None.

    Returns:
        One term, ``objective``; metrics as those of :func:`ppo`.

    Raises:
        ValueError: if shapes differ or a bound is out of range.

    Example:
        >>> log_prob, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.5]])
        >>> mask, advantage = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[1.0, -1.0]])
        >>> dr_grpo(log_prob, mask, old_log_prob=old, advantage=advantage)[0].value
        tensor([[-1.2000,  0.8000]])

    Source: Liu et al. 2025 (arXiv 2503.20783), section 3.2.
    """
    check_range(low=0.0, high=1.0, clip_low=clip_low)
    check_range(low=0.0, clip_high=clip_high)
    check_range(above=1.0, clip_ratio_c=clip_ratio_c)
    value, metrics = clipped_surrogate(
        probability_ratio(log_prob, old_log_prob),
        advantage,
        mask,
        clip_low=clip_low,
        clip_high=clip_high,
        clip_ratio_c=clip_ratio_c,
    )
    return (LossTerm("objective", value, mask, metrics=metrics),)
