"""The outcome of each sequence from rewards of sequences or of tokens."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_llm_kl.advantages._entries import amounts
from torchrl_llm_kl.ragged import Ragged, read_ragged
from torchrl_llm_kl.transforms._interface import TOKENS_FULL

__all__ = ["outcomes"]

_ATTENTION = ("masks", "all_attention_mask")


def outcomes(td: TensorDictBase, value: Any, what: str) -> Tensor:
    """One number for each sequence, in float32 or wider; ``[S]``.

    Args:
        td: says how many tokens each sequence has, and which of them are padding: what stands there does not count.
        value: the reward: one number for each sequence, or for each token, which add up.
        what: the entry, for errors.

    Raises:
        TypeError: if the entry holds no tensors.
        ValueError: if a sequence has several numbers, but not one for each of its tokens.
    """
    rows = td.batch_size.numel()
    widths = _widths(value, td)
    tokens = None if widths is None or all(width == 1 for width in widths) else _tokens(td)
    if tokens is None:
        return amounts(value, rows, what)
    expected = tokens.container.row_sizes
    if widths != expected:
        row = next(i for i, (a, b) in enumerate(zip(widths or [], expected, strict=True)) if a != b)
        shape = tuple(value.shape) if isinstance(value, Tensor) and not value.is_nested else f"rows of {widths}"
        raise ValueError(
            f"{what} has shape {shape}: expected one number for each sequence, or one for each token; sequence {row} has "
            f"{(widths or [])[row]} numbers and {expected[row]} tokens. Add up several rewards, with their weights, first"
        )
    flat = _flat(value)
    if tokens.keep is not None:
        flat = torch.where(tokens.keep.to(flat.device), flat, 0)  # whatever stands at padding, NaN too
    return amounts(list(flat.split(expected)), rows, what)


def _tokens(td: TensorDictBase) -> Ragged | None:
    tokens = read_ragged(td, TOKENS_FULL, _ATTENTION)
    if tokens is not None:
        return tokens
    mask = read_ragged(td, _ATTENTION)
    return None if mask is None else Ragged.from_slots(mask.slots(), mask.container, mask.slots().bool())


def _widths(value: Any, td: TensorDictBase) -> list[int] | None:
    """Numbers of each sequence; None for what is no tensor, or does not divide among them."""
    if isinstance(value, list):
        return [row.numel() for row in value] if all(isinstance(row, Tensor) for row in value) else None
    if not isinstance(value, Tensor):
        return None
    if value.is_nested:
        return [row.numel() for row in value.unbind()]
    rows = td.batch_size.numel()
    return None if value.numel() % rows else [value.numel() // rows] * rows


def _flat(value: Any) -> Tensor:
    if isinstance(value, Tensor) and not value.is_nested:
        return value.reshape(-1)
    return torch.cat([row.reshape(-1) for row in (value if isinstance(value, list) else value.unbind())])
