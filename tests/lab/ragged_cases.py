"""Sources of every form with NaN in the padding, and their contents as read by plain Python loops."""

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from hypothesis import strategies as st

from torchrl_llm_kl.ragged import Ragged

FEATURES = [(), (1,), (3,), (2, 2)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.bool]
BATCHES = [(), (1,), (3,), (2, 2), (2, 1, 2), (0,), (2, 0)]


def elements(
    n: int, features: tuple[int, ...] = (), dtype: torch.dtype = torch.float32, start: int = 1
) -> torch.Tensor:
    """``n`` distinct elements (as far as the dtype allows): a value in a wrong slot is visible."""
    flat = torch.arange(start, start + n * math.prod(features)).reshape(n, *features)
    return (flat % 2 == 1) if dtype == torch.bool else flat.to(dtype)


def plain(data: Any) -> list:
    """Any form as Python lists; a jagged tensor as its whole buffer, gaps included."""
    if isinstance(data, list):
        return [plain(row) for row in data]
    if data.is_nested:
        return data.values().tolist() if data.layout == torch.jagged else [row.tolist() for row in data.unbind()]
    return data.tolist()


def jagged(buffer: torch.Tensor, offsets: list[int], lengths: list[int] | None = None) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(
        buffer, torch.tensor(offsets), None if lengths is None else torch.tensor(lengths, dtype=torch.int64)
    )


@dataclass
class Case:
    """One source and its expected contents."""

    kind: str
    slots: torch.Tensor  # [M, *F]: the contents of each slot of the source
    table: list[list[bool]]  # per sequence: whether each slot holds a value
    source: Any
    batch: tuple[int, ...]
    options: dict[str, Any]
    head: int = 0  # slots before the first sequence; `tail`: after the last
    tail: int = 0

    def read(self) -> Ragged:
        if self.kind.startswith("padded"):
            return Ragged.from_padded(self.source, **self.options)
        if self.kind == "list":
            return Ragged.from_list(self.source, **self.options)
        return Ragged.from_nested(self.source)

    @property
    def rows(self) -> list[list]:
        """The values of each sequence."""
        slot = iter(self.slots[self.head :].tolist())
        with_slots = [[(keep, next(slot)) for keep in row] for row in self.table]
        return [[value for keep, value in row if keep] for row in with_slots]

    def rebuilt(self, values: list, fill: Any) -> list:
        """The source's form with ``values`` in place of what it holds and ``fill`` in the other slots."""
        value = iter(values)
        rows = [[next(value) if keep else fill for keep in row] for row in self.table]
        if self.kind.startswith("jagged"):
            return [fill] * self.head + [slot for row in rows for slot in row] + [fill] * self.tail
        if not self.kind.startswith("padded"):
            return rows
        return nest(rows, self.batch)


def nest(rows: list, batch: tuple[int, ...]) -> list:
    """``rows`` in row-major order as nested lists of the shape ``batch``."""
    if not batch:
        return rows[0]
    size = math.prod(batch[1:])
    return [nest(rows[i * size : (i + 1) * size], batch[1:]) for i in range(batch[0])]


def make(kind, table, batch=None, features=(), dtype=torch.float32, side="right", head=0, tail=0, leaf=False) -> Case:
    """A source of the given kind, with NaN (if the dtype has one) in every slot without a value.

    ``leaf``: the slots require gradient, and the source is built of them.
    """
    batch = (len(table),) if batch is None else batch
    real = [False] * head + [keep for row in table for keep in row] + [False] * tail
    slots = elements(len(real), features, dtype)
    if dtype.is_floating_point:
        slots[~torch.tensor(real, dtype=torch.bool)] = math.nan
    slots.requires_grad_(leaf)
    spans, options = [len(row) for row in table], {}
    if kind.startswith("padded"):
        width = spans[0] if spans else 2
        source = slots.reshape(*batch, width, *features)
        options["batch_dims"] = len(batch)
        if kind == "padded-mask":
            options["mask"] = torch.tensor(real, dtype=torch.bool).reshape(*batch, width)
        elif kind == "padded-lengths":
            options |= {"lengths": torch.tensor([sum(row) for row in table]).long().reshape(batch), "side": side}
    elif kind == "list":
        source = list(slots.split(spans))
        options["batch_shape"] = torch.Size(batch)
    elif kind == "strided":
        source = torch.nested.as_nested_tensor(list(slots.split(spans)), layout=torch.strided)
    elif kind == "jagged":
        source = jagged(slots, list(accumulate(spans, initial=0)))
    else:
        offsets = list(accumulate(spans, initial=head))
        source = jagged(slots, offsets, [sum(row) for row in table])
    return Case(kind, slots, table, source, batch, options, head, tail)


KINDS = ["padded", "padded-mask", "padded-lengths", "strided", "jagged", "jagged-gaps", "list"]


@st.composite
def cases(draw, kinds=tuple(KINDS), dtypes=tuple(DTYPES)) -> Case:
    kind = draw(st.sampled_from(kinds))
    features, dtype = draw(st.sampled_from(FEATURES)), draw(st.sampled_from(dtypes))
    side = draw(st.sampled_from(["left", "right"]))
    batch = draw(st.sampled_from(BATCHES))
    if not kind.startswith(("padded", "list")):
        batch = draw(st.sampled_from([(1,), (2,), (4,)]))
    if kind == "list" and math.prod(batch) == 0:
        batch = (2,)
    size, width = math.prod(batch), draw(st.integers(0, 4))
    lengths = draw(st.lists(st.integers(0, width), min_size=size, max_size=size))
    head = tail = 0
    if kind == "padded":
        table = [[True] * width for _ in lengths]
    elif kind == "padded-mask":
        table = [draw(st.lists(st.booleans(), min_size=width, max_size=width)) for _ in lengths]
    elif kind == "padded-lengths":
        table = [[True] * n + [False] * (width - n) for n in lengths]
        table = [row[::-1] for row in table] if side == "left" else table
    elif kind == "jagged-gaps":
        table = [[True] * n + [False] * draw(st.integers(0, 2)) for n in lengths]
        head, tail = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    else:
        table = [[True] * n for n in lengths]
    return make(kind, table, batch, features, dtype, side, head, tail)
