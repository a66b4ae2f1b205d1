"""Variable-length data: the containers that hold it, and ``Ragged``, the flat form for computations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import check_choice, from_zero, send, to_host
from torchrl_llm_kl._private import jagged_bounds, nested_sizes


class Container(ABC):
    """A form of variable-length data with ``S`` rows of slots. :meth:`build` rebuilds it from flat slots.

    ``batch_shape`` is the shape of the batch. Its product is ``S``.

    Example:
        >>> container = Dense(torch.Size([2]), 3, torch.device("cpu"))
        >>> container.row_sizes, container.build(torch.arange(6)).tolist()
        ([3, 3], [[0, 1, 2], [3, 4, 5]])
    """

    batch_shape: torch.Size
    #: Number of slots of each row, including padding and gaps. A list, since lists compare faster than small tensors.
    row_sizes: list[int]
    device: torch.device | None

    @cached_property
    def row_lengths(self) -> Tensor:
        """``row_sizes`` as a tensor, ``[S]``, int64."""
        if not self.row_sizes:
            return torch.zeros(0, dtype=torch.long, device=self.device)
        # Measured: 6 times as fast as torch.tensor().
        return torch.frombuffer(array("q", self.row_sizes), dtype=torch.long).to(self.device)

    @abstractmethod
    def build(self, slots: Tensor) -> Tensor | list[Tensor]:
        """Build this form from ``slots [M, *F]``."""


@dataclass(frozen=True, eq=False)
class Dense(Container):
    """A tensor ``[*B, T, *F]``. Every row has ``T`` slots, and some may be padding."""

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
    """Separate rows ``[T_i, *F]`` in row-major order, from a Python list or the leaves of a lazy stack.

    ``row_sizes`` holds the number of slots of each row. :attr:`row_lengths` is on ``device``.
    """

    row_sizes: list[int]
    batch_shape: torch.Size
    device: torch.device | None = None

    def build(self, slots: Tensor) -> list[Tensor]:
        return split_rows(slots, self.row_sizes)


@dataclass(frozen=True, eq=False)
class Strided(Container):
    """A nested tensor ``[S, (T_i), *F]`` of strided layout. ``row_sizes`` holds the number of slots of each row."""

    row_sizes: list[int]
    device: torch.device | None = None

    @property
    def batch_shape(self) -> torch.Size:  # type: ignore[override]  # as read-only as the field of a frozen dataclass
        return torch.Size([len(self.row_sizes)])

    def build(self, slots: Tensor) -> Tensor:
        return torch.nested.as_nested_tensor(split_rows(slots, self.row_sizes), layout=torch.strided)


@dataclass(frozen=True, eq=False)
class Jagged(Container):
    """A nested tensor of jagged layout. If it has ``lengths`` as well as ``offsets``, its buffer has gaps.

    torch combines two jagged tensors only if they share the *object* ``offsets``, or the object ``lengths`` if there are gaps.
    Both objects are therefore stored. The slots of a row include the gaps around it, so the rows cover the whole buffer.
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
    # Measured: the unsafe split takes two thirds of the time, since autograd does not track views of one tensor.
    split = torch.split_with_sizes if slots.requires_grad else torch.unsafe_split_with_sizes
    return list(split(slots, sizes))


# ------------------------------------------------------------------ sequences


#: The side of a sequence that is padded.
PaddingSide = Literal["left", "right"]


