"""The one internal form of variable-length data: flat values and lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from torchrl_llm_kl.ragged._containers import Container, Dense, Jagged, Rows, Strided, split_rows

__all__ = ["PaddingSide", "Ragged", "check_padding_side", "segment_sum"]

PaddingSide = Literal["left", "right"]


class Ragged:
    """``S`` sequences of different lengths, laid end to end.

    Maths runs on :attr:`values`; a Python loop over sequences is never needed. A ``Ragged`` remembers the form that it
    came from, so that :meth:`restore` puts new values where the old ones were: padded data comes back padded, nested
    data nested, with ``fill`` at every slot that held no value. Nothing in it is changed once it is made.

    Args:
        values: all elements; ``[N, *F]`` with ``N = lengths.sum()``.
        lengths: elements per sequence; ``[S]``, int64, 0 allowed; None if every slot of the container holds a value.
        container: the form that the data came from.
        keep: which slots of the container hold values; ``[M]`` bool, None for all of them.

    Example:
        >>> x = Ragged.from_list([torch.tensor([1, 2, 3]), torch.tensor([4])])
        >>> x.values.tolist(), x.lengths.tolist()
        ([1, 2, 3, 4], [3, 1])
        >>> x.to_padded(side="left").tolist()
        [[1, 2, 3], [0, 0, 4]]
    """

    def __init__(
        self, values: Tensor, lengths: Tensor | None, container: Container, keep: Tensor | None = None
    ) -> None:
        if lengths is not None and (lengths.ndim != 1 or lengths.dtype != torch.long):
            raise ValueError(f"lengths must be a 1-d int64 tensor, got {tuple(lengths.shape)} of dtype {lengths.dtype}")
        # Where the lengths are on an accelerator the check would wait for it.
        if lengths is None or lengths.device.type == "cpu":
            total = sum(container.row_sizes) if lengths is None else int(lengths.sum())
            if total != values.shape[0]:
                raise ValueError(
                    f"the lengths must add up to the number of values: found {total}, expected {values.shape[0]}"
                )
        self.values = values
        self.container = container
        self.keep = keep
        self._index: dict[str, Tensor] = {} if lengths is None else {"lengths": lengths}  # shared with every `like`

    # ------------------------------------------------------------------ into the flat form

    @classmethod
    def from_list(cls, rows: Sequence[Tensor], batch_shape: torch.Size | None = None) -> Ragged:
        """From rows ``[T_i, *F]`` in row-major order of ``batch_shape`` (by default one batch dimension)."""
        if len(rows) == 0:
            raise ValueError("expected at least one row, got an empty list: an empty batch has nothing to score")
        shape = torch.Size([len(rows)]) if batch_shape is None else torch.Size(batch_shape)
        try:
            values = torch.cat(list(rows))
        except RuntimeError:
            _check_rows(rows)
            raise
        counts = [row.numel() for row in rows] if values.ndim == 1 else [row.shape[0] for row in rows]
        # torch joins rows of several dtypes, and skips an empty row whatever its features.
        if len({row.dtype for row in rows}) > 1 or 0 in counts:
            _check_rows(rows)
        if shape.numel() != len(rows):
            raise ValueError(f"a batch of shape {tuple(shape)} has {shape.numel()} rows, found {len(rows)}")
        return cls(values, None, Rows(counts, shape, values.device))

    @classmethod
    def from_padded(
        cls,
        values: Tensor,
        *,
        mask: Tensor | None = None,
        lengths: Tensor | None = None,
        side: PaddingSide = "right",
        batch_dims: int = 1,
    ) -> Ragged:
        """From ``[*B, T, *F]`` with a boolean ``mask [*B, T]``, or ``lengths [*B]`` and the padding side, or neither.

        The mask may have padding on both sides, as a left-padded prompt followed by a right-padded response has.
        """
        if values.is_nested:
            raise TypeError("expected a dense tensor, found a nested one: use from_nested")
        if not 0 <= batch_dims < values.ndim:
            raise ValueError(
                f"batch_dims must lie in [0, {values.ndim - 1}] for values [*B, T, *F] of shape {tuple(values.shape)}, "
                f"found {batch_dims}"
            )
        check_padding_side(side)
        batch, width = values.shape[:batch_dims], values.shape[batch_dims]
        container = Dense(batch, width, values.device)
        slots = values.reshape(batch.numel() * width, *values.shape[batch_dims + 1 :])
        if mask is not None and lengths is not None:
            raise ValueError("got both mask and lengths: pass one of them")
        if lengths is not None:
            if lengths.shape != batch:
                raise ValueError(
                    f"lengths must have the batch shape {tuple(batch)} of the values, got {tuple(lengths.shape)}"
                )
            if lengths.dtype == torch.bool or lengths.is_floating_point():
                raise ValueError(f"lengths must be of an integer dtype, found {lengths.dtype}")
            if bool((lengths > width).any() | (lengths < 0).any()):
                raise ValueError(f"lengths must lie in [0, {width}] (the width of the values), got {lengths.tolist()}")
            position = torch.arange(width, device=values.device)
            limit = lengths.unsqueeze(-1)
            mask = position < limit if side == "right" else position >= width - limit
        if mask is not None and mask.shape != values.shape[: batch_dims + 1]:
            raise ValueError(f"the mask must have the shape {(*batch, width)} of the values, got {tuple(mask.shape)}")
        return cls.from_slots(slots, container, None if mask is None else mask.reshape(-1))

    @classmethod
    def from_nested(cls, values: Tensor) -> Ragged:
        """From a nested tensor ``[S, (T_i), *F]`` of strided or jagged layout, also a jagged one with gaps."""
        if not values.is_nested:
            raise TypeError(f"expected a nested tensor, got a dense one of shape {tuple(values.shape)}")
        if values.layout == torch.strided:
            sizes = values._nested_tensor_size()  # [S, ndim - 1], on the CPU
            if sizes.ndim != 2 or sizes.numel() == 0:
                raise ValueError(
                    "expected a nested tensor [S, (T_i), *F] of at least one row, "
                    f"found one of {values.size(0)} rows and {values.ndim} dimensions"
                )
            if bool((sizes[:, 1:] != sizes[:1, 1:]).any()):
                raise ValueError(f"only the first dimension of each row may vary, got row shapes {sizes.tolist()}")
            slots = values.contiguous().values().reshape(int(sizes[:, 0].sum()), *sizes[0, 1:].tolist())
            return cls(slots, None, Strided(sizes[:, 0].tolist(), values.device))
        if (ragged_dim := getattr(values, "_ragged_idx", 1)) != 1:
            raise ValueError(
                f"the ragged dimension of a jagged tensor must be dimension 1, found dimension {ragged_dim}: "
                "transpose it back first"
            )
        jagged: Any = values  # torch annotates no method of the jagged subclass
        offsets, lengths, buffer = jagged.offsets(), jagged.lengths(), jagged.values()
        container = Jagged(
            offsets,
            lengths,
            buffer.shape[0],
            getattr(values, "_maybe_min_seqlen", None),
            getattr(values, "_maybe_max_seqlen", None),
        )
        if lengths is None:
            return cls(buffer, offsets.diff().long(), container)
        starts, ends = offsets[:-1], offsets[:-1] + lengths
        if bool((ends > offsets[1:]).any() | (lengths < 0).any()):
            raise ValueError(
                f"the lengths of a jagged tensor with gaps must lie between 0 and {offsets.diff().tolist()} "
                f"(the differences of its offsets), found {lengths.tolist()}"
            )
        rows_open = torch.zeros(buffer.shape[0] + 1, dtype=torch.long, device=buffer.device)
        one = torch.ones_like(starts, dtype=torch.long)
        rows_open = rows_open.index_add(0, starts, one).index_add(0, ends, -one)
        keep = rows_open.cumsum(0)[:-1] > 0
        return cls(buffer[keep], lengths.long(), container, keep)

    @classmethod
    def from_slots(cls, slots: Tensor, container: Container, keep: Tensor | None) -> Ragged:
        """From every slot of a container, of which ``keep`` hold values."""
        if keep is None:
            return cls(slots, None, container)
        keep = keep.to(torch.bool)
        if keep.shape[0] != slots.shape[0]:
            raise ValueError(f"the mask has {keep.shape[0]} positions but the values have {slots.shape[0]}")
        if bool(keep.all()):  # as in rollouts without padding: nothing needs to be picked
            return cls(slots, None, container)
        kept_before = _from_zero(keep.cumsum(0))
        return cls(slots[keep], kept_before[_from_zero(container.row_lengths.cumsum(0))].diff(), container, keep)

    # ------------------------------------------------------------------ arithmetic helpers

    @property
    def num_sequences(self) -> int:
        """``S``."""
        return self.container.batch_shape.numel()

    def _computed_once(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        if name not in self._index:
            self._index[name] = compute()
        return self._index[name]

    @property
    def lengths(self) -> Tensor:
        """Elements per sequence; ``[S]``, int64."""
        return self._computed_once("lengths", lambda: self.container.row_lengths)

    @property
    def offsets(self) -> Tensor:
        """Where each sequence starts, and at the end ``N``; ``[S + 1]``."""
        source = self.container
        if isinstance(source, Jagged) and source.lengths is None and self.keep is None:
            # The object itself: jagged tensors over it can be added to the source.
            return self._computed_once("offsets", source.offsets.long)
        return self._computed_once("offsets", lambda: _from_zero(self.lengths.cumsum(0)))

    @property
    def sequence_ids(self) -> Tensor:
        """The sequence of each element; ``[N]``."""
        return self._computed_once("sequence_ids", lambda: _segment_ids(self.lengths, self.values.shape[0]))

    @property
    def positions(self) -> Tensor:
        """The position of each element in its sequence, from 0; ``[N]``."""
        return self._computed_once("positions", self._positions)

    def _positions(self) -> Tensor:
        element = torch.arange(self.values.shape[0], device=self.lengths.device)
        return element - self.offsets[self.sequence_ids]

    def first(self, counts: Tensor) -> Tensor:
        """True at the first ``counts [S]`` elements of each sequence, which must not be more than it has; ``[N]``."""
        runs = torch.stack([counts, self.lengths - counts], 1).flatten()
        alternating = torch.arange(runs.numel(), device=runs.device) % 2 == 0
        return torch.repeat_interleave(alternating, runs, output_size=self.values.shape[0])

    def like(self, values: Tensor) -> Ragged:
        """The same sequences with other values ``[N, *G]``; the jagged forms of both can meet in one operation."""
        if values.shape[0] != self.values.shape[0]:
            raise ValueError(f"expected {self.values.shape[0]} values, one for each element, got {values.shape[0]}")
        other = copy(self)
        other.values = values
        return other

    def sum(self) -> Tensor:
        """The sum of each sequence, in the dtype that ``torch.sum`` returns; ``[S, *F]``."""
        return segment_sum(self.values, self.lengths)

    # ------------------------------------------------------------------ out of the flat form

    def slots(self, fill: float = 0) -> Tensor:
        """Values at every slot of the container, ``fill`` where there is none; ``[M, *F]``."""
        if self.keep is None:
            return self.values
        out = _full(self.values, self.keep.shape, fill)
        return out.index_put((self.keep,), self.values)

    def restore(self, fill: float = 0) -> Tensor | list[Tensor]:
        """Back into the form that the data came from, ``fill`` at padding."""
        return self.container.build(self.slots(fill))

    def to_list(self) -> list[Tensor]:
        """One tensor ``[T_i, *F]`` for each sequence."""
        return split_rows(self.values, self.lengths.tolist())

    def to_nested(self, layout: torch.layout = torch.strided) -> Tensor:
        """A nested tensor ``[S, (T_i), *F]``."""
        if layout == torch.jagged:
            return torch.nested.nested_tensor_from_jagged(self.values, offsets=self.offsets)
        if layout != torch.strided:
            raise ValueError(f"the layout must be torch.strided or torch.jagged, found {layout}")
        return Strided(self.lengths).build(self.values)

    def to_padded(self, *, side: PaddingSide = "right", value: float = 0) -> Tensor:
        """A dense tensor ``[S, T_max, *F]``; see :meth:`padding_mask` for what is real in it."""
        mask = self.padding_mask(side=side)
        out = _full(self.values, mask.shape, value)
        return out.index_put((mask,), self.values)

    def padding_mask(self, *, side: PaddingSide = "right") -> Tensor:
        """True where :meth:`to_padded` holds an element; ``[S, T_max]`` bool."""
        check_padding_side(side)
        width = int(self.lengths.max()) if self.num_sequences else 0
        position = torch.arange(width, device=self.lengths.device)
        limit = self.lengths.unsqueeze(-1)
        return position < limit if side == "right" else position >= width - limit


def segment_sum(values: Tensor, lengths: Tensor) -> Tensor:
    """Sum ``values [N, *F]`` over consecutive segments of ``lengths [S]``; ``[S, *F]``, 0 for an empty segment.

    Like ``torch.sum``: half-precision values are added in float32 and rounded once; integers and booleans give int64.
    """
    if values.dtype in (torch.bfloat16, torch.float16):
        return segment_sum(values.float(), lengths).to(values.dtype)
    ids = _segment_ids(lengths, values.shape[0])
    if not (values.is_floating_point() or values.is_complex()):
        values = values.long()
    return values.new_zeros((lengths.numel(), *values.shape[1:])).index_add(0, ids, values)


def _segment_ids(lengths: Tensor, total: int) -> Tensor:
    """The segment of each of ``total`` elements."""
    return torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths, output_size=total)


def _from_zero(sums: Tensor) -> Tensor:
    """Cumulative sums with the 0 before them; ``[S + 1]``."""
    return torch.nn.functional.pad(sums, (1, 0))


def _check_rows(rows: Sequence[Tensor]) -> None:
    """Refuse the first row that does not fit to row 0."""
    first = rows[0]
    for i, row in enumerate(rows):
        if row.ndim == 0:
            raise ValueError(f"each row must be a tensor [T_i, *F], found a scalar at row {i}")
        if row.shape[1:] != first.shape[1:] or row.dtype != first.dtype:
            raise ValueError(
                f"rows may differ only in their first dimension: expected [*, {tuple(first.shape[1:])}] of "
                f"{first.dtype} as row 0 has, found {tuple(row.shape)} of {row.dtype} at row {i}"
            )


def _full(values: Tensor, shape: torch.Size, fill: float) -> Tensor:
    """``fill`` in the dtype and feature shape of ``values [N, *F]``; ``[*shape, *F]``."""
    if not (values.is_floating_point() or values.is_complex() or float(fill).is_integer()):
        raise ValueError(f"values of {values.dtype} cannot hold the fill {fill}: expected an integer")
    return values.new_full((*shape, *values.shape[1:]), fill)


def check_padding_side(side: str) -> PaddingSide:
    """Return ``side`` if it is ``"left"`` or ``"right"``, else raise ValueError."""
    if side not in get_args(PaddingSide):
        raise ValueError(f"the padding side must be 'left' or 'right', found {side!r}")
    return cast(PaddingSide, side)
