"""Variable-length entries of TensorDicts of every layout: read, written, and isolated from other owners.

Rows of a lazy stack through attributes of their TensorDicts and through public methods.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_tensorclass, lazy_stack
from torch import Tensor
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.modules.llm.policies import Masks, Tokens

import torchrl_llm_kl.ragged._tensordict as module
from refused import refused
from torchrl_llm_kl import Ragged
from torchrl_llm_kl.ragged import Dense, Rows, has_entry, own_leaves, read_column, read_node, read_ragged, write_ragged

ROWS = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]
LENGTHS = [3, 1, 2, 4]
KEY = ("tokens", "full")
FLAT = torch.arange(1, 11)


def tensors(rows: list[list[int]] = ROWS) -> list[Tensor]:
    return [torch.tensor(row) for row in rows]


def leaf(i: int, **options: Any) -> TensorDictBase:
    inner = TensorDict({"full": torch.tensor(ROWS[i])}, **options)
    return TensorDict({"tokens": inner, "row": torch.tensor(i)}, **options)


def tokens_leaf(i: int) -> TensorDictBase:
    return TensorDict(tokens=Tokens(full=torch.tensor(ROWS[i])), row=torch.tensor(i))


def leaves(**options: Any) -> list[TensorDictBase]:
    return [leaf(i, **options) for i in range(4)]


def nested(layout: torch.layout, rows: list[list[int]] = ROWS) -> Tensor:
    return torch.nested.as_nested_tensor(tensors(rows), layout=layout)


def batch_of(tokens: Any) -> TensorDictBase:
    return TensorDict(tokens=tokens, batch_size=[4])


def of_row_lengths(*batch: int) -> Rows:
    return Rows(LENGTHS, torch.Size(batch))


def square(make: Callable[[int], TensorDictBase], outer: int = 0) -> TensorDictBase:
    """Rows 0..3 in a batch [2, 2], row-major whatever the dimension of the outer stack."""
    parts = [[0, 2], [1, 3]] if outer else [[0, 1], [2, 3]]
    return lazy_stack([lazy_stack([make(i) for i in part]) for part in parts], outer)


LAYOUTS: dict[str, Callable[[], TensorDictBase]] = {
    "strided": lambda: batch_of({"full": nested(torch.strided)}),
    "jagged": lambda: batch_of({"full": nested(torch.jagged)}),
    "lazy": lambda: lazy_stack(leaves()),
    "lazy on a device": lambda: lazy_stack(leaves(device="cpu")),
    "lazy [2, 2]": lambda: square(leaf),
    "lazy [2, 2] along dimension 1": lambda: square(leaf, outer=1),
    "lazy [1, 2, 2]": lambda: lazy_stack([square(leaf, outer=1)], 0),
    "lazy of dense": lambda: lazy_stack(
        [
            TensorDict({KEY: nested(kind, part)}, batch_size=[2])
            for kind, part in ((torch.strided, ROWS[:2]), (torch.jagged, ROWS[2:]))
        ]
    ),
    "dense with a lazy part": lambda: batch_of(lazy_stack([x["tokens"] for x in leaves()])),
    "dense [2, 2] with a lazy part": lambda: TensorDict(tokens=square(lambda i: leaf(i)["tokens"]), batch_size=[2, 2]),
    "tensorclass of nested": lambda: batch_of(Tokens(full=nested(torch.strided), batch_size=[4])),
    "tensorclass in a lazy stack": lambda: lazy_stack([tokens_leaf(i) for i in range(4)]),
    "tensorclass beside TensorDicts in a lazy stack": lambda: lazy_stack([tokens_leaf(0), *leaves()[1:]]),
    "tensorclass of a lazy stack": lambda: batch_of(lazy_stack([Tokens(full=row) for row in tensors()])),
    "tensorclass in a lazy stack [2, 2]": lambda: square(tokens_leaf),
}


def values(found: Ragged | None) -> list[list[float]]:
    return [row.tolist() for row in found.to_list()]


def rows_of(value: Any) -> list[list[float]]:
    return [row.tolist() for row in value]


@pytest.fixture(params=[True, False], ids=["attributes", "public methods"])
def known(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both ways must have the same result. Other releases of tensordict use the public methods."""
    assert module._ATTRIBUTES_KNOWN, "of this version of tensordict"
    monkeypatch.setattr(module, "_ATTRIBUTES_KNOWN", request.param)
    return request.param