class Ragged:
    """``S`` concatenated sequences of different lengths. Immutable.

    Computations use :attr:`values`, without a Python loop over sequences. A ``Ragged`` remembers the container that it was
    read from. :meth:`restore` returns padded data as padded and nested data as nested, with ``fill`` in every slot without a
    value.

    Args:
        values: all elements, ``[N, *F]`` with ``N = lengths.sum()``.
        lengths: elements per sequence, ``[S]``, int64, 0 allowed. None if every slot of the container holds a value.
        container: the original form of the data.
        keep: a mask of the slots that hold values, ``[M]`` bool. None if all slots do.

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
        self.values, self.container, self.keep = values, container, keep
        # A cache of indices that all results of `like` share. It also holds copies of the lengths and the mask on the host.
        self._index: dict[str, Tensor] = {} if lengths is None else {"lengths": lengths}
        if isinstance(container, Jagged) and container.lengths is None and keep is None:
            # Keep the same object. torch can then combine new jagged tensors with the source.
            self._index |= {"offsets": container.offsets.long()} if container.offsets.device == values.device else {}
        self._host: Ragged | None = None

    # ------------------------------------------------------------------ reading

    @classmethod
    def from_list(cls, rows: Sequence[Tensor], batch_shape: torch.Size | None = None) -> Ragged:
        """Read rows ``[T_i, *F]`` in row-major order of ``batch_shape``, by default one batch dimension."""
        shape = torch.Size([len(rows)]) if batch_shape is None else torch.Size(batch_shape)
        values = torch.cat(list(rows))
        if len(dtypes := {row.dtype for row in rows}) > 1:  # torch.cat would promote them, such as ids to floats
            raise ValueError(f"expected rows of one dtype, got {', '.join(map(str, dtypes))}: convert them first.")
        counts = [row.numel() for row in rows] if values.ndim == 1 else [row.shape[0] for row in rows]
        return cls(values, None, Rows(counts, shape, values.device))

    @classmethod
    def from_padded(cls, values: Tensor, *, mask: Tensor | None = None, batch_dims: int = 1) -> Ragged:
        """Read ``[*B, T, *F]``, with a boolean ``mask [*B, T]`` if there is padding.

        The mask may have padding on both sides, such as a left-padded prompt followed by a right-padded response.
        """
        batch, width = values.shape[:batch_dims], values.shape[batch_dims]
        if mask is not None and mask.shape != (*batch, width):
            raise ValueError(f"the mask must have the shape {(*batch, width)} of the values, got {tuple(mask.shape)}.")
        slots = values.reshape(batch.numel() * width, *values.shape[batch_dims + 1 :])
        return cls.from_slots(slots, Dense(batch, width, values.device), None if mask is None else mask.reshape(-1))

    @classmethod
    def from_nested(cls, values: Tensor) -> Ragged:
        """Read a nested tensor ``[S, (T_i), *F]`` of strided or jagged layout. A jagged tensor may have gaps."""
        if values.layout == torch.strided:
            sizes = nested_sizes(values)  # [S, ndim - 1], on the CPU
            if bool((sizes[:, 1:] != sizes[:1, 1:]).any()):
                raise ValueError(f"Only the first dimension of the rows may vary, got row shapes {sizes.tolist()}.")
            slots = values.contiguous().values().reshape(int(sizes[:, 0].sum()), *sizes[0, 1:].tolist())
            return cls(slots, None, Strided(sizes[:, 0].tolist(), values.device))
        dim = next(i for i, size in enumerate(values.shape) if not isinstance(size, int))
        if dim != 1:
            raise ValueError(f"The ragged dimension must be dimension 1, found dimension {dim}: transpose it back.")
        # torch does not annotate the methods of the jagged subclass.
        offsets: Tensor = values.offsets()  # type: ignore[attr-defined]
        lengths: Tensor | None = values.lengths()  # type: ignore[attr-defined]
        buffer = values.values()
        container = Jagged(offsets, lengths, buffer.shape[0], *jagged_bounds(values))
        if lengths is None:
            return cls(buffer, offsets.diff().long(), container)
        starts, ends = offsets[:-1], offsets[:-1] + lengths
        # 1 where a row begins and -1 after its end. The cumulative sum is positive inside rows.
        rows_open = torch.zeros(buffer.shape[0] + 1, dtype=torch.long, device=buffer.device)
        one = torch.ones_like(starts, dtype=torch.long)
        rows_open = rows_open.index_add(0, starts, one).index_add(0, ends, -one)
        keep = rows_open.cumsum(0)[:-1] > 0
        return cls(buffer[keep], lengths.long(), container, keep)

    @classmethod
    def from_slots(cls, slots: Tensor, container: Container, keep: Tensor | None) -> Ragged:
        """Read the slots ``[M, *F]`` of a container. ``keep [M]`` is True where a slot holds a value. None: all do."""
        if keep is None:
            return cls(slots, None, container)
        keep = keep.to(torch.bool)
        # The mask is read from the device only here. Lengths and indices are computed from this copy.
        (on_host,), device = to_host(keep), slots.device
        if bool(on_host.all()):  # the common case of rollouts without padding
            return cls(slots, None, container)
        # The number of values before each slot. Differences between the ends of rows are the lengths.
        kept_before = from_zero(on_host.cumsum(0))
        edges = torch.tensor(container.row_sizes) if device.type != "cpu" else container.row_lengths
        lengths = kept_before[from_zero(edges.cumsum(0))].diff()
        if device.type == "cpu":
            return cls(slots[keep], lengths, container, keep)
        index = send(on_host.nonzero().squeeze(-1), device)
        keep = keep if keep.device == device else send(keep, device)
        sequences = cls(slots.index_select(0, index), send(lengths, device), container, keep)
        sequences._index |= {"host_lengths": lengths, "host_keep": on_host, "slots": index}
        return sequences

    @classmethod
    def on_device_of(cls, host: Ragged, slots: Tensor, container: Container) -> Ragged:
        """Build the accelerator version of ``host``.

        ``slots [M, *F]`` holds the same values on the accelerator. ``host`` is the CPU version, and is kept with the result.
        """
        sequences = cls.from_slots(slots, container, host.keep)
        sequences._host = host
        return sequences

    # ------------------------------------------------------------------ indices and arithmetic

    @property
    def num_sequences(self) -> int:
        """The number of sequences ``S``."""
        return self.container.batch_shape.numel()

    def _cached(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        if name not in self._index:
            self._index[name] = compute()
        return self._index[name]

    @property
    def lengths(self) -> Tensor:
        """Elements per sequence, ``[S]``, int64."""
        return self._cached("lengths", lambda: self.container.row_lengths)

    @property
    def sizes(self) -> list[int]:
        """:attr:`lengths` as Python numbers."""
        if self.keep is None and "lengths" not in self._index:
            return self.container.row_sizes
        return self._cached("host_lengths", lambda: to_host(self.lengths)[0]).tolist()

    @property
    def host_keep(self) -> Tensor | None:
        """A mask of the slots that hold values, on the CPU. None if all slots do."""
        keep = self.keep
        return None if keep is None else self._cached("host_keep", lambda: to_host(keep)[0])

    @property
    def host(self) -> Ragged:
        """These sequences on the CPU. They are copied once."""
        return self.to_host()[0]

    @property
    def outline(self) -> Ragged:
        """Sequences of the same lengths on the CPU. Their values are meaningless unless they are on the CPU already."""
        if self.values.device.type == "cpu" or self._host is not None:
            return self.host
        lengths = torch.tensor(self.sizes, dtype=torch.long)
        # An expanded scalar takes no memory for the values.
        return Ragged(torch.zeros(()).expand(self.values.shape[0]), lengths, self.container)

    def to_host(self, *others: Tensor) -> tuple[Any, ...]:
        """Return :attr:`host`, then other tensors on the CPU. Everything that is not there yet is copied at once."""
        if self.values.device.type == "cpu" or self._host is not None:
            return (self if self._host is None else self._host, *to_host(*others))
        known = {name: self._index.get(f"host_{name}") for name in ("lengths", "keep")}
        # The sizes of a jagged container are on its device, so reading them would be another copy.
        if known["lengths"] is None and self.keep is None and not isinstance(self.container, Jagged):
            known["lengths"] = torch.tensor(self.container.row_sizes, dtype=torch.long)
        wanted = {"lengths": self.lengths, "keep": self.keep}
        missing = {name: x for name, x in wanted.items() if x is not None and known[name] is None}
        values, *rest = to_host(self.values, *missing.values(), *others)
        known |= dict(zip(missing, rest, strict=False))
        self._index |= {f"host_{name}": x for name, x in known.items() if x is not None}
        self._host = Ragged(values, known["lengths"], self.container, known["keep"])
        return (self._host, *rest[len(missing) :])

    @property
    def offsets(self) -> Tensor:
        """The start of each sequence, then ``N``, ``[S + 1]``."""
        return self._cached("offsets", lambda: from_zero(self.lengths.cumsum(0)))

    @property
    def sequence_ids(self) -> Tensor:
        """The sequence of each element, ``[N]``."""
        host, device = self._host, self.values.device
        if host is not None and device.type != "cpu":  # a copy takes no kernels, and the host needs the ids anyway
            return self._cached("sequence_ids", lambda: send(host.sequence_ids, device))
        return self._cached("sequence_ids", lambda: _segment_ids(self.lengths, self.values.shape[0]))

    @property
    def positions(self) -> Tensor:
        """The position of each element in its sequence, from 0, ``[N]``."""
        count, device = self.values.shape[0], self.lengths.device
        return self._cached("positions", lambda: torch.arange(count, device=device) - self.offsets[self.sequence_ids])

    def first(self, counts: Tensor) -> Tensor:
        """A mask of the first ``counts [S]`` elements of each sequence, ``[N]`` bool. No count may exceed the length."""
        # Runs of True and False in turn. With output_size, repeat_interleave needs no host sync.
        runs = torch.stack([counts, self.lengths - counts], 1).flatten()
        alternating = torch.arange(runs.numel(), device=runs.device) % 2 == 0
        return torch.repeat_interleave(alternating, runs, output_size=self.values.shape[0])

    def first_true(self, mask: Tensor) -> Tensor:
        """The position of the first True of ``mask [N]`` in each sequence, or the sequence's length, ``[S]``."""
        at = torch.where(mask, self.positions, self.lengths[self.sequence_ids])
        return self.lengths.scatter_reduce(0, self.sequence_ids, at, "amin")

    def like(self, values: Tensor) -> Ragged:
        """These sequences with new values ``[N, *G]``. torch can combine the jagged tensors of the old and the new values."""
        if values.shape[0] != self.values.shape[0]:
            raise ValueError(f"expected {self.values.shape[0]} values, one for each element, got {values.shape[0]}.")
        other = object.__new__(type(self))
        vars(other).update(vars(self), values=values, _host=None)  # it shares the cached indices
        return other

    def sum(self) -> Tensor:
        """Sum of each sequence, in the dtype that ``torch.sum`` returns, ``[S, *F]``."""
        return segment_sum(self.values, self.lengths)

    # ------------------------------------------------------------------ writing

    def at_slots(self, slots: Tensor) -> Tensor:
        """Select the entries of ``slots [M, *G]`` that belong to values, ``[N, *G]``."""
        return slots if self.keep is None else slots[self._kept_slots(self.keep, slots.device)]

    def _kept_slots(self, keep: Tensor, device: torch.device) -> Tensor:
        """The slots that hold values: their numbers if ``device`` has them, else a mask, whose use is a host sync."""
        index = self._index.get("slots")
        return index if index is not None and index.device == device else keep

    def slots(self, fill: float = 0) -> Tensor:
        """All slots of the container, with ``fill`` where there is no value, ``[M, *F]``."""
        if self.keep is None:
            return self.values
        out = self.values.new_full((*self.keep.shape, *self.values.shape[1:]), fill)
        return out.index_put_((self._kept_slots(self.keep, self.values.device),), self.values)

    def restore(self, fill: float = 0) -> Tensor | list[Tensor]:
        """The data in its original form, with ``fill`` at padding."""
        return self.container.build(self.slots(fill))

    def to_list(self) -> list[Tensor]:
        """One tensor ``[T_i, *F]`` for each sequence."""
        return split_rows(self.values, self.sizes)

    def to_nested(self, layout: torch.layout = torch.strided) -> Tensor:
        """A nested tensor ``[S, (T_i), *F]``."""
        if layout == torch.jagged:
            return torch.nested.nested_tensor_from_jagged(self.values, offsets=self.offsets)
        return Strided(self.sizes).build(self.values)

    def to_padded(self, *, side: PaddingSide = "right", value: float = 0) -> Tensor:
        """A dense tensor ``[S, T_max, *F]``, padded with ``value``. :meth:`padding_mask` marks the elements."""
        check_padding_side(side)
        width, column = max(self.sizes, default=0), self.positions
        if side == "left":
            column = column + (width - self.lengths)[self.sequence_ids]
        out = self.values.new_full((self.num_sequences, width, *self.values.shape[1:]), value)
        return out.index_put_((self.sequence_ids, column), self.values)

    def padding_mask(self, *, side: PaddingSide = "right") -> Tensor:
        """True where :meth:`to_padded` holds an element, ``[S, T_max]`` bool."""
        check_padding_side(side)
        width = max(self.sizes, default=0)
        position, lengths = torch.arange(width, device=self.lengths.device), self.lengths.unsqueeze(-1)
        return position < lengths if side == "right" else position >= width - lengths


def check_padding_side(side: str) -> PaddingSide:
    """Return ``side``. Raises a ValueError unless it is ``"left"`` or ``"right"``.

    Example:
        >>> check_padding_side("left")
        'left'
    """
    check_choice(get_args(PaddingSide), padding_side=side)
    return cast(PaddingSide, side)


def segment_sum(values: Tensor, lengths: Tensor) -> Tensor:
    """Sum ``values [N, *F]`` over consecutive segments of ``lengths [S]``. The result ``[S, *F]`` is 0 for an empty segment.

    As in ``torch.sum``, half-precision values are added in float32 and rounded once. Integers and booleans are added in int64.

    Example:
        >>> segment_sum(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2, 0, 1]))
        tensor([3., 0., 3.])
    """
    if values.dtype in (torch.bfloat16, torch.float16):
        return segment_sum(values.float(), lengths).to(values.dtype)
    ids = _segment_ids(lengths, values.shape[0])
    if not (values.is_floating_point() or values.is_complex()):  # index_add would overflow narrow integers
        values = values.long()
    return values.new_zeros((lengths.numel(), *values.shape[1:])).index_add(0, ids, values)


def _segment_ids(lengths: Tensor, total: int) -> Tensor:
    return torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths, output_size=total)
