"""Checks of what a linear head is given."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_llm_kl.head._tiles import Head, LogitMap

__all__ = ["check_chunk", "check_pair", "check_targets", "make_head"]


def make_head(
    prefix: str,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    temperature: float,
    scale: float,
    soft_cap: float | None,
    product_dtype: torch.dtype | None,
) -> Head:
    """A head whose shapes, dtypes and options fit; ``prefix`` is that of the argument names."""
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or weight.shape[0] == 0:
        raise ValueError(
            f"{prefix}hidden has shape {tuple(hidden.shape)} and {prefix}weight has shape {tuple(weight.shape)}; "
            "expected [N, H] and [V, H] with V at least 1. Flatten the positions first."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{prefix}bias has shape {tuple(bias.shape)}; expected ({weight.shape[0]},) as {prefix}weight."
        )
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature must be positive and finite, got {temperature}.")
    if soft_cap is not None and not 0 < soft_cap < float("inf"):
        raise ValueError(f"{prefix}soft_cap must be positive and finite, or None for no cap, got {soft_cap}.")
    dtype = _product_dtype(prefix, hidden, weight, product_dtype)
    return Head(hidden, weight, bias, LogitMap(dtype, float(temperature), float(scale), soft_cap))


def _product_dtype(prefix: str, hidden: Tensor, weight: Tensor, asked: torch.dtype | None) -> torch.dtype:
    for name, tensor in (("hidden", hidden), ("weight", weight)):
        if not tensor.is_floating_point():
            raise TypeError(f"{prefix}{name} has dtype {tensor.dtype}; expected a floating-point dtype.")
    if asked is not None:
        if not asked.is_floating_point:
            raise TypeError(f"product_dtype is {asked}; expected a floating-point dtype.")
        return asked
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and torch.float64 not in (hidden.dtype, weight.dtype):
        return torch.get_autocast_dtype(device)
    if hidden.dtype != weight.dtype:
        raise TypeError(
            f"{prefix}hidden has dtype {hidden.dtype} but {prefix}weight has dtype {weight.dtype}; expected the same, "
            "or product_dtype to say in which dtype to multiply."
        )
    return hidden.dtype


def check_targets(targets: Tensor, head: Head) -> Tensor:
    """Targets as int64."""
    count, vocab = head.hidden.shape[0], head.weight.shape[0]
    if targets.shape != (count,):
        raise ValueError(f"targets has shape {tuple(targets.shape)}; expected ({count},), one for each row of hidden.")
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise TypeError(f"targets has dtype {targets.dtype}; expected an integer dtype, it holds token ids.")
    targets = targets.long()
    # Looking at the values would wait for an accelerator, and break a compiled graph.
    if targets.device.type == "cpu" and count and not torch.compiler.is_compiling():
        low, high = (int(bound) for bound in targets.aminmax())
        if low < 0 or high >= vocab:
            raise ValueError(
                f"targets holds token ids from {low} to {high}; expected 0 to {vocab - 1}, the rows of weight. Leave "
                "positions that are not scored out of hidden and targets."
            )
    return targets


def check_pair(policy: Head, ref: Head) -> None:
    """Raise unless the heads share positions and vocabulary."""
    if policy.weight.shape[0] != ref.weight.shape[0]:
        raise ValueError(
            f"weight covers a vocabulary of {policy.weight.shape[0]} tokens but ref_weight one of "
            f"{ref.weight.shape[0]}; an exact KL needs the same tokens in the same order. If one head is only padded, "
            "cut both to the common vocabulary."
        )
    if policy.hidden.shape[0] != ref.hidden.shape[0]:
        raise ValueError(
            f"hidden holds {policy.hidden.shape[0]} positions but ref_hidden holds {ref.hidden.shape[0]}; they must be "
            "equal."
        )
    double = [torch.float64 == head.map.dtype for head in (policy, ref)]
    if double[0] != double[1]:
        raise TypeError(
            f"the policy's product is {policy.map.dtype} but the reference's {ref.map.dtype}; expected both float64 or "
            "neither. Set product_dtype."
        )


def check_chunk(chunk: tuple[int, int]) -> tuple[int, int]:
    """Raise unless both sizes are at least 1."""
    if len(chunk) != 2 or min(chunk) < 1:
        raise ValueError(f"chunk is {chunk}; expected two sizes of at least 1, positions and tokens of a tile.")
    return chunk