# ------------------------------------------------------------------ reading
def test_read_with_a_mask() -> None:
    padded = torch.tensor([[1, 2, 3], [0, 4, 0]])
    mask = torch.tensor([[True, True, True], [False, True, False]])
    td = TensorDict({KEY: padded, ("masks", "attention"): mask}, batch_size=[2])
    assert values(read_ragged(td, KEY)) == values(read_ragged(td, KEY, "missing")) == [[1, 2, 3], [0, 4, 0]]
    kept = read_ragged(td, KEY, ("masks", "attention"))
    assert values(kept) == [[1, 2, 3], [4]]
    assert kept.restore(fill=-1).tolist() == [[1, 2, 3], [-1, 4, -1]]
    rows = ([1, 2, 3], [True, False, True]), ([4], [True])
    parts = [(Tokens(full=torch.tensor(ids)), Masks(all_attention_mask=torch.tensor(keep))) for ids, keep in rows]
    td = lazy_stack([TensorDict(tokens=ids, masks=masks) for ids, masks in parts])
    assert values(read_ragged(td, KEY, ("masks", "all_attention_mask"))) == [[1, 3], [4]]


@pytest.mark.parametrize(("batch", "features"), [((), (5,)), ((2,), ()), ((2, 3), (5,))])
def test_read_and_write_dense_of_any_batch(batch: tuple[int, ...], features: tuple[int, ...]) -> None:
    dense = torch.randn(*batch, 4, *features)
    td = TensorDict({"x": dense}, batch_size=batch)
    found = read_ragged(td, "x")
    assert found.lengths.tolist() == [4] * torch.Size(batch).numel()
    assert torch.equal(found.values, dense.reshape(-1, *features))
    assert torch.equal(found.restore(), dense)
    container = Dense(torch.Size(batch), 4, dense.device)
    assert write_ragged(td, ("a", "x"), dense.reshape(-1, *features), container) is td
    assert torch.equal(td["a", "x"], dense)


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
def test_a_missing_entry_is_none(known: bool, td: TensorDictBase) -> None:
    assert read_column(td, KEY) is None
    assert read_ragged(td, KEY) is None
    assert not has_entry(td, KEY)
    for path in (("m",), ("tokens", "m"), ("tokens", "m", "x"), ("m", "b", "x")):
        nodes = leaves()
        write_ragged(lazy_stack(nodes[:2]), path, torch.ones(2), Rows([1, 1], torch.Size([2])))
        assert read_column(lazy_stack(nodes), path) is None, path


MASKED = lazy_stack([TensorDict({"x": torch.zeros(n), "m": torch.ones(m)}) for n, m in ((2, 2), (3, 5))])
test_read_errors = refused(
    read_ragged,
    (TensorDict({"x": torch.zeros(2)}, [2]), "x", r"'x' has shape \(2,\): expected a token dimension"),
    (TensorDict({"x": "text"}), "x", TypeError, "expected tensors under 'x', got (str|NonTensorData)"),
    (lazy_stack([TensorDict({"x": "a"})] * 2), "x", TypeError, "expected tensors under 'x', got (str|NonTensorD)"),
    (TensorDict({"x": torch.zeros(2, 3)}, [2]), ("x", "y"), TypeError, "nested TensorDict under 'x'.*got Tensor"),
    (MASKED, "x", "m", r"'m' has 5 positions in sequence 1, but 'x' has 3"),
)


@pytest.mark.parametrize("stack_dim", [0, 1])
def test_the_nodes_of_a_stack_are_a_stack(known: bool, stack_dim: int) -> None:
    td = square(leaf, stack_dim)
    found = read_node(td, "tokens")
    assert isinstance(found, LazyStackedTensorDict)
    assert (found.batch_size, found.stack_dim) == (td.batch_size, stack_dim)
    assert found[0, 0]["full"] is td[0, 0]["tokens", "full"]
    assert values(read_ragged(found, "full")) == ROWS
    assert read_node(lazy_stack([leaf(0), TensorDict()]), "tokens") is None
    assert read_node(lazy_stack([lazy_stack([leaf(0)]), lazy_stack([TensorDict()])]), "tokens") is None
    assert read_node(TensorDict(), "tokens") is None


def test_text_is_read_as_the_public_method_returns_it(known: bool) -> None:
    nodes = [TensorDict(text="a"), TensorDict(text="b")]
    texts = read_column(lazy_stack(list(nodes)), "text")
    assert [type(value) for value in texts] == [type(node.get("text")) for node in nodes]
    assert [getattr(value, "data", value) for value in texts] == ["a", "b"]


