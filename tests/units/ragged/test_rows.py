"""Rows of a lazy stack, read, copied and written through attributes of their TensorDicts and through public methods."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, lazy_stack
from torchrl.modules.llm.policies import LogProbs

from torchrl_llm_kl.ragged import (
    Rows,
    _tensordict as module,
    own_leaves,
    read_column,
    read_node,
    read_ragged,
    write_ragged,
)

LENGTHS = [3, 1, 2]
KEY = ("a", "b", "x")


@pytest.fixture(params=[True, False], ids=["attributes", "public methods"])
def known(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both ways must have the same result: a later tensordict falls back to the public methods."""
    monkeypatch.setattr(module, "_ATTRIBUTES_KNOWN", request.param)
    return request.param


def element(i: int, **options: Any) -> TensorDictBase:
    x = torch.arange(LENGTHS[i]) + 10.0 * i
    return TensorDict({"a": TensorDict({"b": TensorDict({"x": x}, **options)}, **options), "n": x + 1}, **options)


def elements(**options: Any) -> list[TensorDictBase]:
    return [element(i, **options) for i in range(3)]


def rows_of(value: Any) -> list[list[float]]:
    return [row.tolist() for row in value]


def test_this_tensordict_version_has_the_known_attributes() -> None:
    assert module._ATTRIBUTES_KNOWN


@pytest.mark.parametrize("options", [{}, {"device": "cpu"}, {"lock": True}], ids=["plain", "device", "locked"])
def test_a_copy_equals_that_of_the_public_method(known: bool, options: dict[str, Any]) -> None:
    for tree in (None, {}, {"a": {}}, {"a": {"b": {}}}, {"missing": {}}):
        nodes = elements(**options)
        for node, copy in zip(nodes, module._copy_rows(nodes, tree), strict=True):
            assert copy is not node
            want = node.copy()
            assert vars(copy).keys() <= vars(want).keys(), tree
            assert (copy.batch_size, copy.device, copy.is_locked) == (want.batch_size, want.device, False), tree
            assert copy[KEY] is node[KEY]
            copy["new"] = torch.ones(1)
            assert node.get("new", None) is None, tree
            if tree is None or "a" in tree:
                copy["a", "new"] = torch.ones(1)
                assert node["a"].get("new", None) is None, tree
            if tree is None or "b" in tree.get("a", ()):
                copy["a", "b", "x"] = torch.ones(1)
                assert len(node[KEY]) in LENGTHS
                assert float(node[KEY][0]) in (0, 10, 20)


def test_only_parents_of_the_entry_are_copied_and_names_too() -> None:
    nodes = elements()
    (copy, *_) = module._copy_rows(nodes, {"a": {}})
    assert copy["a"] is not nodes[0]["a"]
    assert copy["a"]["b"] is nodes[0]["a"]["b"]
    (copy,) = module._copy_rows([TensorDict({"x": torch.ones(2, 3)}, batch_size=[2, 3], names=["env", "time"])], {})
    assert (copy.names, copy.batch_size) == (["env", "time"], (2, 3))


def test_elements_that_have_the_node_are_copied_if_others_lack_it(known: bool) -> None:
    nodes = [TensorDict({("logs", "old"): torch.ones(1)}), TensorDict({"x": torch.ones(1)})]
    td = lazy_stack(list(nodes))
    own_leaves(td, ("logs", "kl"))
    write_ragged(td, ("logs", "kl"), torch.tensor([1.0, 2.0, 3.0]), Rows([2, 1], torch.Size([2])))
    assert rows_of(read_column(td, ("logs", "kl"))) == [[1, 2], [3]]
    assert list(nodes[0]["logs"].keys()) == ["old"]
    assert list(nodes[1].keys()) == ["x"]


def test_writes_after_own_leaves_do_not_reach_the_elements(known: bool) -> None:
    for dims in (1, 2):
        nodes = elements()
        td = lazy_stack(list(nodes)) if dims == 1 else lazy_stack([lazy_stack(list(nodes))])
        own_leaves(td, "n", ("a", "b", "y"))
        container = Rows(LENGTHS, td.batch_size)
        write_ragged(td, "n", torch.zeros(6), container)
        write_ragged(td, ("a", "b", "y"), torch.ones(6), container)
        assert rows_of(read_column(td, "n")) == [[0.0] * n for n in LENGTHS]
        assert rows_of(read_column(td, ("a", "b", "y"))) == [[1.0] * n for n in LENGTHS]
        for i, node in enumerate(nodes):
            assert (node == element(i)).all()
            assert list(node["a", "b"].keys()) == ["x"]


