"""Reading and writing variable-length entries of TensorDicts: dense, nested, or leaves of a lazy stack."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor

from torchrl_llm_kl.ragged._containers import Container, Dense, Rows, same_rows, split_rows
from torchrl_llm_kl.ragged._ragged import Ragged
from torchrl_llm_kl.ragged._rows import Tree, copy_rows, node_of, read_rows, restack, set_rows

__all__ = ["has_entry", "own_leaves", "read_column", "read_node", "read_ragged", "write_ragged"]

_LOCKED = "Cannot modify locked TensorDict. Unlock it first: td.unlock_()."


def _path(key: NestedKey) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else tuple(key)


# ------------------------------------------------------------------ reading


def read_column(td: TensorDictBase, key: NestedKey) -> Any | None:
    """The entry under ``key``; for an entry of a lazy stack a :class:`list` of its leaves in row-major order.

    Args:
        td: a TensorDict of any batch size; its own entries may be lazy stacks.
        key: the entry.

    Returns:
        A tensor (dense or nested), a list with one value for each element of the batch, any non-tensor data as
        TensorDict returns it, or None if any leaf misses the entry.

    Raises:
        TypeError: if something on the way to the entry is no TensorDict.
    """
    path = _path(key)
    if isinstance(td, LazyStackedTensorDict):
        return _read_stack(td, path)
    value = node_of(td.get(path[0], None))
    if len(path) == 1 or value is None:
        return value
    if not isinstance(value, TensorDictBase):
        raise TypeError(f"expected a nested TensorDict under {path[0]!r} to hold {key!r}, got {type(value).__name__}")
    return read_column(value, path[1:])


def _read_stack(td: LazyStackedTensorDict, path: tuple[str, ...]) -> list[Any] | None:
    if td.batch_dims == 1:  # each element is a row
        return read_rows(td.tensordicts, path) or None
    parts = []
    for sub in map(node_of, td.tensordicts):
        part = read_column(sub, path)
        if part is None:
            return None
        parts.append(part if isinstance(part, list) else _unbind(part, sub.batch_size))
    # Row-major order: each index of the dimensions before the stack's own takes an equal share of every part.
    outer = td.batch_size[: td.stack_dim].numel()
    shares = [len(part) // outer for part in parts] if outer else []
    return [
        row for i in range(outer) for part, n in zip(parts, shares, strict=True) for row in part[i * n : (i + 1) * n]
    ] or None


def _unbind(value: Any, batch_size: torch.Size) -> list[Any]:
    if not isinstance(value, Tensor):
        return [value[index] for index in product(*map(range, batch_size))]
    if not value.is_nested:
        value = value.reshape(batch_size.numel(), *value.shape[len(batch_size) :])
    return list(value.unbind())


def read_node(td: TensorDictBase, name: str) -> TensorDictBase | None:
    """The TensorDict under ``name``; of a lazy stack a lazy stack of its elements' own, made now. None if any misses it."""
    if not isinstance(td, LazyStackedTensorDict):
        return td.get(name, None)
    if td.batch_dims == 1:
        nodes = read_rows(td.tensordicts, (name,))
    else:
        nodes = [read_node(node_of(sub), name) for sub in td.tensordicts]
    return restack(nodes, td) if nodes and all(node is not None for node in nodes) else None


def has_entry(td: TensorDictBase, key: NestedKey) -> bool:
    """Whether every element of ``td`` has the entry, and it is not None."""
    return read_column(td, key) is not None


