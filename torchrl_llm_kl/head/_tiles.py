"""Tiles of positions x vocabulary: what makes logits, and the pieces that forward and backward share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["LOG_ZERO", "Columns", "Head", "LogitMap", "Plan", "SweepOutput", "Swept", "Tiles", "local_index", "wide"]

# exp is 0 below this in float64 too: a log-prob is clamped here before it is multiplied by its probability.
LOG_ZERO = -1000.0

# Fewer positions at a time than this make the product slow, measured: 16 take twice the time of 128, 64 a tenth more.
_WHOLE_ROWS = 64

Columns = tuple[Tensor | None, Tensor | None]


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

    def logits(self, hidden: Tensor, weight: Tensor | None, bias: Tensor | None, out: Tensor) -> Tensor:
        """``[n, H], [v, H], [v] -> out [n, v]``, float32 or wider; without a weight the product is ``hidden`` itself."""
        factor = self.scale / (self.soft_cap or self.temperature)
        if weight is None or out.dtype != self.dtype:
            # A head in half precision rounds its logits before anything else happens to them; so does this one.
            out.copy_(hidden if weight is None else F.linear(hidden.to(self.dtype), weight, bias))
            if factor != 1.0:
                out.mul_(factor)
        elif bias is None:
            torch.addmm(out, hidden.to(self.dtype), weight.T, beta=0, alpha=factor, out=out)
        else:
            torch.addmm(bias, hidden.to(self.dtype), weight.T, beta=factor, alpha=factor, out=out)
        return out if self.soft_cap is None else out.tanh_().mul_(self.gain)


class Head(NamedTuple):
    """One model's side: ``[N, H]``, ``[V, H]``, ``[V]`` and what makes logits of them.

    Without a weight there is nothing to multiply: ``hidden`` holds the products ``[N, V]``.
    """

    hidden: Tensor
    weight: Tensor | None
    bias: Tensor | None
    map: LogitMap

    @property
    def sizes(self) -> tuple[int, int]:
        """Positions and tokens."""
        return self.hidden.shape[0], self.hidden.shape[1] if self.weight is None else self.weight.shape[0]

    def columns(self, cols: slice) -> Columns:
        """Weight and bias of some tokens, in the dtype of the product."""
        weight, bias = (None if t is None else t[cols].to(self.map.dtype) for t in (self.weight, self.bias))
        return weight, bias

    def logits(self, rows: slice, cols: slice, columns: Columns, out: Tensor) -> Tensor:
        """Of a tile, given the columns' weight and bias; ``out [n, v]``."""
        hidden = self.hidden[rows] if self.weight is not None else self.hidden[rows, cols]
        return self.map.logits(hidden, *columns, out=out)

    def state(self, fill: float) -> Tensor:
        """``[N]`` float32 or wider."""
        return self.hidden.new_full(self.hidden.shape[:1], fill, dtype=wide(self.map.dtype))


@dataclass(frozen=True)
class Plan:
    """What a sweep computes, and in which tiles.

    Args:
        chunk: positions and tokens of a tile.
        entropy: of the policy.
        shares: what the divergence takes of each head's KL, policy and reference. One of them 0: that KL is to the
            other head. Both positive: to the mixture of the two in these shares.
    """

    chunk: tuple[int, int]
    entropy: bool = False
    shares: tuple[float, float] = (1.0, 0.0)

    @property
    def mixture(self) -> bool:
        """Whether each distribution is compared with the mixture, and not one with the other."""
        return self.shares[0] > 0 and self.shares[1] > 0

    @property
    def weighing(self) -> int:
        """Without a mixture, the head whose probabilities weigh the KL."""
        return int(self.shares[1] > 0)

    def forward_chunk(self, head: Head) -> tuple[int, int]:
        """Tiles of forward: what a mixture is shows only in whole rows, so it takes fewer of them."""
        (positions, tokens), vocab = self.chunk, head.sizes[1]
        if not self.mixture or tokens >= vocab:
            return self.chunk
        # As many elements as in other tiles, or few rows: every block of rows reads the whole head.
        return max(positions * tokens // vocab, min(positions, _WHOLE_ROWS)), vocab


class SweepOutput(NamedTuple):
    """``[N]`` each; None if not asked for."""

    log_prob: Tensor | None
    entropy: Tensor | None
    ref_log_prob: Tensor | None
    kl: Tensor | None


class Swept(NamedTuple):
    """What forward finds, ``[N]`` each; None if not asked for.

    ``kl`` is what the policy's probabilities weigh, its KL to the other head or to the mixture; ``ref_kl`` what the
    reference's do. The rest, of each head: the largest logit and the log of the sum of exponentials relative to it.
    """

    log_prob: Tensor | None
    ref_log_prob: Tensor | None
    entropy: Tensor | None
    kl: Tensor | None
    ref_kl: Tensor | None
    top: Tensor
    log_total: Tensor
    ref_top: Tensor | None
    ref_log_total: Tensor | None


class Tiles:
    """Slices of positions and tokens, and buffers ``[n, v]`` that all tiles share."""

    def __init__(self, chunk: tuple[int, int], head: Head, buffers: int) -> None:
        self.sizes = head.sizes
        self.chunk = min(chunk[0], max(self.sizes[0], 1)), min(chunk[1], self.sizes[1])
        numel, dtype = self.chunk[0] * self.chunk[1], wide(head.map.dtype)
        self.flat = [head.hidden.new_empty(numel, dtype=dtype) for _ in range(buffers)]

    def rows(self) -> Iterator[slice]:
        """Positions."""
        return _slices(self.sizes[0], self.chunk[0])

    def columns(self) -> Iterator[slice]:
        """Tokens."""
        return _slices(self.sizes[1], self.chunk[1])

    def buffers(self, rows: slice, cols: slice) -> list[Tensor]:
        """Contiguous ``[n, v]``, also at the edges; not initialised."""
        n, v = rows.stop - rows.start, cols.stop - cols.start
        return [flat[: n * v].view(n, v) for flat in self.flat]


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
