"""The one place that decides in which precision the estimators calculate."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def widen(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Bring tensors to their common dtype, float32 at least.

    A bfloat16 log-prob near -8 is known to 0.03 nats only; the difference of two of them must not be rounded again.

    Example:
        >>> [t.dtype for t in widen(torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.float16))]
        [torch.float32, torch.float32]
    """
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in tensors), torch.float32)
    return tuple(t.to(dtype) for t in tensors)
