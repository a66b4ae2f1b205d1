"""Mean 0 and variance 1 over the tokens that count."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["whitened"]

_EPSILON = 1e-8  # added to the variance, as in verl and TRL


def whitened(value: Tensor, mask: Tensor) -> Tensor:
    """Subtract the mean over all tokens that count and divide by their (unbiased) standard deviation; 0 elsewhere.

    Exactly 0 if they are all equal, or if there is but one.
    """
    if value.numel() == 0:
        return value
    count = mask.sum()
    # Measured from the least, equal values leave nothing to round.
    above = torch.where(mask, value - torch.where(mask, value, torch.inf).amin(), 0)
    centred = torch.where(mask, above - above.sum() / count.clamp(min=1), 0)
    variance = centred.square().sum() / (count - 1).clamp(min=1)
    return centred * (variance + _EPSILON).rsqrt()
