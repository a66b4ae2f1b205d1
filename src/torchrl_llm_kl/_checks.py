"""Argument checks that more than one layer needs."""

from __future__ import annotations

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
