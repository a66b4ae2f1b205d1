"""Containers: the forms of variable-length data, and how each is rebuilt from flat slots."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


class Container(ABC):
    """A form of variable-length data in ``S`` rows: how many slots each row has, and how flat slots go back into it.

    ``batch_shape`` is the shape of the batch; its product is ``S``.

    Example:
        >>> container = Dense(torch.Size([2]), 3, torch.device("cpu"))
        >>> container.row_sizes, container.build(torch.arange(6)).tolist()
        ([3, 3], [[0, 1, 2], [3, 4, 5]])
    """

    batch_shape: torch.Size
    #: Slots per row, padding and gaps included. Comparing two lists is faster than an operation on small tensors.
    row_sizes: list[int]
    device: torch.device | None

    @cached_property
    def row_lengths(self) -> Tensor:
        """``row_sizes`` as a tensor; ``[S]``, int64."""
        if not self.row_sizes:
            return torch.zeros(0, dtype=torch.long, device=self.device)
        # 6 times as fast as torch.tensor().
        return torch.frombuffer(array("q", self.row_sizes), dtype=torch.long).to(self.device)

    @abstractmethod
    def build(self, slots: Tensor) -> Tensor | list[Tensor]:
        """Put ``slots [M, *F]`` back into this form."""


@dataclass(frozen=True, eq=False)
class Dense(Container):
    """A tensor ``[*B, T, *F]``: every row has ``T`` slots, some of which may be padding."""

    batch_shape: torch.Size
    width: int
    device: torch.device

    @cached_property
    def row_sizes(self) -> list[int]:  # type: ignore[override]  # as read-only as the field of a frozen dataclass
        return [self.width] * self.batch_shape.numel()

    def build(self, slots: Tensor) -> Tensor:
        return slots.reshape(*self.batch_shape, self.width, *slots.shape[1:])


@dataclass(frozen=True, eq=False)
class Rows(Container):
    """Separate rows ``[T_i, *F]`` in row-major order: a Python list, or the leaves of a lazy stack.

    ``row_sizes`` are slots per row; :attr:`row_lengths` is on ``device``.
    """

    row_sizes: list[int]
    batch_shape: torch.Size
    device: torch.device | None = None

    def build(self, slots: Tensor) -> list[Tensor]:
        return split_rows(slots, self.row_sizes)


@dataclass(frozen=True, eq=False)
class Strided(Container):
    """A nested tensor ``[S, (T_i), *F]`` of strided layout; ``row_sizes`` are slots per row."""

    row_sizes: list[int]
    device: torch.device | None = None

    @property
    def batch_shape(self) -> torch.Size:  # type: ignore[override]  # as read-only as the field of a frozen dataclass
        return torch.Size([len(self.row_sizes)])

    def build(self, slots: Tensor) -> Tensor:
        return torch.nested.as_nested_tensor(split_rows(slots, self.row_sizes), layout=torch.strided)


@dataclass(frozen=True, eq=False)
class Jagged(Container):
    """A nested tensor of jagged layout; with ``lengths`` beside ``offsets``, its buffer has gaps.

    Torch combines two jagged tensors in one operation only if they share the *object* ``offsets`` (``lengths`` if there
    are gaps), so both are kept as they came. The slots of a row include the gaps around it, so that the rows cover the
    whole buffer.
    """

    offsets: Tensor
    lengths: Tensor | None
    buffer_size: int | None = None
    min_seqlen: int | None = None
    max_seqlen: int | None = None

    @cached_property
    def row_lengths(self) -> Tensor:
        edges = self.offsets.long()
        if self.lengths is not None and self.buffer_size is not None:
            edges = torch.cat([edges.new_zeros(1), edges[1:-1], edges.new_full((1,), self.buffer_size)])
        return edges.diff()

    @cached_property
    def row_sizes(self) -> list[int]:  # type: ignore[override]
        return self.row_lengths.tolist()

    @property
    def batch_shape(self) -> torch.Size:  # type: ignore[override]  # as read-only as the field of a frozen dataclass
        return torch.Size([self.offsets.numel() - 1])

    def build(self, slots: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(
            slots, self.offsets, self.lengths, min_seqlen=self.min_seqlen, max_seqlen=self.max_seqlen
        )


def same_rows(a: Container, b: Container) -> bool:
    """Whether both containers have the same number of rows, with the same number of slots in each.

    Example:
        >>> same_rows(Rows([2, 2], torch.Size([2])), Dense(torch.Size([2]), 2, torch.device("cpu")))
        True
    """
    return a is b or a.row_sizes == b.row_sizes


def split_rows(slots: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Split ``slots [M, *F]`` into ``S`` rows ``[T_i, *F]``."""
    # Without views of one tensor that autograd must track, the split takes two thirds of the time.
    split = torch.split_with_sizes if slots.requires_grad else torch.unsafe_split_with_sizes
    return list(split(slots, sizes))
