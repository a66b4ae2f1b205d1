"""Every form of variable-length data, read and rebuilt, against loops over plain Python rows; its gradients and errors."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from torch.testing import assert_close

from refused import refused
from torchrl_llm_kl.ragged import Dense, Jagged, Ragged, Rows, same_rows, segment_sum

# ---------------------------------------------------------------------- sources of every form, read by plain loops
FEATURES = [(), (0,), (1,), (3,), (2, 2)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.bool]
BATCHES = [(), (1,), (3,), (2, 2), (2, 1, 2), (0,), (2, 0)]


def elements(n: int, features: Any = (), dtype: torch.dtype = torch.float32, start: int = 1) -> torch.Tensor:
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

    def read(self, source: Any = None) -> Ragged:
        """The source, or what was restored in its form."""
        source = self.source if source is None else source
        if self.kind.startswith("padded"):
            return Ragged.from_padded(source, **self.options)
        if self.kind == "list":
            return Ragged.from_list(source, **self.options)
        return Ragged.from_nested(source)

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


def make(kind, table, batch=None, features=(), dtype=torch.float32, head=0, tail=0, leaf=False) -> Case:
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


KINDS = ["padded", "padded-mask", "strided", "jagged", "jagged-gaps", "list"]


@st.composite
def cases(draw, kinds=tuple(KINDS), dtypes=tuple(DTYPES)) -> Case:
    kind = draw(st.sampled_from(kinds))
    features, dtype = draw(st.sampled_from(FEATURES)), draw(st.sampled_from(dtypes))
    batch = draw(st.sampled_from(BATCHES))
    if not kind.startswith(("padded", "list")):
        batch = draw(st.sampled_from([(1,), (2,), (4,), *([(0,)] if kind != "strided" else [])]))
    if kind == "list" and math.prod(batch) == 0:
        batch = (2,)
    size, width = math.prod(batch), draw(st.integers(0, 4))
    lengths = draw(st.lists(st.integers(0, width), min_size=size, max_size=size))
    head = tail = 0
    if kind == "padded":
        table = [[True] * width for _ in lengths]
    elif kind == "padded-mask":
        table = [draw(st.lists(st.booleans(), min_size=width, max_size=width)) for _ in lengths]
    elif kind == "jagged-gaps":
        table = [[True] * n + [False] * draw(st.integers(0, 2)) for n in lengths]
        head, tail = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    else:
        table = [[True] * n for n in lengths]
    return make(kind, table, batch, features, dtype, head, tail)


pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
quick = settings(max_examples=100, deadline=None)


# ---------------------------------------------------------------------- reading
@quick
@example(case=make("padded-mask", [[True] * 3] * 2))
@given(case=cases())
def test_flat_form_and_index_helpers(case):
    x = case.read()
    rows = case.rows
    assert x.values.dtype == case.slots.dtype
    assert x.values.shape[1:] == case.slots.shape[1:]
    assert x.values.tolist() == [value for row in rows for value in row]
    assert x.num_sequences == len(rows)
    assert x.lengths.tolist() == [len(row) for row in rows]
    assert x.container.batch_shape == torch.Size(case.batch)
    assert plain(x.to_list()) == rows
    assert x.positions.tolist() == [t for row in rows for t in range(len(row))]
    assert x.sequence_ids.tolist() == [i for i, row in enumerate(rows) for _ in row]
    assert x.offsets.tolist() == list(accumulate(map(len, rows), initial=0))
    assert {x.positions.dtype, x.sequence_ids.dtype, x.offsets.dtype} == {torch.int64}
    if case.kind == "padded-mask":
        assert (x.keep is None) == all(map(all, case.table)), "a mask that is True everywhere is dropped"
    like = x.like(x.values)
    assert like.offsets is x.offsets
    assert like.sequence_ids is x.sequence_ids
    assert like.positions is x.positions


@quick
@given(case=cases(dtypes=(torch.float64, torch.int64)))
def test_sum(case):
    zero = torch.zeros(case.slots.shape[1:], dtype=case.slots.dtype)
    sums = [sum((torch.tensor(value, dtype=zero.dtype) for value in row), start=zero) for row in case.rows]
    assert_close(case.read().sum(), torch.stack(sums) if sums else zero.new_zeros(0, *zero.shape), rtol=0, atol=0)


# ---------------------------------------------------------------------- restoring the form
@quick
@example(case=make("jagged-gaps", [], (0,), head=2, tail=1), features=(), dtype=torch.float32)
@given(case=cases(), features=st.sampled_from(FEATURES), dtype=st.sampled_from(DTYPES))
def test_restore(case, features, dtype):
    """Every slot without a value has exactly ``fill``. The restored form can be read again."""
    x = case.read()
    new = elements(x.values.shape[0], features, dtype, start=101)
    for values in (x.values, new):
        fill = 0 if values.dtype == torch.bool else -math.inf if values.is_floating_point() else -7
        restored = x.like(values).restore(fill)
        filler = torch.full(values.shape[1:], fill, dtype=values.dtype).tolist()
        assert plain(restored) == case.rebuilt(values.tolist(), filler)
        if isinstance(restored, torch.Tensor):
            assert (restored.dtype, restored.is_nested) == (values.dtype, case.source.is_nested)
            assert restored.layout == case.source.layout
            if restored.layout == torch.jagged:  # torch combines those of the same offsets alone
                assert restored.offsets() is case.source.offsets()
                assert restored.lengths() is case.source.lengths()
            if not restored.is_nested:
                assert restored.shape == (*case.source.shape[: len(case.batch) + 1], *values.shape[1:])
        else:
            assert [row.shape[0] for row in restored] == [row.shape[0] for row in case.source]
            assert restored[0].dtype == values.dtype
        again = case.read(restored)
        assert again.values.tolist() == values.tolist()
        assert again.lengths.tolist() == x.lengths.tolist()


# ---------------------------------------------------------------------- conversion to another form
@quick
@given(case=cases(), side=st.sampled_from(["left", "right"]), layout=st.sampled_from([torch.strided, torch.jagged]))
def test_to_padded_and_to_nested(case, side, layout):
    x, rows, dtype = case.read(), case.rows, case.slots.dtype
    width = max((len(row) for row in rows), default=0)
    fill = int(dtype == torch.bool) or -3
    filler = torch.full(case.slots.shape[1:], fill, dtype=dtype).tolist()
    padded, mask = [], []
    for row in rows:
        pad, real = [filler] * (width - len(row)), [True] * len(row)
        padded.append(pad + row if side == "left" else row + pad)
        mask.append([False] * len(pad) + real if side == "left" else real + [False] * len(pad))
    got, got_mask, nested = x.to_padded(side=side, value=fill), x.padding_mask(side=side), x.to_nested(layout)
    assert (got.tolist(), got_mask.tolist()) == (padded, mask)
    assert (got.shape, got.dtype) == ((len(rows), width, *case.slots.shape[1:]), dtype)
    assert (got_mask.dtype, nested.layout) == (torch.bool, layout)
    if rows:
        assert nested.dtype == dtype
        assert [row.tolist() for row in nested.unbind()] == rows


# ---------------------------------------------------------------------- nested tensors of torch
def test_feature_views():
    a, b = torch.arange(24).reshape(3, 4, 2), torch.arange(16).reshape(2, 4, 2)
    flipped = [a.transpose(1, 2).tolist(), b.transpose(1, 2).tolist()]
    nested = torch.nested.nested_tensor([a, b]).transpose(2, 3)
    assert not nested.is_contiguous()
    x = Ragged.from_nested(nested)
    assert plain(x.to_list()) == plain(x.restore()) == flipped
    nested = torch.nested.nested_tensor([a, b], layout=torch.jagged)
    assert plain(Ragged.from_nested(nested.transpose(2, 3)).to_list()) == flipped
    assert Ragged.from_nested(nested.narrow(2, 1, 2)).to_list()[0].tolist() == a[:, 1:3].tolist()
    assert Ragged.from_nested(nested.chunk(2)[1]).to_list()[0].tolist() == b.tolist()


def test_tokens_on_another_device_than_their_jagged_source():
    """A scorer's tokens are on the CPU, in the container of ids on an accelerator."""
    source = Jagged(torch.tensor([0, 2, 5]).to("meta"), None)
    tokens = Ragged(torch.arange(5), torch.tensor([2, 3]), source)
    assert tokens.offsets.tolist() == [0, 2, 5]
    assert tokens.positions.tolist() == [0, 1, 0, 1, 2]
    own = Ragged.from_nested(jagged(torch.ones(5), [0, 2, 5]))
    assert own.offsets is own.container.offsets  # where both are on one device torch can combine jagged tensors


