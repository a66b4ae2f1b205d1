"""Read and write variable-length entries of TensorDicts: dense, nested, or leaves of a lazy stack.

The last section handles all elements of a lazy stack ("nodes", one row each) together, one level of nesting at a time. A
public method of a TensorDict takes about a microsecond, and a batch of 256 rows would need thousands of calls. So plain
TensorDicts are read, copied and written through their attributes in tensordict 0.14. Other kinds of nodes, and releases with
other attributes, use the public methods, with the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, TypeAlias, cast

import torch
from tensordict import (
    LazyStackedTensorDict,
    NestedKey,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
    is_tensorclass,
    lazy_stack,
)
from torch import Tensor
from typing_extensions import Unpack

from torchrl_llm_kl._numerics import to_host
from torchrl_llm_kl._private import nested_sizes, part_of_class
from torchrl_llm_kl.ragged._ragged import Container, Dense, Ragged, Rows, same_rows, split_rows

#: An entry or an element as TensorDict returns it: a tensor, a TensorDict, a tensorclass or non-tensor data. tensordict's own
#: annotations contradict one another, so the type is Any.
Node: TypeAlias = Any
# Names of nested TensorDicts, level by level.
_Tree = dict[str, "_Tree"]


class EntryTypeError(TypeError):
    """An entry of a TensorDict has data of an unexpected type."""


# ------------------------------------------------------------------ reading


def read_column(td: TensorDictBase, key: NestedKey) -> Node | None:
    """Read an entry of a TensorDict of any batch size. Returns None if any element lacks it.

    If ``td`` or a parent of the entry is a lazy stack, the result is a :class:`list` with one value per element of the batch,
    in row-major order. Otherwise it is a tensor (dense or nested) or non-tensor data, as TensorDict returns it. A parent that
    is not a TensorDict raises a TypeError.

    Example:
        >>> td = lazy_stack([TensorDict(x=torch.ones(1)), TensorDict(x=torch.ones(2))])
        >>> read_column(td, "x")
        [tensor([1.]), tensor([1., 1.])]
    """
    path = _names_of(key)
    if isinstance(td, LazyStackedTensorDict):
        return _read_stack(td, path)
    value = node_of(td.get(path[0], None))
    if len(path) == 1 or value is None:
        return value
    (inner,) = _tensordicts([value], path[:1])
    return read_column(inner, path[1:])


def _names_of(key: NestedKey) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else tuple(key)


def _read_stack(td: LazyStackedTensorDict, path: tuple[str, ...]) -> list[Node] | None:
    if td.batch_dims == 1:  # each element is one row
        return _read_rows(td.tensordicts, path) or None
    parts = []
    for sub in map(node_of, td.tensordicts):
        part = read_column(sub, path)
        if part is None:
            return None
        parts.append(part if isinstance(part, list) else unbind_rows(part, sub.batch_size))
    # Row-major order: for each index of the dimensions before the stack dimension, take an equal share of every part.
    outer = td.batch_size[: td.stack_dim].numel()
    shares = [len(part) // outer for part in parts] if outer else []
    return [
        row for i in range(outer) for part, n in zip(parts, shares, strict=True) for row in part[i * n : (i + 1) * n]
    ] or None


def unbind_rows(value: Node, batch_size: torch.Size) -> list[Node]:
    """The rows of an entry of a dense TensorDict, in row-major order."""
    if not isinstance(value, Tensor):
        return [value[index] for index in product(*map(range, batch_size))]
    if not value.is_nested:
        value = value.reshape(batch_size.numel(), *value.shape[len(batch_size) :])
    return list(value.unbind())


def read_node(td: TensorDictBase, name: str) -> TensorDictBase | None:
    """Read the TensorDict under ``name``. Returns None if any element lacks it. From a lazy stack the result is a lazy stack.

    Example:
        >>> read_node(TensorDict(next=TensorDict(x=torch.ones(2))), "next")["x"]
        tensor([1., 1.])
    """
    if not isinstance(td, LazyStackedTensorDict):
        return td.get(name, None)
    if td.batch_dims == 1:
        nodes = _read_rows(td.tensordicts, (name,))
    else:
        nodes = [read_node(node_of(sub), name) for sub in td.tensordicts]
    return _restack(nodes, td) if nodes and all(node is not None for node in nodes) else None


def has_entry(td: TensorDictBase, key: NestedKey) -> bool:
    """Whether every element of ``td`` has the entry, with another value than None.

    Example:
        >>> has_entry(lazy_stack([TensorDict(x=torch.ones(1)), TensorDict()]), "x")
        False
    """
    return read_column(td, key) is not None


def read_ragged(td: TensorDictBase, key: NestedKey, mask_key: NestedKey | None = None) -> Ragged | None:
    """Read a variable-length entry ``[*B, (T), *F]``: dense (padded), nested, or the leaves of a lazy stack.

    ``mask_key`` is a boolean entry, True where ``key`` has a value and False at padding. Rows of different lengths raise a
    ValueError. It is ignored if ``td`` lacks it, and nested data needs none. Returns None if ``key`` is missing.

    Example:
        >>> td = TensorDict(x=torch.tensor([[5, 0], [6, 7]]), mask=torch.tensor([[True, False], [True, True]]))
        >>> read_ragged(td.auto_batch_size_(1), "x", "mask").to_list()
        [tensor([5]), tensor([6, 7])]
    """
    value = read_column(td, key)
    if value is None:
        return None
    data = _from_column(value, td.batch_size, key)
    mask_value = None if mask_key is None else read_column(td, mask_key)
    if mask_value is None:
        return data
    mask = _from_column(mask_value, td.batch_size, mask_key)
    if not same_rows(mask.container, data.container):
        sizes = zip(mask.container.row_sizes, data.container.row_sizes, strict=True)
        row, (own, other) = next((i, pair) for i, pair in enumerate(sizes) if pair[0] != pair[1])
        raise ValueError(f"{mask_key!r} has {own} positions in sequence {row}, but {key!r} has {other}.")
    keep = mask.slots().bool()
    return Ragged.from_slots(data.slots(), data.container, keep if data.keep is None else keep & data.keep)


def _from_column(value: Node, batch_size: torch.Size, key: object) -> Ragged:
    kinds = set(map(type, value)) if isinstance(value, list) else {type(value)}
    if not all(issubclass(kind, Tensor) for kind in kinds):
        raise EntryTypeError(f"expected tensors under {key!r}, got {', '.join(kind.__name__ for kind in kinds)}.")
    if isinstance(value, list):
        return Ragged.from_list(value, batch_size)
    if value.is_nested:
        return Ragged.from_nested(value)
    if value.ndim <= len(batch_size):
        raise ValueError(
            f"{key!r} has shape {tuple(value.shape)}: expected a token dimension after {tuple(batch_size)}."
        )
    return Ragged.from_padded(value, batch_dims=len(batch_size))


def on_host(
    td: TensorDictBase, keys: Sequence[NestedKey], *others: Tensor
) -> tuple[TensorDictBase, Unpack[tuple[Tensor, ...]]]:
    """Return ``td`` with the entries ``keys`` on the CPU, and then the tensors ``others`` on the CPU.

    ``td`` itself is returned if its entries are there, else a shallow copy. Everything comes in one copy, a single host
    synchronization. Entries that are missing or are not tensors stay as they are. If the first entry with tensors is on the
    CPU, the later ones are assumed to be there too.

    Example:
        >>> td = TensorDict(x=torch.ones(2))
        >>> on_host(td, ["x", "y"])[0] is td
        True
    """
    columns: dict[tuple[str, ...], Node] = {}
    for key in keys:
        value = read_column(td, key)
        if _is_away(value):
            columns[_names_of(key)] = value
        elif not columns and isinstance(value[0] if isinstance(value, list) else value, Tensor):
            break  # a batch on the CPU: looking at all rows of all entries would take longer than the rest
    if not columns:
        return (td, *to_host(*others))
    parts = {path: _buffers(value) for path, value in columns.items()}
    copies = iter(to_host(*(x for buffers in parts.values() for x in buffers), *others))
    out = td.copy().clear_device_()  # set() would move the entries back to the TensorDict's device
    for path, value in columns.items():
        buffers = [next(copies) for _ in parts[path]]
        if isinstance(value, list):
            out = _write_rows(out, path, buffers)
        else:
            out.set(path, _rebuilt(value, *buffers))
    return (out, *copies)


def _is_away(value: Node) -> bool:
    """Whether a column consists of tensors, some of them on an accelerator."""
    rows = value if isinstance(value, list) else [value]
    return all(isinstance(row, Tensor) for row in rows) and any(row.device.type != "cpu" for row in rows)


def _buffers(value: Node) -> list[Tensor]:
    """The dense tensors that a column consists of."""
    if isinstance(value, list):
        return value
    if not value.is_nested:
        return [value]
    if value.layout == torch.strided:
        return [value.contiguous().values()]
    return [x for x in (value.values(), value.offsets(), value.lengths()) if x is not None]


def _rebuilt(value: Tensor, *buffers: Tensor) -> Tensor:
    """Rebuild the form of ``value`` from other buffers."""
    if not value.is_nested:
        return buffers[0]
    if value.layout != torch.strided:
        values, offsets, *lengths = buffers
        return torch.nested.nested_tensor_from_jagged(values, offsets, lengths[0] if lengths else None)
    shapes = nested_sizes(value).tolist()
    rows = buffers[0].split([torch.Size(shape).numel() for shape in shapes])
    return torch.nested.as_nested_tensor([row.view(shape) for row, shape in zip(rows, shapes, strict=True)])


# ------------------------------------------------------------------ writing


def write_ragged(td: TensorDictBase, key: NestedKey, slots: Tensor, container: Container) -> TensorDictBase:
    """Write ``slots [M, *F]``, one per slot of ``container``, under ``key`` in the form of the container.

    A lazy stack gets one row per leaf, a dense TensorDict a dense or nested tensor. ``td`` is changed in place and returned. A
    dense ``td`` with several batch dimensions cannot hold ragged rows: then the result is a lazy stack that replaces it.

    Example:
        >>> td = lazy_stack([TensorDict(), TensorDict()])
        >>> write_ragged(td, "x", torch.arange(3), Rows([1, 2], td.batch_size))[1]["x"]
        tensor([1, 2])
    """
    path, sizes = _names_of(key), container.row_sizes
    equal = len(set(sizes)) == 1
    if not isinstance(td, LazyStackedTensorDict):
        if len(path) > 1:
            sub = node_of(td.get(path[0], None))
            if sub is None:
                sub = TensorDict(batch_size=td.batch_size)
                if isinstance(container, Rows) and not equal:
                    sub = _lazy(sub)
            new = write_ragged(sub, path[1:], slots, container)
            if new is not sub or td.get(path[0], None) is None:
                td.set(path[0], new)
            return td
        if isinstance(container, Rows):
            if td.batch_dims == 0 or equal:  # rows of equal lengths fit into a dense tensor
                container = Dense(td.batch_size, sizes[0], slots.device)
            elif td.batch_dims == 1:
                return td.set(path[0], torch.nested.as_nested_tensor(container.build(slots), layout=torch.strided))
        if not isinstance(container, Rows) and container.batch_shape == td.batch_size:
            return td.set(path[0], container.build(slots))
        td = _lazy(td)
    return _write_rows(td, path, split_rows(slots, sizes))


def _lazy(td: TensorDictBase) -> TensorDictBase:
    return td if td.batch_dims == 0 else lazy_stack([_lazy(sub) for sub in td.unbind(0)], 0)


def _write_rows(td: TensorDictBase, path: tuple[str, ...], rows: Sequence[Tensor]) -> TensorDictBase:
    """Write rows in row-major order into the leaves of ``td``. The result replaces ``td``."""
    if not isinstance(td, LazyStackedTensorDict):
        if td.batch_dims == 0:
            return td.set(path, rows[0])
        container = Rows([row.shape[0] for row in rows], td.batch_size)
        return write_ragged(td, path, torch.cat(list(rows)), container)
    if td.batch_dims == 1:
        _set_rows(td.tensordicts, path, rows)
        return td
    outer, count = td.batch_size[: td.stack_dim].numel(), len(td.tensordicts)
    share = len(rows) // (outer * count)
    for i, sub in enumerate(td.tensordicts):
        starts = [(j * count + i) * share for j in range(outer)]
        node = node_of(sub)
        new = _write_rows(node, path, [row for start in starts for row in rows[start : start + share]])
        if new is not node:  # a dense element that cannot hold ragged rows was replaced by a lazy stack
            td.tensordicts[i] = new if node is sub else type(sub).from_tensordict(new)
    return td


# ------------------------------------------------------------------ ownership


def own_leaves(td: TensorDictBase, *keys: NestedKey) -> None:
    """Replace the elements of lazy stacks in ``td``, in place, by shallow copies, so that a write changes only ``td``.

    A replay buffer returns lazy stacks of the TensorDicts that it stores. Entries that a transform writes into a sample must
    not end up in the storage. ``keys`` are the entries to be written, and only their parents are copied. Without keys
    everything is copied.

    Example:
        >>> stored = TensorDict()
        >>> sample = lazy_stack([stored])
        >>> own_leaves(sample, "x")
        >>> _ = write_ragged(sample, "x", torch.ones(1), Rows([1], sample.batch_size))
        >>> "x" in sample, "x" in stored
        (True, False)
    """
    tree: _Tree = {}
    for key in keys:
        below = tree
        for name in _names_of(key)[:-1]:
            below = below.setdefault(name, {})
    _own(td, tree if keys else None)


def _own(td: TensorDictBase, tree: _Tree | None) -> None:
    if td.is_locked:
        raise RuntimeError("Cannot modify locked TensorDict. Unlock it first: td.unlock_().")
    if isinstance(td, LazyStackedTensorDict):
        td.tensordicts = _copies(td, tree)
        return
    for name in list(td.keys()) if tree is None else tree:
        value = node_of(td.get(name, None))
        if isinstance(value, TensorDictBase):
            _own(value, None if tree is None else tree[name])


def _copies(td: LazyStackedTensorDict, tree: _Tree | None) -> list[Node]:
    if td.batch_dims == 1:
        return _copy_rows(td.tensordicts, tree)
    return [
        _restack(_copies(sub, tree), sub) if isinstance(sub, LazyStackedTensorDict) else sub.copy()
        for sub in td.tensordicts
    ]


# ------------------------------------------------------------------ the rows of a lazy stack

# Whether this release's TensorDict has exactly the attributes that the code below reads and writes.
_ATTRIBUTES_KNOWN = vars(TensorDict()).keys() == {"_tensordict", "_batch_size", "_device", "_td_dim_names"}


def _all_plain(nodes: Sequence[Node]) -> bool:
    return _ATTRIBUTES_KNOWN and set(map(type, nodes)) == {TensorDict}


def node_of(value: Node) -> Node:
    """The TensorDict inside a tensorclass. Any other value is returned unchanged."""
    return part_of_class(value, "_tensordict") if is_tensorclass(value) and not is_non_tensor(value) else value


def fields_of(value: Node) -> dict[str, object]:
    """The fields of a tensorclass that are neither tensors nor TensorDicts."""
    return cast("dict[str, object]", part_of_class(value, "_non_tensordict"))


def _read_rows(nodes: Sequence[Node], path: tuple[str, ...]) -> list[Node] | None:
    """The entry under ``path`` of each node, or None if any node lacks it."""
    above: Sequence[Node] = nodes
    entries = _children(nodes, path, 0)
    for depth in range(1, len(path)):
        if entries is None:
            return None
        above, entries = entries, _children(entries, path, depth)
    if entries is None or set(map(type, entries)) <= {Tensor, TensorDict}:
        return entries
    # Attributes hold non-tensor data in a wrapper. The public method returns the data itself.
    entries = [node_of(node_of(node).get(path[-1], None)) for node in above]
    return None if any(value is None for value in entries) else entries


def _children(nodes: Sequence[Node], path: tuple[str, ...], depth: int) -> list[Node] | None:
    """The entry ``path[depth]`` of each node, or None if any node lacks it. The nodes were read from ``path[:depth]``."""
    name = path[depth]
    if _all_plain(nodes):
        try:
            return [node._tensordict[name] for node in nodes]
        except KeyError:
            return None
    entries = [node.get(name, None) for node in _tensordicts(nodes, path[:depth])]
    return None if any(value is None for value in entries) else entries


def _tensordicts(nodes: Sequence[Node], path: tuple[str, ...]) -> list[TensorDictBase]:
    """The nodes under ``path`` without tensorclasses around them. Raises a TypeError if one is not a TensorDict."""
    nodes = [node_of(node) for node in nodes]
    for node in nodes:
        if not isinstance(node, TensorDictBase):
            raise EntryTypeError(f"expected a nested TensorDict under {path[-1]!r}, got {type(node).__name__}.")
    return nodes


def _set_rows(nodes: Sequence[Node], path: tuple[str, ...], rows: Sequence[Tensor]) -> None:
    """Set the entry under ``path`` of each node to its row, in place. Missing parents are created."""
    *parents, last = path
    for depth, name in enumerate(parents):
        inside = _children(nodes, path, depth)
        nodes = [_child_or_new(node, name) for node in _tensordicts(nodes, path[:depth])] if inside is None else inside
    if _all_plain(nodes) and nodes[0].device is None and nodes[0].batch_dims == 0:
        for node, row in zip(nodes, rows, strict=True):
            node._set_str(last, row, inplace=False, validated=True)  # set() would check type and shape of each row
        return
    for node, row in zip(_tensordicts(nodes, path[:-1]), rows, strict=True):
        node.set(last, row)


def _child_or_new(node: TensorDictBase, name: str) -> Node:
    if node.get(name, None) is None:
        node.set(name, TensorDict(batch_size=node.batch_size, device=node.device))
    return node.get(name)


def _copy_rows(nodes: Sequence[Node], tree: _Tree | None = None) -> list[Node]:
    """Shallow copies of the nodes. Nodes inside them are copied if ``tree`` names them. None copies all."""
    if tree is None or not _all_plain(nodes):
        return [node.copy() if is_tensor_collection(node) else node for node in nodes]
    copies = [_shallow_copy(node) for node in nodes]
    for name, below in tree.items():
        owners = [copy._tensordict for copy in copies if name in copy._tensordict]
        inside = _copy_rows([entries[name] for entries in owners], below)
        for entries, node in zip(owners, inside, strict=True):
            entries[name] = node
    return copies


def _shallow_copy(node: TensorDict) -> TensorDict:
    copy = TensorDict.__new__(TensorDict)
    copy._tensordict = dict(node._tensordict)
    copy._batch_size, copy._device, copy._td_dim_names = node._batch_size, node._device, node._td_dim_names
    return copy


def _restack(nodes: Sequence[Node], like: LazyStackedTensorDict) -> LazyStackedTensorDict:
    """A lazy stack of ``nodes`` along the stack dimension of ``like``."""
    # The constructor's checks are not needed, since these nodes were stacked before.
    stack = getattr(LazyStackedTensorDict, "_new_lazy_unsafe", LazyStackedTensorDict)
    return stack(*nodes, stack_dim=like.stack_dim, stack_dim_name=like.names[like.stack_dim])
