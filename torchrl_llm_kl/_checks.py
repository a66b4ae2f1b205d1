"""Argument checks that more than one layer needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor


def check_same_shape(**named_tensors: Tensor | None) -> None:
    """Raise unless every given tensor has the shape of the first one; ``None`` stands for "not given".

    Broadcasting would silently turn ``[B, T]`` against ``[B, 1]`` into a wrong number, so nothing here broadcasts.

    Raises:
        ValueError: names the first pair that differs, with both shapes.

    Example:
        >>> import torch
        >>> check_same_shape(log_prob=torch.zeros(2, 3), ref_log_prob=torch.zeros(2, 1))
        Traceback (most recent call last):
        ...
        ValueError: log_prob has shape (2, 3) but ref_log_prob has shape (2, 1); they must be equal.
    """
    given = [(name, tuple(tensor.shape)) for name, tensor in named_tensors.items() if tensor is not None]
    for name, shape in given[1:]:
        first_name, first_shape = given[0]
        if shape != first_shape:
            raise ValueError(f"{first_name} has shape {first_shape} but {name} has shape {shape}; they must be equal.")


def check_range(low: float = -math.inf, high: float = math.inf, *, above: float = -math.inf, **named: Any) -> None:
    """Raise a ValueError unless each named number lies in ``[low, high]`` and is greater than ``above``.

    Tensors and None pass: reading a tensor would stall an accelerator.
    """
    for name, value in named.items():
        if isinstance(value, (int, float)) and not (low <= value <= high and value > above):
            bounds = [f"at least {low:g}"] * (low > -math.inf)
            bounds += [f"greater than {above:g}"] * (above > -math.inf)
            bounds += [f"at most {high:g}"] * (high < math.inf)
            raise ValueError(f"{name} must be {' and '.join(bounds) or 'a number'}, got {value}")


def check_choice(choices: Sequence[str | None], **named: Any) -> None:
    """Raise a ValueError unless each named value is one of ``choices``."""
    for name, value in named.items():
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
