"""The shapes that variable-length data comes in, and the way back into each of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Container", "Dense", "Jagged", "Rows", "Strided"]


class Container(Protocol):
    """A form of variable-length data: how many slots each row has, and how flat slots go back into it."""

    @property
    def row_lengths(self) -> Tensor:
        """Slots per row, padding and gaps included; ``[S]``, int64."""
        ...

    @property
    def batch_shape(self) -> torch.Size:
        """The shape of the batch; its product is ``S``."""
        ...

    def build(self, slots: Tensor) -> Tensor | list[Tensor]:
        """Put ``slots [M, *F]`` back into this form."""
        ...


@dataclass(frozen=True, eq=False)
class Dense:
    """A tensor ``[*B, T, *F]``: every row has ``T`` slots, some of them padding."""

    batch_shape: torch.Size
    width: int
    device: torch.device

    @property
    def row_lengths(self) -> Tensor:
        """``T`` for each row."""
        return torch.full((self.batch_shape.numel(),), self.width, dtype=torch.long, device=self.device)

    def build(self, slots: Tensor) -> Tensor:
        """``[*B, T, *F]``."""
        return slots.reshape(*self.batch_shape, self.width, *slots.shape[1:])


@dataclass(frozen=True, eq=False)
class Strided:
    """A nested tensor of strided layout ``[S, (T_i), *F]``."""

    row_lengths: Tensor

    @property
    def batch_shape(self) -> torch.Size:
        """``[S]``."""
        return self.row_lengths.shape

    def build(self, slots: Tensor) -> Tensor:
        """A strided nested tensor."""
        rows = list(slots.split(self.row_lengths.tolist()))
        if not rows:
            raise ValueError(
                "a nested tensor of no rows cannot be built: found a batch of 0, expected at least one row"
            )
        return torch.nested.as_nested_tensor(rows, layout=torch.strided)


@dataclass(frozen=True, eq=False)
class Jagged:
    """A nested tensor of jagged layout; with ``lengths`` beside ``offsets`` its buffer has gaps.

    Torch lets two jagged tensors meet in one operation only when they share the *object* ``offsets`` (``lengths`` where
    there are gaps), so both are kept as they came.
    """

    offsets: Tensor
    lengths: Tensor | None
    buffer_size: int | None = None
    min_seqlen: int | None = None
    max_seqlen: int | None = None

    @property
    def row_lengths(self) -> Tensor:
        """The span of each row in the buffer, gaps included, also those before the first and after the last row."""
        edges = self.offsets.long()
        if self.lengths is not None and self.buffer_size is not None:
            edges = torch.cat([edges.new_zeros(1), edges[1:-1], edges.new_full((1,), self.buffer_size)])
        return edges.diff()

    @property
    def batch_shape(self) -> torch.Size:
        """``[S]``."""
        return torch.Size([self.offsets.numel() - 1])

    def build(self, slots: Tensor) -> Tensor:
        """A jagged nested tensor over the same offsets (and lengths)."""
        return torch.nested.nested_tensor_from_jagged(
            slots,
            offsets=self.offsets,
            lengths=self.lengths,
            min_seqlen=self.min_seqlen,
            max_seqlen=self.max_seqlen,
        )


@dataclass(frozen=True, eq=False)
class Rows:
    """Separate rows ``[T_i, *F]`` in row-major order: a Python list, or the leaves of a lazy stack."""

    row_lengths: Tensor
    batch_shape: torch.Size

    def build(self, slots: Tensor) -> list[Tensor]:
        """A flat list of ``S`` rows."""
        return list(slots.split(self.row_lengths.tolist()))
