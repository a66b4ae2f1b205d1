"""Learning from experts less and less: a mixture whose weights change over training."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import check_range
from torchrl_llm_kl.losses._numerics import Scalar
from torchrl_llm_kl.losses._objective import objective
from torchrl_llm_kl.losses._term import LossTerm
from torchrl_llm_kl.losses.objectives._mix import MIX_ALIASES, MIX_OBSOLETE, mixture
from torchrl_llm_kl.losses.objectives._ppo import ppo
from torchrl_llm_kl.losses.objectives._sft import sft, sft_phi

__all__ = ["mix_chord", "mu_schedule"]


@objective(
    "mix_chord",
    needs=("old_log_prob", "advantage", "expert_mask"),
    aliases=MIX_ALIASES,
    obsolete=MIX_OBSOLETE,
    source="Zhang et al. 2025 (arXiv 2508.11408), CHORD-mu and CHORD-phi; Trinity-RFT 0.6.0: mix_chord",
)
def mix_chord(
    log_prob: Tensor,
    mask: Tensor,
    *,
    old_log_prob: Tensor,
    advantage: Tensor,
    expert_mask: Tensor,
    step: int | Tensor = 0,
    mu_warmup_steps: int = 0,
    mu_decay_steps: int = 0,
    mu_peak: Scalar = 0.1,
    mu_valley: Scalar = 0.1,
    enable_phi_function: bool = True,
    clip_low: Scalar = 0.2,
    clip_high: Scalar = 0.2,
    clip_ratio_c: Scalar | None = 3.0,
    usual_aggregation: str | None = None,
    expert_aggregation: str | None = None,
) -> tuple[LossTerm, ...]:
    r""":func:`~torchrl_llm_kl.losses.mix` with a ``mu`` that follows :func:`mu_schedule` and weighted tokens of experts.

    Args:
        log_prob: nats, under the current policy; ``[*B, T]``.
        mask: tokens that count; bool, same shape.

    Keyword Args:
        old_log_prob: see :func:`~torchrl_llm_kl.losses.mix`.
        advantage: see :func:`~torchrl_llm_kl.losses.mix`.
        expert_mask: see :func:`~torchrl_llm_kl.losses.mix`.
        step: of training, from 0; a number, or a 0-dim tensor that is counted up in place.
        mu_warmup_steps: see :func:`mu_schedule`.
        mu_decay_steps: see :func:`mu_schedule`.
        mu_peak: see :func:`mu_schedule`.
        mu_valley: see :func:`mu_schedule`.
        enable_phi_function: weigh tokens of experts as :func:`~torchrl_llm_kl.losses.sft_phi` does (CHORD-phi), instead of
            all alike (CHORD-mu).
        clip_low: see :func:`~torchrl_llm_kl.losses.ppo`. Trinity: ``clip_range_low``.
        clip_high: see :func:`~torchrl_llm_kl.losses.ppo`. Trinity: ``clip_range_high``; ``clip_range`` sets both.
        clip_ratio_c: see :func:`~torchrl_llm_kl.losses.ppo`.
        usual_aggregation: see :func:`~torchrl_llm_kl.losses.mix`. Trinity: ``grpo_loss_agg_mode``.
        expert_aggregation: see :func:`~torchrl_llm_kl.losses.mix`. Trinity: ``sft_loss_agg_mode``.

    Returns:
        The two terms of :func:`~torchrl_llm_kl.losses.mix`; ``expert`` also has the metrics ``mu`` and, with weights,
        ``weight_mean``. A part without tokens is 0.

    Raises:
        ValueError: if shapes differ, an input is missing, a number is out of range or an aggregation unknown.

    Example:
        >>> one = torch.ones(1, 1)
        >>> schedule = {"mu_decay_steps": 10, "mu_peak": 0.9, "mu_valley": 0.1}
        >>> usual, expert = mix_chord(
        ...     -one, one.bool(), old_log_prob=-one, advantage=one, expert_mask=~one.bool(), step=5, **schedule
        ... )
        >>> usual.weight, expert.weight
        (0.5, 0.5)

    Source: Zhang et al. 2025 (arXiv 2508.11408), CHORD-mu and CHORD-phi; Trinity-RFT 0.6.0.
    """
    mu = mu_schedule(step, mu_warmup_steps, mu_decay_steps, mu_peak, mu_valley)
    bounds = {"clip_low": clip_low, "clip_high": clip_high, "clip_ratio_c": clip_ratio_c}
    (usual,) = ppo(log_prob, mask & ~expert_mask, old_log_prob=old_log_prob, advantage=advantage, **bounds)  # type: ignore[arg-type]
    (expert,) = (sft_phi if enable_phi_function else sft)(log_prob, mask & expert_mask)
    now = torch.as_tensor(mu, dtype=log_prob.dtype, device=log_prob.device).detach()
    expert = expert.replace(metrics={**expert.metrics, "mu": now})
    return mixture(mu, usual, expert, mask, usual_aggregation, expert_aggregation)


def mu_schedule(
    step: int | Tensor, mu_warmup_steps: int, mu_decay_steps: int, mu_peak: Scalar, mu_valley: Scalar
) -> Scalar:
    """Weight of the experts: from 0 up to a peak in a straight line, then down to a valley along half a cosine.

    Args:
        step: of training, from 0.
        mu_warmup_steps: after so many steps the peak is reached; with 0 training starts there.
        mu_decay_steps: after so many more steps the valley is; with 0 it follows the warm-up at once.
        mu_peak: 0 to 1.
        mu_valley: 0 to 1.

    Returns:
        A number; a 0-dim tensor, which is not read on the host, if ``step``, ``mu_peak`` or ``mu_valley`` is one.

    Raises:
        ValueError: if a number is out of range.

    Example:
        >>> [round(mu_schedule(step, 10, 20, 0.9, 0.1), 3) for step in (0, 5, 10, 20, 30, 1000)]
        [0.0, 0.45, 0.9, 0.5, 0.1, 0.1]

    Source: Zhang et al. 2025 (arXiv 2508.11408), CHORD-mu; Trinity-RFT 0.6.0.
    """
    check_range(low=0, step=step, mu_warmup_steps=mu_warmup_steps, mu_decay_steps=mu_decay_steps)
    check_range(low=0.0, high=1.0, mu_peak=mu_peak, mu_valley=mu_valley)
    rising = mu_peak * (step / max(mu_warmup_steps, 1))
    progress = (step - mu_warmup_steps) / max(mu_decay_steps, 1)
    cosine = torch.cos(math.pi * progress) if isinstance(progress, Tensor) else math.cos(math.pi * progress)
    falling = mu_valley + (mu_peak - mu_valley) * 0.5 * (1 + cosine)
    # Products of conditions and not branches: they are the same for numbers and for tensors.
    end = mu_warmup_steps + mu_decay_steps
    decaying = (step >= mu_warmup_steps) * (step < end)
    return (step < mu_warmup_steps) * rising + decaying * falling + (step >= end) * mu_valley