def test_narrowed_jagged():
    """``torch.nested.narrow`` leaves slots before the first row and after the last."""
    dense = torch.arange(12).reshape(2, 6)
    nested = torch.nested.narrow(dense, 1, torch.tensor([1, 2]), torch.tensor([2, 3]), layout=torch.jagged)
    assert nested.offsets().tolist() == [1, 8, 11]
    x = Ragged.from_nested(nested)
    assert plain(x.to_list()) == [[1, 2], [8, 9, 10]]
    assert x.offsets.tolist() == [0, 2, 5]
    assert x.container.row_lengths.tolist() == [8, 4]
    assert Ragged.from_slots(x.slots(), x.container, None).offsets.tolist() == [0, 8, 12]
    restored = x.restore(-1)
    assert restored.values().tolist() == [-1, 1, 2, -1, -1, -1, -1, -1, 8, 9, 10, -1]
    assert plain(list((restored + nested).unbind())) == [[2, 4], [16, 18, 20]]
    again = Ragged.from_slots(elements(12, dtype=torch.int64, start=0), x.container, x.keep)
    assert again.lengths.tolist() == [2, 3]
    assert again.values.tolist() == [1, 2, 8, 9, 10]


def test_jagged_forms_of_the_same_sequences_combine():
    x = Ragged.from_list([torch.tensor([1.0, 2.0]), torch.tensor([3.0])])
    source = x.to_nested(torch.jagged)
    again = Ragged.from_nested(source).like(10 * x.values)
    for other in (x.like(10 * x.values).to_nested(torch.jagged), again.to_nested(torch.jagged), again.restore()):
        assert plain(list((source + other).unbind())) == [[11, 22], [33]]


