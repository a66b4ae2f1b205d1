"""Reading and writing variable-length entries of TensorDicts: dense, nested, or leaves of a lazy stack."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    NestedKey,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensorclass,
    lazy_stack,
)
from torch import Tensor

from torchrl_llm_kl.ragged._containers import Container, Dense, Rows
from torchrl_llm_kl.ragged._ragged import Ragged

__all__ = ["has_entry", "own_leaves", "read_column", "read_ragged", "write_ragged"]


def _path(key: NestedKey) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else tuple(key)


def _node(value: Any) -> Any:
    """The TensorDict behind a tensorclass; anything else as it is."""
    return value._tensordict if is_tensorclass(value) and not is_non_tensor(value) else value


def read_column(td: TensorDictBase, key: NestedKey) -> Any | None:
    """The entry under ``key``; for an entry of a lazy stack a :class:`list` of its leaves in row-major order.

    Args:
        td: a TensorDict of any batch size; its own entries may be lazy stacks.
        key: the entry.

    Returns:
        A tensor (dense or nested), a list with one value for each element of the batch, any non-tensor data as
        TensorDict returns it, or None if any leaf misses the entry.
    """
    path = _path(key)
    if isinstance(td, LazyStackedTensorDict):
        ids = torch.arange(td.batch_size.numel()).reshape(td.batch_size)
        leaves: list[Any] = [None] * ids.numel()
        _collect(td, path, ids, leaves)
        return None if not leaves or any(leaf is None for leaf in leaves) else leaves
    value = _node(td.get(path[0], None))
    if len(path) == 1 or value is None:
        return value
    if not isinstance(value, TensorDictBase):
        raise TypeError(f"expected a nested TensorDict under {path[0]!r} to hold {key!r}, got {type(value).__name__}")
    return read_column(value, path[1:] if len(path) > 2 else path[1])


def _collect(td: TensorDictBase, path: tuple[str, ...], ids: Tensor, leaves: list[Any]) -> None:
    """Fill ``leaves[ids]`` with the entries of ``td``, whose batch is laid out as ``ids``."""
    if isinstance(td, LazyStackedTensorDict):
        for sub, sub_ids in zip(td.tensordicts, ids.unbind(td.stack_dim), strict=True):
            _collect(_node(sub), path, sub_ids, leaves)
        return
    value = _node(td.get(path[0], None))
    if value is None:
        return
    if len(path) > 1:
        if not isinstance(value, TensorDictBase):
            raise TypeError(f"expected a nested TensorDict under {path[0]!r}, got {type(value).__name__}")
        _collect(value, path[1:], ids, leaves)
        return
    if ids.ndim == 0:
        leaves[int(ids)] = value
        return
    rows: list[Any] | None = list(value.unbind()) if isinstance(value, Tensor) and value.is_nested else None
    if rows is None and isinstance(value, Tensor):
        rows = list(value.reshape(ids.numel(), *value.shape[ids.ndim :]))
    if rows is None:
        rows = [
            value[tuple(index)] for index in torch.cartesian_prod(*map(torch.arange, ids.shape)).reshape(-1, ids.ndim)
        ]
    for i, row in zip(ids.flatten().tolist(), rows, strict=True):
        leaves[i] = row


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
    if not torch.equal(mask.container.row_lengths, data.container.row_lengths):
        found, expected = mask.container.row_lengths.tolist(), data.container.row_lengths.tolist()
        row = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
        raise ValueError(
            f"{mask_key!r} must have the length of {key!r}: sequence {row} has {found[row]} and {expected[row]} positions"
        )
    keep = mask.slots().bool()
    return Ragged.from_slots(data.slots(), data.container, keep if data.keep is None else keep & data.keep)


def _from_column(value: Any, batch_size: torch.Size, key: Any) -> Ragged:
    if isinstance(value, list):
        if not all(isinstance(row, Tensor) for row in value):
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
    lengths = container.row_lengths
    if not isinstance(td, LazyStackedTensorDict):
        path = _path(key)
        if len(path) > 1:
            sub = _node(td.get(path[0], None))
            if sub is None:
                sub = _empty(td.batch_size, ragged=isinstance(container, Rows) and not _equal(lengths))
            new = write_ragged(sub, path[1:] if len(path) > 2 else path[1], slots, container)
            if new is not sub or td.get(path[0], None) is None:
                td.set(path[0], new)
            return td
        if isinstance(container, Rows):
            if td.batch_dims == 0 or _equal(lengths):
                container = Dense(td.batch_size, int(lengths[0]), slots.device)
            elif td.batch_dims == 1:
                return td.set(key, torch.nested.as_nested_tensor(container.build(slots), layout=torch.strided))
        if not isinstance(container, Rows) and container.batch_shape == td.batch_size:
            return td.set(key, container.build(slots))
        td = _lazy(td)
    rows = list(slots.split(lengths.tolist()))
    _distribute(td, key, torch.arange(len(rows)).reshape(td.batch_size), rows)
    return td


def _equal(lengths: Tensor) -> bool:
    return bool((lengths == lengths[0]).all())


def _empty(batch_size: torch.Size, *, ragged: bool) -> TensorDictBase:
    return _lazy(TensorDict(batch_size=batch_size)) if ragged and len(batch_size) else TensorDict(batch_size=batch_size)


def _lazy(td: TensorDictBase) -> TensorDictBase:
    """A lazy stack, to the last batch dimension, with the entries of ``td``."""
    if td.batch_dims == 0:
        return td
    return lazy_stack([_lazy(sub) for sub in td.unbind(0)], 0)


def _distribute(td: TensorDictBase, key: NestedKey, ids: Tensor, rows: list[Tensor]) -> TensorDictBase:
    """Write the rows ``ids`` into the leaves of ``td``; what is returned takes its place."""
    if isinstance(td, LazyStackedTensorDict):
        for i, (sub, sub_ids) in enumerate(zip(td.tensordicts, ids.unbind(td.stack_dim), strict=True)):
            node = _node(sub)
            new = _distribute(node, key, sub_ids, rows)
            if new is not node:  # a dense element that ragged rows do not fit into became a lazy stack
                td.tensordicts[i] = new if node is sub else type(sub)._from_tensordict(new)
        return td
    mine = [rows[i] for i in ids.flatten().tolist()]
    if ids.ndim == 0:
        return td.set(key, mine[0])
    container = Rows(torch.tensor([len(row) for row in mine]), torch.Size(ids.shape))
    return write_ragged(td, key, torch.cat(mine), container)


def own_leaves(td: TensorDictBase) -> None:
    """Give lazy stacks inside ``td`` shallow copies of their elements, so that writing reaches no other owner.

    A replay buffer hands out lazy stacks of the very TensorDicts that it stores; what a transform writes into one on
    sampling must not end up in the storage.
    """
    if td.is_locked:
        raise RuntimeError("Cannot modify locked TensorDict. Unlock it first: td.unlock_().")
    if isinstance(td, LazyStackedTensorDict):
        td.tensordicts = [sub.copy() for sub in td.tensordicts]
        return
    for key in list(td.keys()):
        value = _node(td.get(key))
        if isinstance(value, TensorDictBase):
            own_leaves(value)
