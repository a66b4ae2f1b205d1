"""Two libraries that disagree on the numbers are not compared."""

from __future__ import annotations

import torch
from torch import Tensor


class DisagreementError(RuntimeError):
    """The comparison would be worthless."""


def largest_difference(found: Tensor, expected: Tensor, *, tolerance: float, what: str) -> float:
    """The largest absolute difference of two tensors of one shape.

    Raises:
        DisagreementError: if it is above ``tolerance`` or not a number, or there is nothing to compare.
    """
    if found.shape != expected.shape or found.numel() == 0:
        raise DisagreementError(f"{what}: found shape {tuple(found.shape)}, torchrl has {tuple(expected.shape)}")
    difference = float((found.double() - expected.double()).abs().max())
    if not difference <= tolerance:
        raise DisagreementError(f"{what}: the libraries differ by {difference:.2g}, more than {tolerance:.2g}")
    return difference


def tolerance_of(dtype: torch.dtype) -> float:
    """For log-probs in nats of two ways through one model of that dtype.

    torchrl takes the log-softmax in the dtype of the weights: near -10 the numbers of bfloat16 lie 1/16 apart.
    """
    return 1e-4 if dtype == torch.float32 else 0.25
