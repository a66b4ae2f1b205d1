"""The shapes that variable-length data comes in, and the way back into each of them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Container", "Dense", "Jagged", "Rows", "Strided", "same_rows", "split_rows"]


class Container(Protocol):
    """A form of variable-length data: how many slots each row has, and how flat slots go back into it."""

    @property
    def row_lengths(self) -> Tensor:
        """Slots per row, padding and gaps included; ``[S]``, int64."""
        ...

    @property
    def row_sizes(self) -> list[int]:
        """The same as Python numbers: a small tensor operation takes longer than a comparison of two lists."""
        ...

    @property
    def batch_shape(self) -> torch.Size:
        """The shape of the batch; its product is ``S``."""
        ...

    def build(self, slots: Tensor) -> Tensor | list[Tensor]:
        """Put ``slots [M, *F]`` back into this form."""
        ...


def same_rows(a: Container, b: Container) -> bool:
    """Whether both have as many rows of the same numbers of slots."""
    return a is b or a.row_sizes == b.row_sizes


def split_rows(slots: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """``S`` rows ``[T_i, *F]`` of ``slots [M, *F]``."""
    # Rows that autograd need not know as views of one tensor are made in two thirds of the time.
    split = torch.split_with_sizes if slots.requires_grad else torch.unsafe_split_with_sizes
    return list(split(slots, sizes))


class _Sized:
    """Lengths that were given as numbers or as a tensor; the other is made when it is asked for."""

    lengths: Tensor | Sequence[int]
    device: torch.device | None

    @cached_property
    def row_lengths(self) -> Tensor:
        """Slots per row; ``[S]``, int64."""
        if isinstance(self.lengths, Tensor):
            return self.lengths
        if not self.lengths:
            return torch.zeros(0, dtype=torch.long, device=self.device)
        return torch.frombuffer(array("q", self.lengths), dtype=torch.long).to(
            self.device
        )  # 6 times as fast as tensor()

    @cached_property
    def row_sizes(self) -> list[int]:
        """Slots per row."""
        return self.lengths.tolist() if isinstance(self.lengths, Tensor) else list(self.lengths)


@dataclass(frozen=True, eq=False)
class Dense:
    """A tensor ``[*B, T, *F]``: every row has ``T`` slots, some of them padding."""

    batch_shape: torch.Size
    width: int
    device: torch.device

    @cached_property
    def row_lengths(self) -> Tensor:
        """``T`` for each row."""
        return torch.full((self.batch_shape.numel(),), self.width, dtype=torch.long, device=self.device)

    @cached_property
    def row_sizes(self) -> list[int]:
        """``T`` for each row."""
        return [self.width] * self.batch_shape.numel()

    def build(self, slots: Tensor) -> Tensor:
        """``[*B, T, *F]``."""
        return slots.reshape(*self.batch_shape, self.width, *slots.shape[1:])


@dataclass(frozen=True, eq=False)
class Strided(_Sized):
    """A nested tensor of strided layout ``[S, (T_i), *F]``; ``lengths`` as numbers or as a tensor."""

    lengths: Tensor | Sequence[int]
    device: torch.device | None = None

    @property
    def batch_shape(self) -> torch.Size:
        """``[S]``."""
        return torch.Size([len(self.row_sizes)])

    def build(self, slots: Tensor) -> Tensor:
        """A strided nested tensor."""
        if not self.row_sizes:
            raise ValueError(
                "a nested tensor of no rows cannot be built: found a batch of 0, expected at least one row"
            )
        return torch.nested.as_nested_tensor(split_rows(slots, self.row_sizes), layout=torch.strided)


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

    @cached_property
    def row_lengths(self) -> Tensor:
        """The span of each row in the buffer, gaps included, also those before the first and after the last row."""
        edges = self.offsets.long()
        if self.lengths is not None and self.buffer_size is not None:
            edges = torch.cat([edges.new_zeros(1), edges[1:-1], edges.new_full((1,), self.buffer_size)])
        return edges.diff()

    @cached_property
    def row_sizes(self) -> list[int]:
        """The same spans."""
        return self.row_lengths.tolist()

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
class Rows(_Sized):
    """Separate rows ``[T_i, *F]`` in row-major order: a Python list, or the leaves of a lazy stack.

    Args:
        lengths: slots per row, as numbers or as a tensor.
        batch_shape: its product is the number of rows.
        device: where :attr:`row_lengths` is made of numbers.
    """

    lengths: Tensor | Sequence[int]
    batch_shape: torch.Size
    device: torch.device | None = None

    def build(self, slots: Tensor) -> list[Tensor]:
        """A flat list of ``S`` rows."""
        return split_rows(slots, self.row_sizes)
