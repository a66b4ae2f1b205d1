"""Data of any type, row by row, in a TensorDict."""

from __future__ import annotations

from collections.abc import Iterable

from tensordict import NestedKey, NonTensorData, NonTensorStack, TensorDictBase, is_non_tensor

from torchrl_llm_kl.ragged import Node, read_column


def stack_rows(values: Iterable[object]) -> NonTensorStack:
    """One value of any type for each row, lists and dicts included.

    Example:
        >>> stack_rows([[1, 2], {"a": 3}]).tolist()
        [[1, 2], {'a': 3}]
    """
    return NonTensorStack(*(NonTensorData(value) for value in values))


def read_rows_of(td: TensorDictBase, key: NestedKey) -> list[Node] | None:
    """The values of an entry, one for each row of a batch of any shape; None if there is none.

    Example:
        >>> from tensordict import TensorDict
        >>> read_rows_of(TensorDict(x=stack_rows([[1, 2], {"a": 3}]), batch_size=[2]), "x")
        [[1, 2], {'a': 3}]
    """
    column = read_column(td, key)
    if column is None:
        return None
    dims = td.batch_dims
    if isinstance(column, list):  # of the rows
        return [value.tolist() if is_non_tensor(value) else value for value in column]
    if is_non_tensor(column):
        column = column.tolist()
    rows = [column]
    for _ in range(dims):
        rows = [item for part in rows for item in part]
    return rows
