"""Learning to imitate: the log-likelihood of tokens that an expert wrote, plain or weighted."""

from __future__ import annotations

import math

from torch import Tensor

from torchrl_llm_kl._numerics import check_range
from torchrl_llm_kl.losses._numerics import Scalar, clamp, masked_mean
from torchrl_llm_kl.losses._objective import objective
from torchrl_llm_kl.losses._term import LossTerm

__all__ = ["sft", "sft_is", "sft_phi"]


@objective("sft", source="maximum likelihood; Trinity-RFT 0.6.0: sft")
def sft(log_prob: Tensor, mask: Tensor) -> tuple[LossTerm, ...]:
    """Minus the log-probability of each token: supervised fine-tuning.

    The gradient is that of the cross-entropy between whoever wrote the tokens and the policy.

    Args:
        log_prob: nats, under the current policy, of tokens that an expert wrote; ``[*B, T]``.
        mask: tokens that count; bool, same shape.

    Returns:
        One term, ``objective``, in nats.

    Raises:
        ValueError: if shapes differ.

    Example:
        >>> import torch
        >>> sft(torch.tensor([[-1.0, -2.0]]), torch.ones(1, 2, dtype=torch.bool))[0].value
        tensor([[1., 2.]])
    """
    return (LossTerm("objective", -log_prob, mask),)


@objective("sft_is", source="Trinity-RFT 0.6.0: sft_is; Wu et al. 2025 (arXiv 2508.05629), DFT")
def sft_is(log_prob: Tensor, mask: Tensor) -> tuple[LossTerm, ...]:
    """``-sg(p) log p``: imitation in which a token weighs as much as the policy already believes in it.

    ``p`` is the token's probability and ``sg`` stops the gradient, which is that of ``-p``: tokens that the policy finds
    impossible do not move it.

    Args:
        log_prob: nats, under the current policy, of tokens that an expert wrote; ``[*B, T]``.
        mask: tokens that count; bool, same shape.

    Returns:
        One term, ``objective``; metric ``weight_mean``, the mean weight of a token.

    Raises:
        ValueError: if shapes differ.

    Example:
        >>> import torch
        >>> sft_is(torch.tensor([[0.5, 0.1]]).log(), torch.ones(1, 2, dtype=torch.bool))[0].value
        tensor([[0.3466, 0.2303]])

    Source: Trinity-RFT 0.6.0; Wu et al. 2025 (arXiv 2508.05629), DFT.
    """
    weight = log_prob.detach().exp()
    return (LossTerm("objective", -weight * log_prob, mask, metrics={"weight_mean": masked_mean(weight, mask)}),)


@objective(
    "sft_phi",
    source="Zhang et al. 2025 (arXiv 2508.11408), CHORD-phi; the cut-off is Trinity-RFT 0.6.0's",
)
def sft_phi(log_prob: Tensor, mask: Tensor, *, cutoff_prob: Scalar = 1.0) -> tuple[LossTerm, ...]:
    """``-sg(p (1 - p)) log p``: imitation of the tokens about which the policy is undecided.

    ``p`` is the token's probability and ``sg`` stops the gradient, which is that of ``-(p - p**2 / 2)``: it vanishes both for
    tokens that the policy knows and for those that would disrupt it, and is largest at ``p = 1/2``.

    Args:
        log_prob: nats, under the current policy, of tokens that an expert wrote; ``[*B, T]``.
        mask: tokens that count; bool, same shape.

    Keyword Args:
        cutoff_prob: tokens more probable than that are not trained any further: their ``log p`` counts as
            ``log(cutoff_prob)``, without gradient. In the paper there is no such bound, which is 1.0.

    Returns:
        One term, ``objective``; metric ``weight_mean``, the mean weight of a token, at most 1/4.

    Raises:
        ValueError: if shapes differ or ``cutoff_prob`` is not in (0, 1].

    Example:
        >>> import torch
        >>> probability = torch.tensor([[0.9, 0.5, 0.01]])
        >>> sft_phi(probability.log(), torch.ones(1, 3, dtype=torch.bool))[0].value
        tensor([[0.0095, 0.1733, 0.0456]])

    Source: Zhang et al. 2025 (arXiv 2508.11408), CHORD-phi; the cut-off is Trinity-RFT 0.6.0's.
    """
    check_range(above=0.0, high=1.0, cutoff_prob=cutoff_prob)
    decided = log_prob.detach()
    # 1 - p without rounding where p is near 1.
    weight = -decided.exp() * decided.expm1()
    cutoff = cutoff_prob.log() if isinstance(cutoff_prob, Tensor) else math.log(cutoff_prob)
    value = -weight * clamp(log_prob, high=cutoff)
    return (LossTerm("objective", value, mask, metrics={"weight_mean": masked_mean(weight, mask)}),)
