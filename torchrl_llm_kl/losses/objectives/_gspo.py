"""GSPO: one probability ratio for a whole sequence."""

from __future__ import annotations

from torch import Tensor

from torchrl_llm_kl._numerics import check_choice, check_range
from torchrl_llm_kl.losses._numerics import Scalar, bounded_exp, sequence_mean
from torchrl_llm_kl.losses._objective import objective
from torchrl_llm_kl.losses._term import LossTerm
from torchrl_llm_kl.losses.objectives._ppo import CLIP_ALIASES, clipped_surrogate

__all__ = ["gspo"]


@objective(
    "gspo",
    needs=("old_log_prob", "advantage"),
    aggregation="seq-mean-token-mean",
    aliases=CLIP_ALIASES,
    source="Zheng et al. 2025 (arXiv 2507.18071), eq. 5-7 (sequence) and 13-14 (token)",
)
def gspo(
    log_prob: Tensor,
    mask: Tensor,
    *,
    old_log_prob: Tensor,
    advantage: Tensor,
    clip_low: Scalar = 3e-4,
    clip_high: Scalar = 4e-4,
    level: str = "token",
) -> tuple[LossTerm, ...]:
    r"""PPO's surrogate with the geometric mean of a sequence's ratios, ``s = exp(mean(log_prob - old_log_prob))``.

    With ``level="sequence"`` it is ``max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high))`` once per sequence. With
    ``level="token"`` each token has the value of ``s`` and the gradient of its own log-prob,
    ``r = exp(log_prob - sg(log_prob) + sg(log s))``, so that advantages may differ within a sequence. Where they do not, and
    tokens are averaged per sequence, both have the same value and gradient: 0 for all tokens of a clipped sequence.

    Args:
        log_prob: nats, under the current policy, of tokens that the old policy sampled; ``[*B, T]``.
        mask: tokens that count; bool, same shape.

    Keyword Args:
        old_log_prob: the same tokens under the policy that sampled; same shape, without graph.
        advantage: same shape; ``level="sequence"`` takes the mean of each sequence.
        clip_low: ``s`` counts as at least ``1 - clip_low``. Trinity: ``clip_range_low``.
        clip_high: ``s`` counts as at most ``1 + clip_high``. Trinity: ``clip_range_high``; ``clip_range`` sets both.
        level: ``"token"`` (as Trinity and verl) or ``"sequence"``.

    Returns:
        One term, ``objective``, ``[*B, T]`` or, per sequence, ``[*B, 1]``; metrics ``clip_fraction`` (``_low``: A < 0,
        ``_high``: A > 0) of the tokens, or sequences, that count.

    Raises:
        ValueError: if shapes differ, a bound is out of range or the level is unknown.

    Example:
        >>> log_prob, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.5]])
        >>> mask, advantage = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[3.0, 3.0]])
        >>> gspo(log_prob, mask, old_log_prob=old, advantage=advantage)[0].value
        tensor([[-3., -3.]])
        >>> gspo(log_prob, mask, old_log_prob=old, advantage=advantage, level="sequence")[0].value
        tensor([[-3.]])

    Source: Zheng et al. 2025 (arXiv 2507.18071), eq. 5-7 (sequence) and 13-14 (token).
    """
    check_range(low=0.0, high=1.0, clip_low=clip_low)
    check_range(low=0.0, clip_high=clip_high)
    check_choice(("token", "sequence"), level=level)
    log_ratio = sequence_mean(log_prob - old_log_prob, mask)
    if level == "sequence":
        advantage, mask = sequence_mean(advantage, mask), mask.any(-1, keepdim=True)
    else:
        log_ratio = log_prob - log_prob.detach() + log_ratio.detach()
    value, metrics = clipped_surrogate(bounded_exp(log_ratio), advantage, mask, clip_low=clip_low, clip_high=clip_high)
    return (LossTerm("objective", value, mask, metrics=metrics),)
