"""Checked and cleaned inputs of advantages."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import check_same_shape

__all__ = ["clean_rows", "clean_tokens"]

#: Inputs that say what belongs together, or what comes after what; all others are amounts.
_IDENTITIES = frozenset({"group", "run", "step", "state"})


def clean_rows(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """One number for each sequence: amounts in float32 or wider and without graph, identities in int64; ``[B]``.

    Raises:
        ValueError: if a shape is not ``[B]``, or not that of the others.
        TypeError: if what identifies rows is not of an integer dtype.
    """
    for name, tensor in tensors.items():
        if tensor.ndim != 1:
            raise ValueError(f"{name} must be [B], one number for each sequence, got shape {tuple(tensor.shape)}")
    check_same_shape(**tensors)
    return {name: _identity(name, x) if name in _IDENTITIES else _amount(x) for name, x in tensors.items()}


def clean_tokens(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """One number for each token, as above, and exactly 0 where the mask is False; ``[*B, T]``.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if the mask is not boolean.
    """
    mask = tensors["mask"]
    check_same_shape(**{"mask": mask, **tensors})
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be boolean, got {mask.dtype}: pass mask.bool()")
    return {name: x if x is mask else torch.where(mask, _amount(x), 0) for name, x in tensors.items()}


def _amount(x: Tensor) -> Tensor:
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))


def _identity(name: str, x: Tensor) -> Tensor:
    if x.dtype == torch.bool or x.is_floating_point() or x.is_complex():
        raise TypeError(f"{name} must be of an integer dtype, got {x.dtype}: equal numbers belong together")
    return x.long()