def test_own_leaves_of_a_stack_with_a_locked_part() -> None:
    td = lazy_stack([lazy_stack([element(0).lock_()]), lazy_stack([element(0)])])
    own_leaves(td, "n")
    write_ragged(td, "n", torch.zeros(6), Rows([3, 3], torch.Size([2, 1])))
    assert rows_of(read_column(td, "n")) == [[0.0] * 3] * 2


def test_a_locked_row_is_not_written(known: bool) -> None:
    nodes = [element(0), element(1).lock_()]
    with pytest.raises(RuntimeError, match="locked"):
        module._set_rows(nodes, ("n",), [torch.ones(1)] * 2)


def test_set_rows_are_read_back(known: bool) -> None:
    """To the device of each node."""
    for options in ({}, {"device": "cpu"}):
        for path in (("n",), ("a", "b", "y"), ("new", "deep", "y")):
            nodes, rows = elements(**options), [torch.randn(2), torch.randn(0), torch.randn(5)]
            module._set_rows(nodes, path, rows)
            assert rows_of(node[path] for node in nodes) == rows_of(rows), (path, options)
            found = module._read_rows(nodes, path)
            assert found is not None
            assert rows_of(found) == rows_of(rows), (path, options)
    node = TensorDict(device="meta")
    module._set_rows([node], ("x",), [torch.ones(2)])
    assert node["x"].device.type == "meta"


def test_a_row_that_does_not_fit_the_batch_of_an_inner_node_raises(known: bool) -> None:
    node = TensorDict(turns=TensorDict(text=torch.zeros(3), batch_size=[3]))
    with pytest.raises(RuntimeError, match="batch dimension mismatch"):
        module._set_rows([node], ("turns", "kl"), [torch.ones(5)])


def test_a_tensor_as_parent_of_the_entry(known: bool) -> None:
    for path in (("n", "x"), ("a", "b", "x", "y")):
        message = f"expected a nested TensorDict under {path[-2]!r}, got Tensor"
        with pytest.raises(TypeError, match=message):
            module._read_rows(elements(), path)
        with pytest.raises(TypeError, match=message):
            module._set_rows(elements(), path, [torch.ones(1)] * 3)


def test_an_entry_that_one_row_lacks_is_missing(known: bool) -> None:
    for path in (("m",), ("a", "m"), ("a", "m", "x"), ("m", "b", "x")):
        nodes = elements()
        module._set_rows(nodes[:2], path, [torch.ones(1)] * 2)
        assert module._read_rows(nodes, path) is None, path


def test_text_is_read_as_the_public_method_returns_it(known: bool) -> None:
    nodes = [TensorDict(text="a"), TensorDict(text="b")]
    found = module._read_rows(nodes, ("text",))
    assert found is not None
    assert [type(value) for value in found] == [type(node.get("text")) for node in nodes]
    assert [getattr(value, "data", value) for value in found] == ["a", "b"]


def test_tensorclasses_among_the_rows(known: bool) -> None:
    seconds: list[Any] = [LogProbs(full=torch.ones(1)), TensorDict(full=torch.ones(1))]
    for second in seconds:
        nodes = [TensorDict(log_probs=LogProbs(full=torch.zeros(2))), TensorDict(log_probs=second)]
        module._set_rows(nodes, ("log_probs", "response"), [torch.ones(1), torch.ones(2)])
        found = module._read_rows(nodes, ("log_probs", "response"))
        assert found is not None
        assert rows_of(found) == [[1], [1, 1]]
        assert isinstance(nodes[0]["log_probs"], LogProbs)


@pytest.mark.parametrize("stack_dim", [0, 1])
def test_the_nodes_of_a_stack_are_a_stack(known: bool, stack_dim: int) -> None:
    td = lazy_stack([lazy_stack(elements()), lazy_stack(elements())], stack_dim)
    found = read_node(td, "a")
    assert isinstance(found, LazyStackedTensorDict)
    assert (found.batch_size, found.stack_dim) == (td.batch_size, stack_dim)
    assert found[0, 0]["b"] is td[0, 0]["a"]["b"]
    want, got = read_ragged(td, KEY), read_ragged(found, ("b", "x"))
    assert want is not None
    assert got is not None
    assert torch.equal(got.values, want.values)
    assert got.lengths.tolist() == want.lengths.tolist()


def test_nodes_that_some_rows_lack() -> None:
    assert read_node(lazy_stack([element(0), TensorDict()]), "a") is None
    assert read_node(lazy_stack([lazy_stack([element(0)]), lazy_stack([TensorDict()])]), "a") is None
    assert read_node(TensorDict(), "a") is None
