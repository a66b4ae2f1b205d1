"""From entries of a TensorDict, in whatever form they are stored, to one number for each row."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, is_non_tensor, unravel_key
from torch import Tensor

from torchrl_llm_kl.ragged import Ragged, read_column, read_node, segment_sum
from torchrl_llm_kl.transforms._errors import MissingEntryError, entries

__all__ = ["amounts", "check_finite_rows", "find", "identities", "integers", "require"]


def find(td: TensorDictBase, key: NestedKey) -> Any | None:
    """The entry under ``key``, else the one of that name inside, or outside, of ``"next"``; None if there is none."""
    path = unravel_key(key)
    path = (path,) if isinstance(path, str) else path
    other = path[1:] if path[0] == "next" else ("next", *path)
    value = read_column(td, path)
    return read_column(td, other) if value is None and other else value


def require(td: TensorDictBase, key: NestedKey, what: str, advice: str) -> Any:
    """The same; a missing entry is an error.

    Raises:
        MissingEntryError: a ``KeyError`` that says what is missing, what was found and what to do.
    """
    value = find(td, key)
    if value is None:
        next_td = read_node(td, "next")
        inside = "" if next_td is None else f"; in 'next': {entries(next_td)}"
        raise MissingEntryError(f"{what} is missing: expected {key!r}, found: {entries(td)}{inside}. {advice}")
    return value


def amounts(value: Any, rows: int, what: str) -> Tensor:
    """The sum of each row's numbers, in float32 or wider; ``[S]``.

    An outcome is one number; token rewards, padded or nested, add up to the outcome.

    Raises:
        TypeError: if the entry holds no tensors.
        ValueError: if its numbers do not divide among the rows.
    """
    if isinstance(value, list):
        _check_tensors(value, what)
        sizes = torch.tensor([row.numel() for row in value])
        flat = _wide(torch.cat([row.reshape(-1) for row in value]))
        return segment_sum(flat, sizes.to(flat.device))
    _check_tensors([value], what)
    if value.is_nested:
        data = Ragged.from_nested(value)
        return _per_row(data.like(_wide(data.values)).sum(), rows, what)
    return _per_row(_wide(value), rows, what)


def _wide(x: Tensor) -> Tensor:
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))


def _per_row(x: Tensor, rows: int, what: str) -> Tensor:
    if x.numel() % rows:
        raise ValueError(f"{what} has shape {tuple(x.shape)}: expected as many numbers for each of {rows} rows")
    return x.reshape(rows, -1).sum(-1)


def _check_tensors(values: list[Any], what: str) -> None:
    for value in values:
        if not isinstance(value, Tensor):
            raise TypeError(f"{what} must be a tensor, found {type(value).__name__}")


def check_finite_rows(x: Tensor, what: str) -> None:
    """Raise a ValueError that names the first row of ``x [S]`` that is NaN or infinite."""
    finite = x.isfinite()
    if not bool(finite.all()):
        row = int((~finite).nonzero()[0])
        raise ValueError(f"{what} of row {row} is {float(x[row])}: expected a finite number. Repair or drop the row")


def integers(value: Any, rows: int, what: str) -> Tensor:
    """One integer for each row; int64 ``[S]``.

    Raises:
        TypeError: if the entry is no tensor of integers.
        ValueError: if there is not one for each row.
    """
    values = value if isinstance(value, list) else [value]
    _check_tensors(values, what)
    flat = torch.cat([x.reshape(-1) for x in values])
    if flat.is_floating_point() or flat.dtype == torch.bool:
        raise TypeError(f"{what} must be of an integer dtype, found {flat.dtype}")
    if flat.numel() != rows:
        raise ValueError(f"{what} must have one number for each of {rows} rows, found {flat.numel()} numbers")
    return flat.long()


def identities(value: Any, rows: int, what: str) -> Tensor:
    """A number for each row, equal where the rows are; int64 ``[S]``.

    Args:
        value: integers, one for each row or several (a prompt's tokens, padded or nested); or strings.
        rows: ``S``.
        what: the entry, for errors.

    Raises:
        TypeError: if the entry holds neither integers nor strings.
        ValueError: if there is not one for each row.
    """
    data = _ragged(value, rows)
    if data is not None:
        if data.values.is_floating_point() or data.values.dtype == torch.bool:
            raise TypeError(f"{what} must be integers or strings, found {data.values.dtype}")
        table = torch.cat([data.lengths.unsqueeze(1), data.to_padded()], 1)  # padding is no token
        return torch.unique(table, dim=0, return_inverse=True)[1]
    names = list(_flat(value))
    if len(names) == 1:
        names *= rows  # one for the whole batch
    if len(names) != rows:
        raise ValueError(f"{what} must have one value for each of {rows} rows, found {len(names)}")
    number: dict[Hashable, int] = {}
    for name in names:
        if not isinstance(name, (str, int, bytes)):
            raise TypeError(f"{what} must be integers or strings, found {type(name).__name__}")
        number.setdefault(name, len(number))
    return torch.tensor([number[name] for name in names])


def _ragged(value: Any, rows: int) -> Ragged | None:
    """The numbers of each row in one dimension; None for what is no tensor."""
    if isinstance(value, Tensor):
        if value.is_nested:
            data = Ragged.from_nested(value)
            return data.like(data.values.reshape(data.values.shape[0])) if data.values.ndim > 1 else data
        return Ragged.from_padded(value.reshape(rows, -1)) if value.numel() else None
    if isinstance(value, list) and all(isinstance(row, Tensor) for row in value):
        return Ragged.from_list([row.reshape(-1) for row in value])
    return None


def _flat(value: Any) -> Iterator[Any]:
    if is_non_tensor(value):
        value = value.tolist()
    if isinstance(value, list):
        for item in value:
            yield from _flat(item)
    else:
        yield value