def test_jagged_keeps_its_known_minimum_and_maximum_length():
    source = torch.nested.nested_tensor([torch.ones(3), torch.ones(1)], layout=torch.jagged)
    restored = Ragged.from_nested(source).restore()
    assert (restored._maybe_min_seqlen, restored._maybe_max_seqlen) == (1, 3)
    unknown = Ragged.from_nested(jagged(torch.ones(4), [0, 3, 4])).restore()
    assert (unknown._maybe_min_seqlen, unknown._maybe_max_seqlen) == (None, None)


def test_jagged_with_int32_offsets():
    source = torch.nested.nested_tensor_from_jagged(torch.arange(5), torch.tensor([0, 2, 5], dtype=torch.int32))
    x = Ragged.from_nested(source)
    assert x.lengths.dtype == x.offsets.dtype == x.container.row_lengths.dtype == torch.int64
    assert plain(x.to_list()) == [[0, 1], [2, 3, 4]]
    assert x.restore().offsets() is source.offsets()


# ---------------------------------------------------------------------- sums
def test_half_precision_is_summed_in_float32_and_integers_in_int64():
    """1000 ones: bfloat16 cannot count past 256 one by one, nor float16 past 2048."""
    for dtype in (torch.bfloat16, torch.float16):
        total = segment_sum(torch.ones(5000, dtype=dtype), torch.tensor([1000, 4000]))
        assert total.tolist() == [1000, 4000]
        assert total.dtype == dtype
    for dtype, value, total in ((torch.bool, True, 3), (torch.int32, 2**31 - 1, 3 * (2**31 - 1))):
        got = segment_sum(torch.full((3,), value, dtype=dtype), torch.tensor([3]))
        assert got.dtype == torch.int64
        assert got.tolist() == [total]


def test_a_nan_stays_in_its_sequence():
    x = Ragged.from_list([torch.tensor([math.nan, 1.0]), torch.tensor([2.0])])
    assert_close(x.sum(), torch.tensor([math.nan, 2.0]), rtol=0, atol=0, equal_nan=True)


def test_the_first_elements_of_each_sequence():
    x = Ragged.from_list([torch.ones(3), torch.ones(0), torch.ones(2)])
    assert x.first(torch.tensor([1, 0, 2])).tolist() == [True, False, False, True, True]
    assert x.first(torch.tensor([0, 0, 0])).tolist() == [False] * 5


def test_lengths_of_containers():
    dense = Dense(torch.Size([2, 3]), 4, torch.device("cpu"))
    assert dense.row_lengths.tolist() == [4] * 6
    rows = Rows([2, 0, 1], torch.Size([3]))
    assert rows.row_sizes == rows.row_lengths.tolist() == [2, 0, 1]
    assert rows.row_lengths.dtype == torch.int64
    assert same_rows(rows, Rows([2, 0, 1], torch.Size([3])))
    assert not same_rows(rows, dense)
    assert plain(rows.build(torch.tensor([1, 2, 3]))) == [[1, 2], [], [3]]
    assert Rows([], torch.Size([0])).row_lengths.shape == (0,)


# ---------------------------------------------------------------------- gradients
def rows_of(data: Any) -> list[torch.Tensor]:
    if isinstance(data, list):
        return data
    return list(data.unbind()) if data.is_nested else list(data.flatten(0, -2).unbind())


