"""TensorDicts of one row each, taken together: what a lazy stack is made of, one level of nesting at a time.

A public call of a TensorDict takes about a microsecond, and a batch of 256 rows would need thousands. Plain TensorDicts
are therefore read, copied and written through the attributes that those of tensordict 0.14 have. For every other kind of
node, and should a later version have other attributes, the public methods do the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict import (
    LazyStackedTensorDict,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
    is_tensorclass,
)
from torch import Tensor

__all__ = ["Tree", "copy_rows", "node_of", "read_rows", "restack", "set_rows"]

Tree = dict[str, "Tree"]

_KNOWN = vars(TensorDict()).keys() == {"_tensordict", "_batch_size", "_device", "_td_dim_names"}


def _plain(nodes: Sequence[Any]) -> bool:
    return _KNOWN and set(map(type, nodes)) == {TensorDict}


def node_of(value: Any) -> Any:
    """The TensorDict behind a tensorclass; anything else as it is."""
    return value._tensordict if is_tensorclass(value) and not is_non_tensor(value) else value


def read_rows(nodes: Sequence[Any], path: tuple[str, ...]) -> list[Any] | None:
    """The entry under ``path`` of each node; None as soon as one has none.

    Raises:
        TypeError: if something on the way is no TensorDict.
    """
    above, found = nodes, _children(nodes, path, 0)
    for depth in range(1, len(path)):
        if found is None:
            return None
        above, found = found, _children(found, path, depth)
    if found is None or set(map(type, found)) <= {Tensor, TensorDict}:
        return found
    # What is no tensor, as the public method gives it.
    found = [node_of(node_of(node).get(path[-1], None)) for node in above]
    return None if any(value is None for value in found) else found


def _children(nodes: Sequence[Any], path: tuple[str, ...], depth: int) -> list[Any] | None:
    """The entry ``path[depth]`` of each node, which was found under what is before it in the path."""
    name = path[depth]
    if _plain(nodes):
        try:
            return [node._tensordict[name] for node in nodes]
        except KeyError:
            return None
    found = [node.get(name, None) for node in _checked(nodes, path[:depth])]
    return None if any(value is None for value in found) else found


def _checked(nodes: Sequence[Any], path: tuple[str, ...]) -> list[TensorDictBase]:
    """The nodes, which were found under ``path``, behind their tensorclasses."""
    nodes = [node_of(node) for node in nodes]
    for node in nodes:
        if not isinstance(node, TensorDictBase):
            raise TypeError(f"expected a nested TensorDict under {path[-1]!r}, got {type(node).__name__}")
    return nodes


def set_rows(nodes: Sequence[Any], path: tuple[str, ...], rows: Sequence[Tensor]) -> None:
    """Set the entry under ``path`` of each node to its row, in place; what is missing on the way is made.

    Raises:
        TypeError: if something on the way is no TensorDict.
        RuntimeError: if a node is locked.
    """
    *way, last = path
    for depth, name in enumerate(way):
        inside = _children(nodes, path, depth)
        nodes = [_child_or_new(node, name) for node in _checked(nodes, path[:depth])] if inside is None else inside
    if _plain(nodes) and nodes[0].device is None and nodes[0].batch_dims == 0:
        for node, row in zip(nodes, rows, strict=True):
            node._set_str(last, row, inplace=False, validated=True)
        return
    for node, row in zip(_checked(nodes, path[:-1]), rows, strict=True):
        node.set(last, row)


def _child_or_new(node: TensorDictBase, name: str) -> Any:
    child = node.get(name, None)
    if child is None:
        child = TensorDict(batch_size=node.batch_size, device=node.device)
        node.set(name, child)
    return child


def copy_rows(nodes: Sequence[Any], tree: Tree | None = None) -> list[Any]:
    """Copies of the nodes that share their tensors.

    Args:
        nodes: TensorDicts or tensorclasses.
        tree: which nodes inside them are copied too; by default all.
    """
    if tree is None or not _plain(nodes):
        return [node.copy() if is_tensor_collection(node) else node for node in nodes]
    copies = [_shallow_copy(node) for node in nodes]
    for name, below in tree.items():
        owners = [copy._tensordict for copy in copies if name in copy._tensordict]
        inside = copy_rows([entries[name] for entries in owners], below)
        for entries, node in zip(owners, inside, strict=True):
            entries[name] = node
    return copies


def _shallow_copy(node: TensorDict) -> TensorDict:
    copy = TensorDict.__new__(TensorDict)
    copy._tensordict = dict(node._tensordict)
    copy._batch_size, copy._device, copy._td_dim_names = node._batch_size, node._device, node._td_dim_names
    return copy


def restack(nodes: Sequence[Any], like: LazyStackedTensorDict) -> LazyStackedTensorDict:
    """A lazy stack of ``nodes`` along the dimension of ``like``."""
    # Without the checks of the constructor: these nodes were stacked before.
    stack = getattr(LazyStackedTensorDict, "_new_lazy_unsafe", LazyStackedTensorDict)
    return stack(*nodes, stack_dim=like.stack_dim, stack_dim_name=like._td_dim_name)
