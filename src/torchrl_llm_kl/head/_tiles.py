"""Tiles of positions x vocabulary: what makes logits, and the pieces that forward and backward share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["LOG_ZERO", "Head", "LogitMap", "Plan", "SweepOutput", "Tiles", "local_index", "wide"]

# exp is 0 below this in float64 too: a log-prob is clamped here before it is multiplied by its probability.
LOG_ZERO = -1000.0


@dataclass(frozen=True)
class LogitMap:
    """``softcap(scale * (hidden @ weight.T + bias)) / temperature``, the product made in ``dtype``."""

    dtype: torch.dtype
    temperature: float = 1.0
    scale: float = 1.0
    soft_cap: float | None = None

    @property
    def gain(self) -> float:
        """Factor after the soft-cap's tanh."""
        return (self.soft_cap or self.temperature) / self.temperature

    @property
    def slope(self) -> float:
        """Derivative of a logit by the product, up to that of tanh."""
        return self.scale / self.temperature

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        """``[n, H], [v, H], [v] -> out [n, v]``, float32 or wider."""
        hidden = hidden.to(self.dtype)
        factor = self.scale / (self.soft_cap or self.temperature)
        if out.dtype != self.dtype:
            # A head in half precision rounds its logits before anything else happens to them; so does this one.
            out.copy_(F.linear(hidden, weight, bias))
            if factor != 1.0:
                out.mul_(factor)
        elif bias is None:
            torch.addmm(out, hidden, weight.T, beta=0, alpha=factor, out=out)
        else:
            torch.addmm(bias, hidden, weight.T, beta=factor, alpha=factor, out=out)
        return out if self.soft_cap is None else out.tanh_().mul_(self.gain)


class Head(NamedTuple):
    """One model's side: ``[N, H]``, ``[V, H]``, ``[V]`` and what makes logits of them."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    map: LogitMap

    def columns(self, cols: slice) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of some tokens, in the dtype of the product."""
        bias = None if self.bias is None else self.bias[cols].to(self.map.dtype)
        return self.weight[cols].to(self.map.dtype), bias

    def state(self, fill: float) -> Tensor:
        """``[N]`` float32 or wider."""
        return self.hidden.new_full(self.hidden.shape[:1], fill, dtype=wide(self.map.dtype))


@dataclass(frozen=True)
class Plan:
    """What a sweep computes, and in which tiles.

    Args:
        chunk: positions and tokens of a tile.
        entropy: of the policy.
        forward_kl: which of the two distributions the KL is an expectation over: the reference if True.
    """

    chunk: tuple[int, int]
    entropy: bool = False
    forward_kl: bool = False

    @property
    def weighing(self) -> int:
        """Which head's probabilities weigh the KL: 0 the policy's, 1 the reference's."""
        return int(self.forward_kl)


class SweepOutput(NamedTuple):
    """``[N]`` each; None if not asked for."""

    log_prob: Tensor | None
    entropy: Tensor | None
    ref_log_prob: Tensor | None
    kl: Tensor | None


class Tiles:
    """Slices of positions and tokens, and buffers ``[n, v]`` that all tiles share."""

    def __init__(self, chunk: tuple[int, int], head: Head, buffers: int) -> None:
        self.sizes = head.hidden.shape[0], head.weight.shape[0]
        self.chunk = min(chunk[0], max(self.sizes[0], 1)), min(chunk[1], self.sizes[1])
        self.flat = head.hidden.new_empty(buffers, self.chunk[0] * self.chunk[1], dtype=wide(head.map.dtype))

    def rows(self) -> Iterator[slice]:
        """Positions."""
        return _slices(self.sizes[0], self.chunk[0])

    def columns(self) -> Iterator[slice]:
        """Tokens."""
        return _slices(self.sizes[1], self.chunk[1])

    def buffers(self, rows: slice, cols: slice) -> list[Tensor]:
        """Contiguous ``[n, v]``, also at the edges; not initialised."""
        n, v = rows.stop - rows.start, cols.stop - cols.start
        return [flat[: n * v].view(n, v) for flat in self.flat.unbind()]


def local_index(targets: Tensor, cols: slice) -> tuple[Tensor, Tensor]:
    """Where the targets are among some tokens, and whether they are there at all; ``[n]`` each."""
    index = targets - cols.start
    inside = (index >= 0) & (index < cols.stop - cols.start)
    return index.masked_fill(~inside, 0), inside


def wide(dtype: torch.dtype) -> torch.dtype:
    """At least float32."""
    return torch.promote_types(dtype, torch.float32)


def _slices(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))
