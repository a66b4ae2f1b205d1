"""VESPO: a smooth weight on the ratio of a whole sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import check_range
from torchrl_llm_kl.losses._numerics import Scalar, masked_mean, sequence_sum
from torchrl_llm_kl.losses._objective import objective
from torchrl_llm_kl.losses._term import LossTerm

__all__ = ["vespo"]


@objective(
    "vespo",
    needs=("old_log_prob", "advantage"),
    aliases={f"vespo_{name}": name for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")},
    source="Shen et al. 2026 (arXiv 2602.10693); values as TRL 1.16",
)
def vespo(
    log_prob: Tensor,
    mask: Tensor,
    *,
    old_log_prob: Tensor,
    advantage: Tensor,
    k_pos: Scalar = 2.0,
    lambda_pos: Scalar = 3.0,
    k_neg: Scalar = 3.0,
    lambda_neg: Scalar = 2.0,
) -> tuple[LossTerm, ...]:
    r"""REINFORCE with a weight per sequence: ``-A sg(phi(w)) log_prob`` with ``phi(w) = w^k exp(lambda (1 - w))``.

    ``w`` is the probability ratio of the whole sequence, the product of its tokens', without length normalisation. The weight
    is 1 on-policy, largest at ``w = k / lambda`` and falls to 0 on both sides: sequences that have become much likelier or
    much less likely no longer count. The gradient does not go through it.

    Args:
        log_prob: nats, under the current policy, of tokens that the old policy sampled; ``[*B, T]``.
        mask: tokens that count; bool, same shape.

    Keyword Args:
        old_log_prob: the same tokens under the policy that sampled; same shape, without graph.
        advantage: same shape.
        k_pos: exponent where ``A >= 0``: how fast the weight falls towards ``w = 0``. TRL: ``vespo_k_pos``.
        lambda_pos: rate where ``A >= 0``: how fast it falls for large ``w``. TRL: ``vespo_lambda_pos``.
        k_neg: exponent where ``A < 0``. TRL: ``vespo_k_neg``.
        lambda_neg: rate where ``A < 0``. TRL: ``vespo_lambda_neg``.

    Returns:
        One term, ``objective``; metric ``weight_mean`` (of ``phi``) over the tokens that count.

    Raises:
        ValueError: if shapes differ, an exponent is negative or a rate not positive.

    Example:
        >>> log_prob, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -1.0]])  # w = 1/e
        >>> mask, advantage = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[1.0, -1.0]])
        >>> vespo(log_prob, mask, old_log_prob=old, advantage=advantage)[0].value
        tensor([[ 0.9016, -0.3525]])

    Source: Shen et al. 2026 (arXiv 2602.10693); values as TRL 1.16.
    """
    check_range(low=0.0, k_pos=k_pos, k_neg=k_neg)
    check_range(above=0.0, lambda_pos=lambda_pos, lambda_neg=lambda_neg)
    log_w = sequence_sum(log_prob.detach() - old_log_prob, mask)
    # An infinite w is no harm: with a rate above 0 its weight is exp(-inf).
    room = 1 - log_w.exp()
    log_weight = torch.where(advantage >= 0, k_pos * log_w + lambda_pos * room, k_neg * log_w + lambda_neg * room)
    weight = log_weight.exp()
    metrics = {"weight_mean": masked_mean(weight, mask)}
    return (LossTerm("objective", -advantage * weight * log_prob, mask, metrics=metrics),)
