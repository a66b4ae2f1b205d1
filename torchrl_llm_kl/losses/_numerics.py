"""Masked arithmetic that objectives share. Inputs are clean (see :func:`clean`)."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "LARGEST_LOG_RATIO",
    "Scalar",
    "bounded_exp",
    "clamp",
    "clean",
    "masked_mean",
    "masked_sum",
    "probability_ratio",
    "sequence_mean",
    "sequence_sum",
]

#: A hyper-parameter: a number, or a 0-dim tensor that a schedule changes in place.
Scalar = float | Tensor

#: exp(80) is 5.5e34: the largest power of e, in tens, that float32 holds with room for an advantage.
LARGEST_LOG_RATIO = 80.0


def clean(value: Tensor, mask: Tensor) -> Tensor:
    """0 or False where the mask is False; numbers in float32 or wider."""
    if value.dtype == torch.bool:
        return value & mask
    return torch.where(mask, value.to(torch.promote_types(value.dtype, torch.float32)), 0)


def masked_sum(value: Tensor, mask: Tensor) -> Tensor:
    """Sum over all tokens that count; 0-dim."""
    return torch.where(mask, value, 0).sum()


def masked_mean(value: Tensor, mask: Tensor) -> Tensor:
    """Mean over all tokens that count, 0 if there is none; 0-dim."""
    return masked_sum(value, mask) / mask.sum().clamp(min=1)


def sequence_sum(value: Tensor, mask: Tensor) -> Tensor:
    """Sum of each sequence; ``[*B, 1]``."""
    return torch.where(mask, value, 0).sum(-1, keepdim=True)


def sequence_mean(value: Tensor, mask: Tensor) -> Tensor:
    """Mean of each sequence, 0 for one without tokens that count; ``[*B, 1]``."""
    return sequence_sum(value, mask) / mask.sum(-1, keepdim=True).clamp(min=1)


def probability_ratio(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    r""":math:`\pi / \pi_{old}` per token, differentiable in ``log_prob``.

    A log-ratio above 80 nats counts as 80, without gradient: its exponential would be infinite in float32, and the gradient of
    a clipped infinity NaN.
    """
    return bounded_exp(log_prob - old_log_prob)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """``exp``, with the bound of :func:`probability_ratio`."""
    return log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()


def clamp(value: Tensor, low: Scalar | None = None, high: Scalar | None = None) -> Tensor:
    """``value.clamp(low, high)``, where one bound may be a number and the other a tensor."""
    if low is not None:
        value = value.clamp(min=low)
    if high is not None:
        value = value.clamp(max=high)
    return value