YES, NO = True, False
SOURCES: dict[str, tuple[list[list[bool]], dict[str, Any]]] = {
    "padded-mask": ([[NO, YES, YES, NO], [YES, NO, YES, YES], [NO, NO, NO, NO]], {}),
    "list": ([[YES, YES], [], [YES]], {}),
    "strided": ([[YES, YES], [], [YES]], {}),
    "jagged": ([[YES, YES], [], [YES]], {}),
    "jagged-gaps": ([[YES, YES, NO], [NO], [YES, NO, NO]], {"head": 2, "tail": 1}),
}


OUT = {
    "restore": lambda x: x.restore(),
    "padded-left": lambda x: x.to_padded(side="left"),
    "padded-right": lambda x: x.to_padded(side="right"),
    "strided": lambda x: x.to_nested(torch.strided),
    "jagged": lambda x: x.to_nested(torch.jagged),
    "list": lambda x: x.to_list(),
    "sum": lambda x: [x.sum()],
}


@pytest.mark.parametrize("kind", SOURCES)
def test_gradient_reaches_the_values_and_only_them(kind):
    """Sum of squares: d/dx = 2x at a value. The NaN in the padding reaches neither the loss nor the gradient."""
    table, options = SOURCES[kind]
    for name, out in OUT.items():
        case = make(kind, table, dtype=torch.float64, leaf=True, **options)
        x = case.read()
        loss = torch.stack([row.sum() for row in rows_of(out(x.like(x.values**2)))]).sum()
        loss.backward()
        value = case.slots.detach().nan_to_num(0.0)
        assert_close(loss.detach(), (value**2).sum(), msg=name)
        assert_close(case.slots.grad, 2 * value, msg=name)


def test_nested_leaf():
    for layout in (torch.strided, torch.jagged):
        rows = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]
        source = torch.nested.nested_tensor(rows, layout=layout, requires_grad=True)
        (Ragged.from_nested(source).values ** 2).sum().backward()
        assert [row.tolist() for row in source.grad.unbind()] == [[2, 4], [6]], layout


def test_no_gradient_to_a_fill_and_no_argument_is_modified():
    values = torch.tensor([2.0], requires_grad=True)
    padded, mask = torch.tensor([[0.0, 1.0, math.nan]]), torch.tensor([[False, True, False]])
    x = Ragged.from_padded(padded, mask=mask)
    x.like(values).restore(math.inf)[0, 1].backward()
    assert values.grad.tolist() == [1]
    x.restore(3)
    assert padded[0, :2].tolist() == [0, 1]
    assert math.isnan(padded[0, 2])
    assert mask.tolist() == [[False, True, False]]


# ---------------------------------------------------------------------- errors
PADDED = torch.zeros(2, 3)
FLAT = Ragged.from_list([torch.tensor([1, 2]), torch.tensor([3])])


def nested_rows(layout: torch.layout = torch.strided) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(3, 2), torch.ones(1, 2)], layout=layout)


def of(*rows: torch.Tensor, **options: Any) -> Callable[[], Ragged]:
    return lambda: Ragged.from_list(list(rows), **options)


def from_padded(values: torch.Tensor = PADDED, **options: Any) -> Callable[[], Ragged]:
    """Lists among the options become tensors."""
    given = {k: torch.tensor(v) if isinstance(v, list) else v for k, v in options.items()}
    return lambda: Ragged.from_padded(values, **given)


def from_nested(source: torch.Tensor) -> Callable[[], Ragged]:
    return lambda: Ragged.from_nested(source)


ONE, FLIPPED = torch.ones(1), nested_rows().transpose(1, 2)

test_errors_name_both_shapes = refused(
    lambda call: call(),
    (of(ONE, ONE.long()), r"expected rows of one dtype, got .*: convert"),
    (from_padded(mask=torch.ones(3, 2).bool()), r"\(2, 3\).*got \(3, 2\)"),
    (from_padded(torch.zeros(2, 3, 4), mask=torch.ones(2, 3, 4).bool()), r"\(2, 3\).*got \(2, 3, 4\)"),
    (from_nested(nested_rows(torch.jagged).transpose(1, 2)), r"must be dimension 1, found dimension 2: transpose"),
    (from_nested(FLIPPED), r"first dimension .* may vary, got row shapes \[\[2, 3\], \[2, 1\]\]"),
    (lambda: FLAT.to_padded(side="middle"), r"one of 'left', 'right', got 'middle'"),
    (lambda: FLAT.like(torch.ones(4)), r"expected 3 values.*got 4"),
)
