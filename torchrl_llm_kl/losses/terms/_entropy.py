"""A reward for being undecided."""

from __future__ import annotations

from torch import Tensor

from torchrl_llm_kl.losses._numerics import Scalar
from torchrl_llm_kl.losses._objective import term
from torchrl_llm_kl.losses._term import LossTerm
from torchrl_llm_kl.losses.terms._experts import without_experts

__all__ = ["entropy_bonus"]


@term("entropy_bonus", needs=("entropy",), source="Mnih et al. 2016 (A3C, arXiv 1602.01783), section 4")
def entropy_bonus(
    log_prob: Tensor,
    mask: Tensor,
    *,
    entropy: Tensor,
    coeff: Scalar,
    expert_mask: Tensor | None = None,
    leave_out_experts: bool = False,
) -> tuple[LossTerm, ...]:
    """Minus the entropy of the policy at each token.

    The gradient is that of the entropy as it was calculated: over the whole vocabulary it spreads probability; minus the
    log-prob of the sampled token is an estimate of the same value with another gradient (of mean 0).

    Args:
        log_prob: not read; ``[*B, T]``.
        mask: tokens that count; bool, same shape.

    Keyword Args:
        entropy: of the policy's distribution over the vocabulary, nats, with graph; same shape.
        coeff: weight of the term; above 0 for more entropy. Trinity: ``entropy_coef``.
        expert_mask: True at tokens of experts; bool, same shape.
        leave_out_experts: take the mean over other tokens alone. Trinity: ``entropy_loss_fn: mix``.

    Returns:
        One term, ``entropy``.

    Raises:
        ValueError: if shapes differ or ``expert_mask`` is missing.

    Example:
        >>> import torch
        >>> entropy = torch.tensor([[0.5, 2.0]])
        >>> (term,) = entropy_bonus(torch.zeros(1, 2), torch.tensor([[True, False]]), entropy=entropy, coeff=0.01)
        >>> term.value, term.weight
        (tensor([[-0.5000, -0.0000]]), 0.01)

    Source: Mnih et al. 2016 (A3C, arXiv 1602.01783), section 4.
    """
    return (LossTerm("entropy", -entropy, without_experts(mask, expert_mask, leave_out_experts), weight=coeff),)
