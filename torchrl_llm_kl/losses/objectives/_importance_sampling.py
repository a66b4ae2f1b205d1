"""Importance sampling: the unbiased off-policy policy gradient, with nothing to bound it."""

from __future__ import annotations

from torch import Tensor

from torchrl_llm_kl.losses._numerics import masked_mean, probability_ratio
from torchrl_llm_kl.losses._objective import objective
from torchrl_llm_kl.losses._term import LossTerm

__all__ = ["importance_sampling"]


@objective(
    "importance_sampling",
    needs=("old_log_prob", "advantage"),
    source="Kahn and Marshall 1953; Schulman et al. 2017 (arXiv 1707.06347), eq. 6",
)
def importance_sampling(
    log_prob: Tensor, mask: Tensor, *, old_log_prob: Tensor, advantage: Tensor
) -> tuple[LossTerm, ...]:
    r"""``-A r`` per token, without clipping.

    ``r`` is the probability ratio of the policy to the one that sampled. The mean gradient is that of ``-E_pi[A]``, per
    position, whatever policy sampled; its variance grows with the distance of the two. Only a log-ratio above 80 nats, where
    float32 ends, counts as 80 without gradient.

    Args:
        log_prob: nats, under the current policy, of tokens that the old policy sampled; ``[*B, T]``.
        mask: tokens that count; bool, same shape.

    Keyword Args:
        old_log_prob: the same tokens under the policy that sampled; same shape, without graph.
        advantage: same shape.

    Returns:
        One term, ``objective``; metric ``ratio_mean`` over the tokens that count, about 1 for tokens of the old policy.

    Raises:
        ValueError: if shapes differ.

    Example:
        >>> log_prob, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.5]])
        >>> mask, advantage = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[1.0, -1.0]])
        >>> importance_sampling(log_prob, mask, old_log_prob=old, advantage=advantage)[0].value
        tensor([[-1.6487,  0.6065]])

    Source: Kahn and Marshall 1953; Schulman et al. 2017 (arXiv 1707.06347), eq. 6.
    """
    ratio = probability_ratio(log_prob, old_log_prob)
    return (LossTerm("objective", -advantage * ratio, mask, metrics={"ratio_mean": masked_mean(ratio.detach(), mask)}),)
