"""Variable-length entries of TensorDicts of every layout: read, written, and isolated from other owners."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_tensorclass, lazy_stack
from torch import Tensor
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.modules.llm.policies import LogProbs, Masks, Tokens

from torchrl_llm_kl.ragged import Dense, Ragged, Rows, has_entry, own_leaves, read_column, read_ragged, write_ragged

ROWS = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]
KEY = ("tokens", "full")
FOUR = Rows(torch.tensor([3, 1, 2, 4]), torch.Size([4]))


def tensors(rows: list[list[int]] = ROWS) -> list[Tensor]:
    return [torch.tensor(row) for row in rows]


def leaf(i: int) -> TensorDictBase:
    return TensorDict({KEY: torch.tensor(ROWS[i]), "row": torch.tensor(i)})


def tokens_leaf(i: int) -> TensorDictBase:
    return TensorDict(tokens=Tokens(full=torch.tensor(ROWS[i])), row=torch.tensor(i))


def nested(layout: torch.layout, rows: list[list[int]] = ROWS) -> Tensor:
    return torch.nested.as_nested_tensor(tensors(rows), layout=layout)


def square(make: Callable[[int], TensorDictBase], outer: int = 0, inner: int = 0) -> TensorDictBase:
    """Rows 0..3 in a batch [2, 2], row-major whatever the dimension of the stacks."""
    parts = [[make(0), make(1)], [make(2), make(3)]]
    if outer == 1:
        parts = [list(column) for column in zip(*parts, strict=True)]
    return lazy_stack([lazy_stack(part, inner) for part in parts], outer)


def cube() -> TensorDictBase:
    """[1, 2, 2], stacked along the last dimension first."""
    return lazy_stack([square(leaf, outer=1)], 0)


LAYOUTS: dict[str, Callable[[], TensorDictBase]] = {
    "strided": lambda: TensorDict({KEY: nested(torch.strided)}, batch_size=[4]),
    "jagged": lambda: TensorDict({KEY: nested(torch.jagged)}, batch_size=[4]),
    "lazy": lambda: lazy_stack([leaf(i) for i in range(4)]),
    "lazy [2, 2]": lambda: square(leaf),
    "lazy [2, 2] along dimension 1": lambda: square(leaf, outer=1),
    "lazy [1, 2, 2]": cube,
    "lazy of dense": lambda: lazy_stack(
        [
            TensorDict({KEY: nested(kind, part)}, batch_size=[2])
            for kind, part in ((torch.strided, ROWS[:2]), (torch.jagged, ROWS[2:]))
        ]
    ),
    "dense with a lazy part": lambda: TensorDict(
        tokens=lazy_stack([leaf(i)["tokens"] for i in range(4)]), batch_size=[4]
    ),
    "dense [2, 2] with a lazy part": lambda: TensorDict(tokens=square(lambda i: leaf(i)["tokens"]), batch_size=[2, 2]),
    "tensorclass of nested": lambda: TensorDict(
        tokens=Tokens(full=nested(torch.strided), batch_size=[4]), batch_size=[4]
    ),
    "tensorclass in a lazy stack": lambda: lazy_stack([tokens_leaf(i) for i in range(4)]),
    "tensorclass of a lazy stack": lambda: TensorDict(
        tokens=lazy_stack([Tokens(full=row) for row in tensors()]), batch_size=[4]
    ),
    "tensorclass in a lazy stack [2, 2]": lambda: square(tokens_leaf),
}
BATCH = {
    name: torch.Size([1, 2, 2] if "[1" in name else [2, 2] if "2]" in name or "of dense" in name else [4])
    for name in LAYOUTS
}


def values(found: Ragged | None) -> list[list[float]]:
    assert found is not None
    return [row.tolist() for row in found.to_list()]


def test_read_dense() -> None:
    padded = torch.tensor([[1, 2, 3], [0, 4, 0]])
    mask = torch.tensor([[True, True, True], [False, True, False]])
    td = TensorDict({KEY: padded, ("masks", "attention"): mask}, batch_size=[2])
    assert values(read_ragged(td, KEY)) == [[1, 2, 3], [0, 4, 0]]
    kept = read_ragged(td, KEY, ("masks", "attention"))
    assert values(kept) == [[1, 2, 3], [4]]
    assert kept.restore(fill=-1).tolist() == [[1, 2, 3], [-1, 4, -1]]
    assert values(read_ragged(td, KEY, ("masks", "missing"))) == [[1, 2, 3], [0, 4, 0]]


@pytest.mark.parametrize(("batch", "features"), [((), (5,)), ((2,), ()), ((2, 3), (5,))])
def test_read_and_write_dense_of_any_batch(batch: tuple[int, ...], features: tuple[int, ...]) -> None:
    dense = torch.randn(*batch, 4, *features)
    td = TensorDict({"x": dense}, batch_size=batch)
    found = read_ragged(td, "x")
    assert found is not None
    assert found.lengths.tolist() == [4] * torch.Size(batch).numel()
    assert torch.equal(found.values, dense.reshape(-1, *features))
    assert torch.equal(found.restore(), dense)
    container = Dense(torch.Size(batch), 4, dense.device)
    assert write_ragged(td, ("a", "x"), dense.reshape(-1, *features), container) is td
    assert torch.equal(td["a", "x"], dense)


def test_read_a_mask_in_the_form_of_the_entry() -> None:
    def element(ids: list[int], mask: list[bool]) -> TensorDictBase:
        return TensorDict(tokens=Tokens(full=torch.tensor(ids)), masks=Masks(all_attention_mask=torch.tensor(mask)))

    td = lazy_stack([element([1, 2, 3], [True, False, True]), element([4], [True])])
    assert values(read_ragged(td, KEY, ("masks", "all_attention_mask"))) == [[1, 3], [4]]


@pytest.mark.parametrize(
    "td",
    [
        TensorDict(batch_size=[2]),
        TensorDict({("tokens", "prompt"): torch.zeros(2, 3)}, batch_size=[2]),
        TensorDict(tokens=Tokens(prompt=torch.zeros(2, 3), batch_size=[2]), batch_size=[2]),
        lazy_stack([leaf(0), TensorDict({"row": torch.tensor(1)})]),
        lazy_stack([tokens_leaf(0), TensorDict(tokens=Tokens(prompt=torch.zeros(1)))]),
    ],
    ids=["empty", "other", "unset field", "one leaf without", "one leaf unset"],
)
def test_a_missing_entry_is_none(td: TensorDictBase) -> None:
    assert read_column(td, KEY) is None
    assert read_ragged(td, KEY) is None
    assert not has_entry(td, KEY)


@pytest.mark.parametrize(
    ("td", "error", "text"),
    [
        (TensorDict({"x": torch.zeros(2)}, batch_size=[2]), ValueError, r"'x' to have a token dimension.*\(2,\), got"),
        (TensorDict({"x": torch.zeros(0, 3)}, [0]), ValueError, r"batch is empty: 'x' has shape \(0, 3\).*drop"),
        (TensorDict({"x": "text"}), TypeError, "expected a tensor under 'x', got (str|NonTensorData)"),
        (lazy_stack([TensorDict({"x": "a"})] * 2), TypeError, "expected tensors under 'x', got (str|NonTensorData)"),
        (
            lazy_stack([TensorDict({"x": torch.zeros(2, 5)}), TensorDict({"x": torch.zeros(3, 6)})]),
            ValueError,
            r"\(3, 6\).* at row 1",
        ),
        (lazy_stack([TensorDict({"x": torch.tensor(1)})]), ValueError, "scalar at row 0"),
    ],
    ids=["no tokens", "empty batch", "text", "texts", "features differ", "scalars"],
)
def test_read_errors(td: TensorDictBase, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        read_ragged(td, "x")


@pytest.mark.parametrize(
    "td", [TensorDict({"x": torch.zeros(2, 3)}, batch_size=[2]), lazy_stack([TensorDict({"x": torch.zeros(3)})] * 2)]
)
def test_reading_below_a_tensor_raises(td: TensorDictBase) -> None:
    with pytest.raises(TypeError, match=r"expected a nested TensorDict under 'x'.*got Tensor"):
        read_ragged(td, ("x", "full"))


def test_a_mask_of_another_length_raises() -> None:
    td = lazy_stack([TensorDict({"x": torch.zeros(n), "m": torch.ones(m)}) for n, m in ((2, 2), (3, 5))])
    with pytest.raises(ValueError, match="'m' must have the length of 'x': sequence 1 has 5 and 3 positions"):
        read_ragged(td, "x", "m")


# ------------------------------------------------------------------ writing


def row_values(td: TensorDictBase, key: Any) -> list[list[float]]:
    """Row by row, with plain indexing."""
    if td.batch_dims == 0:
        value = td[key]
        return [value.tolist()]
    return [row for part in td.unbind(0) for row in row_values(part, key)]


NEW = [[float(-x) for x in row] for row in ROWS]


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_read_and_write_in_every_layout(layout: str) -> None:
    for key in ("new", ("log_probs", "full"), ("tokens", "new"), ("a", "b", "c")):
        if "tensorclass" in layout and key == ("tokens", "new"):
            key = ("tokens", "response")  # a tensorclass has the fields that it declares
        td = LAYOUTS[layout]()
        assert td.batch_size == BATCH[layout]
        assert has_entry(td, KEY)
        data = read_ragged(td, KEY)
        assert values(data) == ROWS
        assert data.lengths.tolist() == [3, 1, 2, 4]
        assert data.container.batch_shape == BATCH[layout]
        out = write_ragged(td, key, -data.slots().float(), data.container)
        assert out is td or layout == "dense [2, 2] with a lazy part"  # here only a lazy stack can hold ragged rows
        assert out.batch_size == BATCH[layout]
        assert values(read_ragged(out, key)) == NEW
        assert values(read_ragged(out, KEY)) == ROWS
        if layout not in ("strided", "jagged", "lazy of dense", "tensorclass of nested"):
            assert row_values(out, key) == NEW
        elif layout != "lazy of dense":
            assert out[key].layout == out[KEY].layout


def test_write_keeps_the_type_of_a_tensorclass() -> None:
    for layout in ("tensorclass of nested", "tensorclass in a lazy stack", "tensorclass of a lazy stack"):
        td = LAYOUTS[layout]()
        data = read_ragged(td, KEY)
        assert data is not None
        write_ragged(td, ("tokens", "response"), data.slots(), data.container)
        assert is_tensorclass(td[0]["tokens"] if layout == "tensorclass in a lazy stack" else td.get("tokens")), layout


def test_write_rows_of_a_lazy_part_beside_dense_entries() -> None:
    """One batch dimension holds ragged rows as a nested tensor; several need a lazy stack."""
    td = TensorDict({"reward": torch.ones(4, 1)}, batch_size=[4])
    rows = FOUR
    assert write_ragged(td, "x", torch.cat(tensors()), rows) is td
    assert td["x"].is_nested
    assert td["x"].layout == torch.strided
    assert [row.tolist() for row in td["x"].unbind()] == ROWS

    flat = TensorDict({"reward": torch.arange(4.0).reshape(2, 2, 1), ("a", "b"): torch.ones(2, 2)}, batch_size=[2, 2])
    out = write_ragged(flat, "x", torch.cat(tensors()), Rows(rows.row_lengths, torch.Size([2, 2])))
    assert isinstance(out, LazyStackedTensorDict)
    assert out.batch_size == (2, 2)
    assert row_values(out, "x") == ROWS
    assert torch.equal(out["reward"], flat["reward"])
    assert torch.equal(out["a", "b"], flat["a", "b"])
    assert flat.get("x", None) is None, "the caller's TensorDict cannot hold it and stays as it is"


def test_write_rows_of_one_length_as_a_dense_tensor() -> None:
    td = TensorDict(batch_size=[2, 2])
    rows = Rows(torch.tensor([3, 3, 3, 3]), torch.Size([2, 2]))
    assert write_ragged(td, "x", torch.arange(12), rows) is td
    assert torch.equal(td["x"], torch.arange(12).reshape(2, 2, 3))


def test_write_padded_rows_into_a_lazy_stack() -> None:
    td = lazy_stack([TensorDict(), TensorDict()])
    write_ragged(td, ("a", "x"), torch.arange(6), Dense(torch.Size([2]), 3, torch.device("cpu")))
    assert [step["a", "x"].tolist() for step in td.tensordicts] == [[0, 1, 2], [3, 4, 5]]


def test_write_replaces_the_entry() -> None:
    for td in (
        lazy_stack([TensorDict(x=torch.ones(9)) for _ in ROWS]),
        TensorDict({"x": torch.ones(4, 9)}, batch_size=[4]),
    ):
        write_ragged(td, "x", torch.cat(tensors()), FOUR)
        assert values(read_ragged(td, "x")) == ROWS


def test_a_dense_element_that_cannot_hold_ragged_rows_becomes_a_lazy_stack() -> None:
    td = lazy_stack([TensorDict({"kept": torch.arange(4).reshape(2, 2)}, [2, 2])])
    rows = Rows(torch.tensor([3, 1, 2, 4]), torch.Size([1, 2, 2]))
    assert write_ragged(td, "x", torch.cat(tensors()), rows) is td
    for i, (want, leaf) in enumerate(zip(ROWS, [td[0, j, k] for j in (0, 1) for k in (0, 1)], strict=True)):
        assert leaf["x"].tolist() == want
        assert int(leaf["kept"]) == i


@given(
    lengths=st.lists(st.integers(0, 4), min_size=6, max_size=6),
    dims=st.tuples(st.integers(0, 1), st.integers(0, 1)),
    features=st.sampled_from([(), (2,)]),
)
@settings(max_examples=25, deadline=None)
def test_round_trip_through_any_stack(lengths: list[int], dims: tuple[int, int], features: tuple[int, ...]) -> None:
    """[3, 2] built in either order of the dimensions: row ``2 * i + j`` is element ``[i, j]``."""
    rows = [torch.randn(n, *features) for n in lengths]
    parts = [[TensorDict({"x": rows[2 * i + j]}) for j in range(2)] for i in range(3)]
    if dims[0] == 1:
        parts = [list(column) for column in zip(*parts, strict=True)]
    td = lazy_stack([lazy_stack(part) for part in parts], dims[0])
    found = read_ragged(td, "x")
    assert found is not None
    assert all(torch.equal(a, b) for a, b in zip(found.to_list(), rows, strict=True))
    write_ragged(td, ("y", "z"), 2 * found.slots(), found.container)
    for i in range(3):
        for j in range(2):
            assert torch.equal(td[i, j]["y", "z"], 2 * rows[2 * i + j])


# ------------------------------------------------------------------ other owners


@pytest.mark.parametrize("form", ["dense", "tensorclass", "stack of stacks", "dense in dense"])
def test_own_leaves_copies_inner_stacks(form: str) -> None:
    inner = [TensorDict(full=row) for row in tensors()]
    if form == "stack of stacks":
        td: TensorDictBase = lazy_stack([lazy_stack(inner[:2]), lazy_stack(inner[2:])])
        key: Any = "new"
    elif form == "tensorclass":
        inner = [Tokens(full=row) for row in tensors()]
        td, key = TensorDict(tokens=lazy_stack(inner), batch_size=[4]), ("tokens", "response")
    elif form == "dense in dense":
        td, key = TensorDict({("a", "tokens"): lazy_stack(inner)}, batch_size=[4]), ("a", "tokens", "new")
    else:
        td, key = TensorDict(tokens=lazy_stack(inner), batch_size=[4]), ("tokens", "new")
    own_leaves(td)
    write_ragged(td, key, torch.zeros(10), Rows(torch.tensor([3, 1, 2, 4]), td.batch_size))
    assert has_entry(td, key)
    for element in inner:
        assert element.get("response" if form == "tensorclass" else "new", None) is None


@pytest.mark.parametrize("protect", [True, False], ids=["with own_leaves", "without"])
def test_own_leaves_protects_a_storage(protect: bool) -> None:
    """The control without it shows that a sample consists of the stored elements themselves."""
    buffer = ReplayBuffer(storage=LazyStackStorage(4), batch_size=4)
    buffer.extend(lazy_stack([tokens_leaf(i) for i in range(4)]))
    sample = buffer.sample()
    if protect:
        own_leaves(sample)
    data = read_ragged(sample, KEY)
    assert data is not None
    for key in ("new", ("log_probs", "full"), ("tokens", "response")):
        sample = write_ragged(sample, key, data.slots().float(), data.container)
    reached = [buffer._storage[i].get("new", None) is not None for i in range(4)]
    stored = [buffer._storage[i]["tokens"] for i in range(4)]
    assert any(reached) != protect
    assert all(tokens.response is None for tokens in stored) == protect
    assert [tokens.full.tolist() for tokens in stored] == ROWS


def test_a_tensorclass_of_log_probs_takes_rows() -> None:
    td = lazy_stack([TensorDict(log_probs=LogProbs(response=torch.zeros(1))) for _ in ROWS])
    rows = Ragged.from_list([row.float() for row in tensors()])
    write_ragged(td, ("log_probs", "full"), rows.slots(), rows.container)
    assert [step["log_probs"].full.tolist() for step in td.tensordicts] == ROWS
    assert all(is_tensorclass(step["log_probs"]) for step in td.tensordicts)
