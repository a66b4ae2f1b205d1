"""Learning from one's own attempts and from experts in one batch."""

from __future__ import annotations

from torch import Tensor

from torchrl_llm_kl._numerics import check_range
from torchrl_llm_kl.losses._aggregate import check_aggregation
from torchrl_llm_kl.losses._numerics import Scalar, masked_mean
from torchrl_llm_kl.losses._objective import objective
from torchrl_llm_kl.losses._term import LossTerm
from torchrl_llm_kl.losses.objectives._ppo import CLIP_ALIASES, ppo
from torchrl_llm_kl.losses.objectives._sft import sft

__all__ = ["MIX_ALIASES", "MIX_OBSOLETE", "mix", "mixture"]

#: Trinity-RFT's names, and torchrl's.
MIX_ALIASES = {
    **CLIP_ALIASES,
    "grpo_loss_agg_mode": "usual_aggregation",
    "sft_loss_agg_mode": "expert_aggregation",
}
#: What Trinity-RFT needs to know to divide the parts of a batch.
MIX_OBSOLETE = dict.fromkeys(
    (
        "use_dynamic_bsz",
        "ppo_mini_batch_size",
        "ppo_micro_batch_size_per_gpu",
        "ngpus_trainer",
        "train_batch_size_usual",
        "train_batch_size_expert",
    ),
    "each part is divided by its own count of tokens or sequences, that of the whole batch if it is handed over",
)


@objective(
    "mix",
    needs=("old_log_prob", "advantage", "expert_mask"),
    aliases=MIX_ALIASES,
    obsolete=MIX_OBSOLETE,
    source="Zhang et al. 2025 (arXiv 2508.11408), the loss with a fixed mu; Trinity-RFT 0.6.0: mix",
)
def mix(
    log_prob: Tensor,
    mask: Tensor,
    *,
    old_log_prob: Tensor,
    advantage: Tensor,
    expert_mask: Tensor,
    mu: Scalar = 0.1,
    clip_low: Scalar = 0.2,
    clip_high: Scalar = 0.2,
    clip_ratio_c: Scalar | None = 3.0,
    usual_aggregation: str | None = None,
    expert_aggregation: str | None = None,
) -> tuple[LossTerm, ...]:
    r"""``(1 - mu)`` of PPO's surrogate on what the policy wrote, and ``mu`` of imitation on what experts wrote.

    Each part is averaged over its own tokens, so ``mu`` is the weight of the experts however many there are. At usual tokens
    the gradient is that of :func:`~torchrl_llm_kl.losses.ppo`, at those of experts that of
    :func:`~torchrl_llm_kl.losses.sft`.

    Args:
        log_prob: nats, under the current policy; ``[*B, T]``.
        mask: tokens that count; bool, same shape.

    Keyword Args:
        old_log_prob: nats, of usual tokens under the policy that sampled them; same shape. What stands at tokens of experts
            is not read, not even NaN.
        advantage: of usual tokens, likewise.
        expert_mask: True at tokens of experts; bool, same shape.
        mu: weight of the experts, 0 to 1.
        clip_low: see :func:`~torchrl_llm_kl.losses.ppo`. Trinity: ``clip_range_low``.
        clip_high: see :func:`~torchrl_llm_kl.losses.ppo`. Trinity: ``clip_range_high``; ``clip_range`` sets both.
        clip_ratio_c: see :func:`~torchrl_llm_kl.losses.ppo`.
        usual_aggregation: how the usual part is summed, if not as the loss around it. Trinity: ``grpo_loss_agg_mode``.
        expert_aggregation: the same for the part of experts. Trinity: ``sft_loss_agg_mode``.

    Returns:
        Two terms: ``usual`` with the metrics of :func:`~torchrl_llm_kl.losses.ppo`; ``expert`` with ``expert_fraction``, the
        share of experts' tokens among those that count. A part without tokens is 0.

    Raises:
        ValueError: if shapes differ, an input is missing, a number is out of range or an aggregation unknown.

    Example:
        >>> import torch
        >>> log_prob = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])
        >>> usual, expert = mix(
        ...     log_prob,
        ...     torch.ones(2, 2, dtype=torch.bool),
        ...     old_log_prob=log_prob,
        ...     advantage=torch.ones(2, 2),
        ...     expert_mask=torch.tensor([[False, False], [True, True]]),
        ... )
        >>> usual.value[usual.mask], expert.value[expert.mask], expert.weight
        (tensor([-1., -1.]), tensor([3., 4.]), 0.1)

    Source: Zhang et al. 2025 (arXiv 2508.11408), the loss with a fixed mu; Trinity-RFT 0.6.0.
    """
    bounds = {"clip_low": clip_low, "clip_high": clip_high, "clip_ratio_c": clip_ratio_c}
    (usual,) = ppo(log_prob, mask & ~expert_mask, old_log_prob=old_log_prob, advantage=advantage, **bounds)  # type: ignore[arg-type]
    (expert,) = sft(log_prob, mask & expert_mask)
    return mixture(mu, usual, expert, mask, usual_aggregation, expert_aggregation)


def mixture(
    mu: Scalar,
    usual: LossTerm,
    expert: LossTerm,
    mask: Tensor,
    usual_aggregation: str | None,
    expert_aggregation: str | None,
) -> tuple[LossTerm, ...]:
    """``(1 - mu)`` of one part and ``mu`` of the other; ``mask`` is that of both together."""
    check_range(low=0.0, high=1.0, mu=mu)
    for mode in (usual_aggregation, expert_aggregation):
        if mode is not None:
            check_aggregation(mode)
    metrics = {**expert.metrics, "expert_fraction": masked_mean(expert.mask.to(expert.value.dtype), mask)}
    return (
        usual.replace(name="usual", weight=1 - mu, aggregation=usual_aggregation),
        expert.replace(name="expert", weight=mu, aggregation=expert_aggregation, metrics=metrics),
    )
