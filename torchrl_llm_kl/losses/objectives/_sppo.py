"""sPPO: a log-ratio surrogate inside a trust interval."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import check_range
from torchrl_llm_kl.losses._numerics import Scalar, masked_mean, probability_ratio
from torchrl_llm_kl.losses._objective import objective
from torchrl_llm_kl.losses._term import LossTerm

__all__ = ["sppo"]


@objective(
    "sppo", needs=("old_log_prob", "advantage"), source="Vaswani et al. 2022 (arXiv 2108.05828), section 4.2 (sPPO)"
)
def sppo(
    log_prob: Tensor,
    mask: Tensor,
    *,
    old_log_prob: Tensor,
    advantage: Tensor,
    epsilon: Scalar = 0.3,
) -> tuple[LossTerm, ...]:
    r"""``-A (log_prob - old_log_prob)`` per token where ``1 / (1 + epsilon) <= r <= 1 + epsilon``, else 0.

    ``r`` is the probability ratio of the policy to the one that sampled. The gradient is ``-A`` inside the interval and 0
    outside, on both sides and for both signs of ``A``: a token that has left does not come back by itself.

    Args:
        log_prob: nats, under the current policy, of tokens that the old policy sampled; ``[*B, T]``.
        mask: tokens that count; bool, same shape.

    Keyword Args:
        old_log_prob: the same tokens under the policy that sampled; same shape, without graph.
        advantage: same shape.
        epsilon: how far the ratio may be from 1, either way, as a factor. Trinity: the same name.

    Returns:
        One term, ``objective``; metrics ``clip_fraction`` (``_low``: ratio below, ``_high``: above) of the tokens that count.

    Raises:
        ValueError: if shapes differ or ``epsilon`` is negative.

    Example:
        >>> log_prob, old = torch.tensor([[-1.5, -2.0]]), torch.tensor([[-1.75, -1.5]])
        >>> mask, advantage = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[2.0, -1.0]])
        >>> sppo(log_prob, mask, old_log_prob=old, advantage=advantage)[0].value
        tensor([[-0.5000,  0.0000]])

    Source: Vaswani et al. 2022 (arXiv 2108.05828), section 4.2 (sPPO).
    """
    check_range(low=0.0, epsilon=epsilon)
    ratio = probability_ratio(log_prob, old_log_prob).detach()
    below, above = ratio < 1 / (1 + epsilon), ratio > 1 + epsilon
    value = torch.where(below | above, 0, -advantage * (log_prob - old_log_prob))
    metrics = {
        "clip_fraction": masked_mean((below | above).float(), mask),
        "clip_fraction_low": masked_mean(below.float(), mask),
        "clip_fraction_high": masked_mean(above.float(), mask),
    }
    return (LossTerm("objective", value, mask, metrics=metrics),)
