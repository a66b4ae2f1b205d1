"""SAPO: a smooth gate in the place of a hard clip."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import check_range
from torchrl_llm_kl.losses._numerics import Scalar, masked_mean, probability_ratio
from torchrl_llm_kl.losses._objective import objective
from torchrl_llm_kl.losses._term import LossTerm

__all__ = ["sapo"]


@objective(
    "sapo",
    needs=("old_log_prob", "advantage"),
    aggregation="seq-mean-token-mean",
    aliases={"sapo_temperature_pos": "tau_pos", "sapo_temperature_neg": "tau_neg"},
    source="Gao et al. 2025 (arXiv 2511.20347), eq. 5-6",
)
def sapo(
    log_prob: Tensor,
    mask: Tensor,
    *,
    old_log_prob: Tensor,
    advantage: Tensor,
    tau_pos: Scalar = 1.0,
    tau_neg: Scalar = 1.05,
) -> tuple[LossTerm, ...]:
    r"""``-A f(r)`` per token with ``f(r) = 4 sigmoid(tau (r - 1)) / tau``; the gradient goes through ``r``.

    ``r`` is the probability ratio of the policy to the one that sampled. The gradient weight of a token is
    ``A r 4 p (1 - p)`` with ``p = sigmoid(tau (r - 1))``: that of the policy gradient at ``r = 1``, falling off smoothly on
    both sides, the faster the larger ``tau``. The value at ``r = 1`` is ``-2 A / tau``.

    Args:
        log_prob: nats, under the current policy, of tokens that the old policy sampled; ``[*B, T]``.
        mask: tokens that count; bool, same shape.

    Keyword Args:
        old_log_prob: the same tokens under the policy that sampled; same shape, without graph.
        advantage: same shape.
        tau_pos: temperature where ``A > 0``. Trinity: the same name; TRL: ``sapo_temperature_pos``.
        tau_neg: temperature elsewhere; the paper takes it larger than ``tau_pos``. TRL: ``sapo_temperature_neg``.

    Returns:
        One term, ``objective``; metric ``gate_mean``: mean of ``4 p (1 - p)`` over the tokens that count, 1 on-policy.

    Raises:
        ValueError: if shapes differ or a temperature is not positive.

    Example:
        >>> log_prob, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -1.0]])
        >>> mask, advantage = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[1.0, 1.0]])
        >>> sapo(log_prob, mask, old_log_prob=old, advantage=advantage)[0].value
        tensor([[-2.0000, -1.3881]])

    Source: Gao et al. 2025 (arXiv 2511.20347), eq. 5-6.
    """
    check_range(above=0.0, tau_pos=tau_pos, tau_neg=tau_neg)
    one = torch.ones_like(advantage)
    tau = torch.where(advantage > 0, tau_pos * one, tau_neg * one)
    p = torch.sigmoid(tau * (probability_ratio(log_prob, old_log_prob) - 1))
    slope = 4 * p.detach() * (1 - p.detach())
    return (LossTerm("objective", -advantage * 4 * p / tau, mask, metrics={"gate_mean": masked_mean(slope, mask)}),)