# ------------------------------------------------------------------ writing
def row_values(td: TensorDictBase, key: Any) -> list[list[float]]:
    """Row by row, with plain indexing."""
    if td.batch_dims == 0:
        return [td[key].tolist()]
    return [row for part in td.unbind(0) for row in row_values(part, key)]


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_read_and_write_in_every_layout(known: bool, layout: str) -> None:
    batch = torch.Size([1, 2, 2] if "[1" in layout else [2, 2] if "2]" in layout or "of dense" in layout else [4])
    new = [[float(-x) for x in row] for row in ROWS]
    for key in ("new", ("log_probs", "full"), ("tokens", "new"), ("a", "b", "c")):
        if "tensorclass" in layout and key == ("tokens", "new"):
            key = ("tokens", "response")  # a tensorclass has the fields that it declares
        td = LAYOUTS[layout]()
        assert td.batch_size == batch
        assert has_entry(td, KEY)
        data = read_ragged(td, KEY)
        assert values(data) == ROWS
        assert data.lengths.tolist() == LENGTHS
        assert data.container.batch_shape == batch
        out = write_ragged(td, key, -data.slots().float(), data.container)
        assert out is td or layout == "dense [2, 2] with a lazy part"  # here only a lazy stack can hold ragged rows
        assert out.batch_size == batch
        assert values(read_ragged(out, key)) == new
        assert values(read_ragged(out, KEY)) == ROWS
        if layout not in ("strided", "jagged", "lazy of dense", "tensorclass of nested"):
            assert row_values(out, key) == new
        elif layout != "lazy of dense":
            assert out[key].layout == out[KEY].layout
        if "tensorclass" in layout:
            node = td.get("tokens") if "in a lazy" not in layout else td[(0,) * td.batch_dims]["tokens"]
            assert is_tensorclass(node)


def test_write_rows_beside_dense_entries() -> None:
    """One batch dimension takes a nested tensor, several need a lazy stack. An old entry is replaced."""
    td = TensorDict({"reward": torch.ones(4, 1), "x": torch.ones(4, 9)}, batch_size=[4])
    assert write_ragged(td, "x", FLAT, of_row_lengths(4)) is td
    assert td["x"].layout == torch.strided
    assert rows_of(td["x"].unbind()) == ROWS
    td = lazy_stack([TensorDict(x=torch.ones(9)) for _ in ROWS])
    assert values(read_ragged(write_ragged(td, "x", FLAT, of_row_lengths(4)), "x")) == ROWS

    flat = TensorDict({"reward": torch.arange(4.0).reshape(2, 2, 1), ("a", "b"): torch.ones(2, 2)}, batch_size=[2, 2])
    out = write_ragged(flat, "x", FLAT, of_row_lengths(2, 2))
    assert isinstance(out, LazyStackedTensorDict)
    assert out.batch_size == (2, 2)
    assert row_values(out, "x") == ROWS
    assert torch.equal(out["reward"], flat["reward"])
    assert torch.equal(out["a", "b"], flat["a", "b"])
    assert flat.get("x", None) is None, "the caller's TensorDict cannot hold it and stays as it is"

    td = lazy_stack([TensorDict({"kept": torch.arange(4).reshape(2, 2)}, [2, 2])])
    assert write_ragged(td, "x", FLAT, of_row_lengths(1, 2, 2)) is td
    for i, row in enumerate(td[0, j, k] for j in (0, 1) for k in (0, 1)):
        assert (row["x"].tolist(), int(row["kept"])) == (ROWS[i], i)


def test_rows_of_one_length_and_padded_rows() -> None:
    td = TensorDict(batch_size=[2, 2])
    assert write_ragged(td, "x", torch.arange(12), Rows([3] * 4, torch.Size([2, 2]))) is td
    assert torch.equal(td["x"], torch.arange(12).reshape(2, 2, 3))
    td = lazy_stack([TensorDict(), TensorDict()])
    write_ragged(td, ("a", "x"), torch.arange(6), Dense(torch.Size([2]), 3, torch.device("cpu")))
    assert [step["a", "x"].tolist() for step in td.tensordicts] == [[0, 1, 2], [3, 4, 5]]
    td = write_ragged(lazy_stack([TensorDict(device="meta")]), "x", torch.ones(2), Rows([2], torch.Size([1])))
    assert td.tensordicts[0]["x"].device.type == "meta"


