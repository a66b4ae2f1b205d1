"""TOPR: supervised learning on what is good, bounded importance weights on what is bad."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import check_choice
from torchrl_llm_kl.losses._numerics import Scalar, masked_mean, sequence_sum
from torchrl_llm_kl.losses._objective import objective
from torchrl_llm_kl.losses._term import LossTerm

__all__ = ["topr"]


@objective(
    "topr",
    needs=("old_log_prob", "advantage"),
    source="Le Roux et al. 2025 (arXiv 2503.14286), the gradient of canonical TOPR",
)
def topr(
    log_prob: Tensor,
    mask: Tensor,
    *,
    old_log_prob: Tensor,
    advantage: Tensor,
    advantage_threshold: Scalar = 0.0,
    level: str = "token",
) -> tuple[LossTerm, ...]:
    r"""Tapered off-policy REINFORCE: ``-A sg(a) log_prob`` with ``a = min(r, 1)`` where ``A <= advantage_threshold``, else 1.

    ``r`` is the probability ratio of the policy to the one that sampled. The gradient pulls what was good up whatever its
    ratio; it pushes what was bad down the less, the less likely it has become, so that a loss without a lower end does not
    run away.

    Args:
        log_prob: nats, under the current policy, of tokens that the old policy sampled; ``[*B, T]``.
        mask: tokens that count; bool, same shape.

    Keyword Args:
        old_log_prob: the same tokens under the policy that sampled; same shape, without graph.
        advantage: the paper's reward less a baseline; same shape.
        advantage_threshold: advantages up to here count as bad. Trinity: the same name.
        level: ``"token"``: each token has its own ratio (as Trinity); ``"sequence"``: the ratio of a whole sequence, the
            product of its tokens' (as the paper, which sums over tokens: ``seq-mean-token-sum``).

    Returns:
        One term, ``objective``; metrics ``weight_mean`` (of ``a``) and ``tapered_fraction`` (``a < 1``), of the tokens that
        count.

    Raises:
        ValueError: if shapes differ or the level is unknown.

    Example:
        >>> log_prob, old = torch.tensor([[-2.0, -2.0]]), torch.tensor([[-1.5, -1.5]])
        >>> mask, advantage = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[1.0, -1.0]])
        >>> topr(log_prob, mask, old_log_prob=old, advantage=advantage)[0].value
        tensor([[ 2.0000, -1.2131]])

    Source: Le Roux et al. 2025 (arXiv 2503.14286), the gradient of canonical TOPR.
    """
    check_choice(("token", "sequence"), level=level)
    log_ratio = log_prob.detach() - old_log_prob
    if level == "sequence":
        log_ratio = sequence_sum(log_ratio, mask)
    weight = torch.where(advantage <= advantage_threshold, log_ratio.clamp(max=0).exp(), 1)
    metrics = {"weight_mean": masked_mean(weight, mask), "tapered_fraction": masked_mean((weight < 1).float(), mask)}
    return (LossTerm("objective", -advantage * weight * log_prob, mask, metrics=metrics),)
