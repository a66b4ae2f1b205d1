"""Checks that two libraries compute the same numbers, before their speed is compared."""

from __future__ import annotations

import torch
from torch import Tensor


class DisagreementError(RuntimeError):
    """The libraries compute different numbers, so a comparison of their speed is meaningless."""


def largest_difference(found: Tensor, expected: Tensor, *, tolerance: float, what: str) -> float:
    """Return the largest absolute difference of two tensors of one shape.

    Raises:
        DisagreementError: if it exceeds ``tolerance`` or is NaN, if the shapes differ, or if the tensors are empty.
    """
    if found.shape != expected.shape or found.numel() == 0:
        raise DisagreementError(f"{what}: found shape {tuple(found.shape)}, torchrl has {tuple(expected.shape)}.")
    difference = float((found.double() - expected.double()).abs().max())
    if not difference <= tolerance:
        raise DisagreementError(f"{what}: the libraries differ by {difference:.2g}, more than {tolerance:.2g}.")
    return difference


def tolerance_of(dtype: torch.dtype) -> float:
    """Tolerance in nats for log-probs of one model with weights of ``dtype``, computed by two libraries.

    torchrl computes the log-softmax in the dtype of the weights. Near -10, bfloat16 has a spacing of 1/16.
    """
    return 1e-4 if dtype == torch.float32 else 0.25