@given(st.lists(st.integers(0, 4), min_size=6, max_size=6), st.integers(0, 1), st.sampled_from([(), (2,)]))
@settings(max_examples=25, deadline=None)
def test_round_trip_through_any_stack(lengths: list[int], outer: int, features: tuple[int, ...]) -> None:
    """[3, 2] built in either order of the dimensions: row ``2 * i + j`` is element ``[i, j]``."""
    rows = [torch.randn(n, *features) for n in lengths]
    parts = [[0, 2, 4], [1, 3, 5]] if outer else [[0, 1], [2, 3], [4, 5]]
    td = lazy_stack([lazy_stack([TensorDict({"x": rows[i]}) for i in part]) for part in parts], outer)
    found = read_ragged(td, "x")
    assert all(torch.equal(a, b) for a, b in zip(found.to_list(), rows, strict=True))
    write_ragged(td, ("y", "z"), 2 * found.slots(), found.container)
    for i, row in enumerate(rows):
        assert torch.equal(td[i // 2, i % 2]["y", "z"], 2 * row)


def test_rows_that_cannot_be_written(known: bool) -> None:
    with pytest.raises(RuntimeError, match="locked"):
        write_ragged(lazy_stack([leaf(0), leaf(1).lock_()]), "n", torch.ones(2), Rows([1, 1], torch.Size([2])))
    td = lazy_stack([TensorDict(turns=TensorDict(text=torch.zeros(3), batch_size=[3]))])
    with pytest.raises(RuntimeError, match="batch dimension mismatch"):
        write_ragged(td, ("turns", "kl"), torch.ones(5), Rows([5], td.batch_size))
    td = lazy_stack(leaves())
    for path in (("row", "x"), ("tokens", "full", "y")):
        for access in (
            read_column,
            lambda td, path: write_ragged(td, path, torch.ones(4), Rows([1] * 4, td.batch_size)),
        ):
            with pytest.raises(TypeError, match=f"expected a nested TensorDict under {path[-2]!r}, got Tensor"):
                access(td, path)


# ------------------------------------------------------------------ other owners
@pytest.mark.parametrize("options", [{}, {"device": "cpu"}, {"lock": True}], ids=["plain", "device", "locked"])
def test_only_the_parents_of_a_written_entry_are_copied(known: bool, options: dict[str, Any]) -> None:
    for key, copied in (("new", (False, False)), (("a", "new"), (True, False)), (("a", "b", "x"), (True, True))):
        inner = TensorDict({"b": TensorDict({"x": torch.ones(2, 1)}, [2], names=["time"], **options)}, **options)
        node = TensorDict({"a": inner}, **options)
        td = lazy_stack([node, TensorDict(device=node.device)])  # the other lacks the parents
        own_leaves(td, key)
        copy = td.tensordicts[0]
        assert copy is not node
        assert (copy.batch_size, copy.device, copy.is_locked) == (node.batch_size, node.device, False)
        assert copy["a", "b", "x"] is node["a", "b", "x"]
        assert copy["a", "b"].names == ["time"]
        if known and not options.get("lock"):
            assert (copy["a"] is not node["a"], copy["a", "b"] is not node["a", "b"]) == copied
        copy[key] = torch.zeros(2, 1)
        assert node["a", "b", "x"].tolist() == [[1], [1]]
        assert node.get("new", None) is node["a"].get("new", None) is None


@pytest.mark.parametrize("keys", [(), ("row", ("tokens", "new"), ("tokens", "response"))], ids=["all", "named"])
@pytest.mark.parametrize("form", ["stack", "stack of stacks", "dense", "tensorclass", "dense in dense"])
def test_writes_after_own_leaves_do_not_reach_the_elements(known: bool, form: str, keys: tuple[Any, ...]) -> None:
    key: Any = ("tokens", "response" if form == "tensorclass" else "new")
    nodes = [tokens_leaf(i) for i in range(4)] if form == "tensorclass" else leaves()
    inner = [node["tokens"] for node in nodes]
    if "stack" in form:
        td: TensorDictBase = lazy_stack(list(nodes)) if form == "stack" else square(lambda i: nodes[i])
    else:
        td = batch_of(lazy_stack(list(inner)))
    if form == "dense in dense":
        td, key, keys = TensorDict(a=td, batch_size=[4]), ("a", *key), tuple(("a", *x) for x in keys if x != "row")
    own_leaves(td, *keys)
    for path in (key, *(["row"] if "stack" in form else [])):
        write_ragged(td, path, torch.zeros(10), Rows(LENGTHS, td.batch_size))
        assert values(read_ragged(td, path)) == [[0.0] * n for n in LENGTHS]
    for i, (node, part) in enumerate(zip(nodes, inner, strict=True)):
        assert part.get(key[-1], None) is None
        assert part.get("full").tolist() == ROWS[i]
        assert node["row"] == i


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
    stored = [buffer._storage[i] for i in range(4)]
    assert any(row.get("new", None) is not None for row in stored) != protect
    assert all(row["tokens"].response is None for row in stored) == protect
    assert [row["tokens"].full.tolist() for row in stored] == ROWS