def read_ragged(td: TensorDictBase, key: NestedKey, mask_key: NestedKey | None = None) -> Ragged | None:
    """Read a variable-length entry ``[*B, (T), *F]`` in whatever form it is stored.

    Args:
        td: the TensorDict.
        key: the entry: a dense tensor (padded), a nested tensor, or the leaves of a lazy stack.
        mask_key: a boolean entry of the same form that is True where ``key`` holds a value and False at padding;
            skipped when ``td`` has no such entry. Nested data needs none.

    Returns:
        The entry, or None when it is missing.

    Raises:
        ValueError: if the mask does not have the form of the entry.
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
        found, expected = mask.container.row_sizes, data.container.row_sizes
        row = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
        raise ValueError(
            f"{mask_key!r} must have the length of {key!r}: sequence {row} has {found[row]} and {expected[row]} positions"
        )
    keep = mask.slots().bool()
    return Ragged.from_slots(data.slots(), data.container, keep if data.keep is None else keep & data.keep)


def _from_column(value: Any, batch_size: torch.Size, key: Any) -> Ragged:
    if isinstance(value, list):
        if not all(issubclass(kind, Tensor) for kind in set(map(type, value))):
            raise TypeError(f"expected tensors under {key!r}, got {type(value[0]).__name__}")
        return Ragged.from_list(value, batch_size)
    if not isinstance(value, Tensor):
        raise TypeError(f"expected a tensor under {key!r}, got {type(value).__name__}")
    if value.is_nested:
        return Ragged.from_nested(value)
    if value.ndim <= len(batch_size):
        raise ValueError(
            f"expected {key!r} to have a token dimension after the batch {tuple(batch_size)}, got shape {tuple(value.shape)}"
        )
    if batch_size.numel() == 0:
        raise ValueError(f"the batch is empty: {key!r} has shape {tuple(value.shape)}; nothing to score, drop it")
    return Ragged.from_padded(value, batch_dims=len(batch_size))


# ------------------------------------------------------------------ writing


def write_ragged(
    td: TensorDictBase,
    key: NestedKey,
    slots: Tensor,
    container: Container,
) -> TensorDictBase:
    """Write ``slots [M, *F]`` under ``key``, in the form that ``container`` describes.

    Rows go to the leaves of a lazy stack one by one; a dense TensorDict gets a dense or nested tensor. Ragged rows do
    not fit into a dense TensorDict of several batch dimensions: then a lazy stack with the same entries is returned.

    Args:
        td: where to write; changed in place whenever it can hold the rows.
        key: the entry.
        slots: one value for each slot of the container.
        container: the form.

    Returns:
        ``td``, or the lazy stack that took its place.
    """
    path, sizes = _path(key), container.row_sizes
    if not isinstance(td, LazyStackedTensorDict):
        if len(path) > 1:
            sub = node_of(td.get(path[0], None))
            if sub is None:
                sub = _empty(td.batch_size, ragged=isinstance(container, Rows) and not _equal(sizes))
            new = write_ragged(sub, path[1:], slots, container)
            if new is not sub or td.get(path[0], None) is None:
                td.set(path[0], new)
            return td
        if isinstance(container, Rows):
            if td.batch_dims == 0 or _equal(sizes):
                container = Dense(td.batch_size, sizes[0], slots.device)
            elif td.batch_dims == 1:
                return td.set(path[0], torch.nested.as_nested_tensor(container.build(slots), layout=torch.strided))
        if not isinstance(container, Rows) and container.batch_shape == td.batch_size:
            return td.set(path[0], container.build(slots))
        td = _lazy(td)
    return _write_rows(td, path, split_rows(slots, sizes))


def _equal(sizes: list[int]) -> bool:
    return len(set(sizes)) == 1


def _empty(batch_size: torch.Size, *, ragged: bool) -> TensorDictBase:
    return _lazy(TensorDict(batch_size=batch_size)) if ragged and len(batch_size) else TensorDict(batch_size=batch_size)


def _lazy(td: TensorDictBase) -> TensorDictBase:
    """A lazy stack, to the last batch dimension, with the entries of ``td``."""
    if td.batch_dims == 0:
        return td
    return lazy_stack([_lazy(sub) for sub in td.unbind(0)], 0)


def _write_rows(td: TensorDictBase, path: tuple[str, ...], rows: Sequence[Tensor]) -> TensorDictBase:
    """Write rows in row-major order into the leaves of ``td``; what is returned takes its place."""
    if not isinstance(td, LazyStackedTensorDict):
        if td.batch_dims == 0:
            return td.set(path, rows[0])
        container = Rows([row.shape[0] for row in rows], td.batch_size)
        return write_ragged(td, path, torch.cat(list(rows)), container)
    if td.batch_dims == 1:
        set_rows(td.tensordicts, path, rows)
        return td
    outer, count = td.batch_size[: td.stack_dim].numel(), len(td.tensordicts)
    share = len(rows) // (outer * count)
    for i, sub in enumerate(td.tensordicts):
        starts = [(j * count + i) * share for j in range(outer)]
        node = node_of(sub)
        new = _write_rows(node, path, [row for start in starts for row in rows[start : start + share]])
        if new is not node:  # a dense element that ragged rows do not fit into became a lazy stack
            td.tensordicts[i] = new if node is sub else type(sub)._from_tensordict(new)
    return td


def own_leaves(td: TensorDictBase, *keys: NestedKey) -> None:
    """Give lazy stacks inside ``td`` shallow copies of their elements, so that writing reaches no other owner.

    A replay buffer hands out lazy stacks of the very TensorDicts that it stores; what a transform writes into one on
    sampling must not end up in the storage.

    Args:
        td: changed in place.
        keys: what will be written; elsewhere nothing needs to be copied. By default anything may be.
    """
    tree: Tree = {}
    for key in keys:
        below = tree
        for name in _path(key)[:-1]:
            below = below.setdefault(name, {})
    _own(td, tree if keys else None)


def _own(td: TensorDictBase, tree: Tree | None) -> None:
    if td.is_locked:
        raise RuntimeError(_LOCKED)
    if not isinstance(td, LazyStackedTensorDict):
        for name in list(td.keys()) if tree is None else tree:
            value = node_of(td.get(name, None))
            if isinstance(value, TensorDictBase):
                _own(value, None if tree is None else tree[name])
        return
    td.tensordicts = _copies(td, tree)


def _copies(td: LazyStackedTensorDict, tree: Tree | None) -> list[Any]:
    """Copies of the elements of a stack."""
    if td.batch_dims == 1:
        return copy_rows(td.tensordicts, tree)
    return [
        restack(_copies(sub, tree), sub) if isinstance(sub, LazyStackedTensorDict) else sub.copy()
        for sub in td.tensordicts
    ]
