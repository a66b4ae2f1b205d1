"""Checks of what a linear head is given."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from torchrl_llm_kl.head._tiles import Head, LogitMap

__all__ = ["Direction", "check_pair", "check_targets", "check_temperature", "make_chunk", "make_head", "make_shares"]

Direction = Literal["reverse", "forward", "jensen_shannon"]
_DIRECTIONS: tuple[Direction, ...] = ("reverse", "forward", "jensen_shannon")

# Positions and tokens of a tile, measured (benchmarks/head.py): half of it runs as fast, but where other processes hold
# the cores every parallel kernel may wait for a thread, and a smaller tile means more kernels. The other one is a guess.
_CPU_CHUNK = (1024, 2048)
_CHUNK = (2048, 8192)


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
    check_temperature(temperature)
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
    count, vocab = head.sizes
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
    if policy.sizes[1] != ref.sizes[1]:
        raise ValueError(
            f"weight covers a vocabulary of {policy.sizes[1]} tokens but ref_weight one of {ref.sizes[1]}; an exact KL "
            "needs the same tokens in the same order. If one head is only padded, cut both to the common vocabulary."
        )
    if policy.sizes[0] != ref.sizes[0]:
        raise ValueError(
            f"hidden holds {policy.sizes[0]} positions but ref_hidden holds {ref.sizes[0]}; they must be equal."
        )
    double = [torch.float64 == head.map.dtype for head in (policy, ref)]
    if double[0] != double[1]:
        raise TypeError(
            f"the policy's product is {policy.map.dtype} but the reference's {ref.map.dtype}; expected both float64 or "
            "neither. Set product_dtype."
        )


def check_temperature(temperature: float) -> None:
    """Raise unless logits can be divided by it."""
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature must be positive, got {temperature}; expected a finite number above 0.")


def make_shares(direction: Direction, beta: float) -> tuple[float, float]:
    """What a divergence takes of the policy's and of the reference's KL, see ``Plan``."""
    if direction not in _DIRECTIONS:
        raise ValueError(f"unknown direction {direction!r}; expected one of {', '.join(map(repr, _DIRECTIONS))}.")
    if not 0 < beta < 1:
        raise ValueError(f"beta must be inside (0, 1), got {beta}; the ends are direction='forward' and 'reverse'.")
    return {"reverse": (1.0, 0.0), "forward": (0.0, 1.0), "jensen_shannon": (1.0 - beta, float(beta))}[direction]


def make_chunk(chunk: tuple[int, int] | int | None, hidden: Tensor) -> tuple[int, int]:
    """Positions and tokens of a tile; what is not given is chosen by device."""
    chosen = _CPU_CHUNK if hidden.device.type == "cpu" else _CHUNK
    sizes = chosen if chunk is None else (chunk, chosen[1]) if isinstance(chunk, int) else chunk
    if len(sizes) != 2 or min(sizes) < 1:
        raise ValueError(f"chunk is {chunk}; expected at least 1 position and at least 1 token of a tile.")
    return sizes
