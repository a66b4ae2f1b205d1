"""The entries that each algorithm needs in its data, and a check that reports every violation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor

from torchrl_llm_kl._foreign import read_table
from torchrl_llm_kl._registry import Registry
from torchrl_llm_kl.ragged import read_column
from torchrl_llm_kl.rollouts import describe_entries, find_key

Kind = Literal["integer", "number", "boolean", "identity"]
SchemaName = Literal["sft", "dpo", "unpaired", "experience", "rewards", "mix", "trajectory", "distill"]


class SchemaError(ValueError):
    """The data does not fit the schema. The message lists every violation."""


@dataclass(frozen=True)
class Entry:
    """One entry of a schema.

    Args:
        key: the entry's key. It is looked up on both sides of ``"next"`` (:func:`~torchrl_llm_kl.rollouts.find_key`).
        shape: with ``B`` for the batch, ``T`` for tokens, ``P`` for tokens of the prompt. ``"[*B]"`` means one value per
            sequence. The check enforces it for all kinds but identities.
        kind: the kind of values. An ``"identity"`` is an integer or a string.
        note: the meaning, for readers.
        required: whether the data must have the entry. Optional entries are checked if present.
    """

    key: NestedKey
    shape: str
    kind: Kind
    note: str
    required: bool = True


@dataclass(frozen=True)
class Schema:
    """The entries of a batch before scoring.

    Args:
        name: the name in :data:`SCHEMAS`.
        entries: the entries, beginning with the tokens.
        paired: whether rows are neighbouring pairs, chosen before rejected. ``pair_id`` and ``chosen`` can replace this order.

    Example:
        >>> print(SCHEMAS["sft"].table().splitlines()[2])
        | `tokens, full` | `[*B, T]` | integer | the sampled prompt and response |
    """

    name: str
    entries: tuple[Entry, ...]
    paired: bool = False

    def check(self, td: TensorDictBase) -> None:
        """Raise unless ``td`` holds the required entries, all of the right kind.

        Raises:
            SchemaError: if entries are missing or wrong. The message lists all of them.
        """
        complaints = list(filter(None, (_complaint(td, entry) for entry in self.entries)))
        rows = td.batch_size.numel()
        if self.paired and find_key(td, "pair_id") is None and rows % 2:
            complaints.append(f"found {rows} sequences, expected pairs: chosen, rejected, ... (or pair_id and chosen)")
        if complaints:
            head = f"The data does not fit the schema {self.name!r}. It holds {describe_entries(td)}. Problems:"
            raise SchemaError("\n  - ".join([head, *complaints]))

    def table(self) -> str:
        """A Markdown table of the entries."""
        rows = ["| entry | shape | kind | |", "|---|---|---|---|"]
        for entry in self.entries:
            key = entry.key if isinstance(entry.key, str) else ", ".join(entry.key)
            note = entry.note if entry.required else f"{entry.note} (optional)"
            rows.append(f"| `{key}` | `{entry.shape}` | {entry.kind} | {note} |")
        return "\n".join(rows) + "\n"


# ------------------------------------------------------------------ the check of an entry

# kind -> plural for messages, and whether a tensor is of this kind
_KINDS: dict[Kind, tuple[str, Callable[[Tensor], bool]]] = {
    "integer": ("integers", lambda x: not x.is_floating_point() and x.dtype != torch.bool),
    "number": ("numbers", lambda x: x.dtype != torch.bool),
    "boolean": ("booleans", lambda x: x.dtype == torch.bool),
    "identity": ("integers or strings", lambda x: not x.is_floating_point()),
}


def _complaint(td: TensorDictBase, entry: Entry) -> str | None:
    key = find_key(td, entry.key)
    if key is None:
        return f"{entry.key!r} {entry.shape} is missing: {entry.note}" if entry.required else None
    column: Any = read_column(td, key)
    rows = column if isinstance(column, list) else [column]
    plural, is_kind = _KINDS[entry.kind]
    for row in rows:
        if not isinstance(row, Tensor) and entry.kind != "identity":
            return f"{key!r}: expected tensors of {plural} {entry.shape}, found {type(row).__name__}"
        if isinstance(row, Tensor) and not is_kind(row):
            return f"{key!r}: expected {plural}, found {row.dtype}"
    count = td.batch_size.numel()
    one_each = entry.shape == "[*B]" and entry.kind != "identity"
    if one_each and (rows[0].is_nested or sum(row.numel() for row in rows) != count):
        return f"{key!r}: expected one value for each of the {count} sequences, {entry.shape}"
    return None


# ------------------------------------------------------------------ the schemas


def _read_schemas() -> Registry[Schema]:
    """The schemas of ``schemas.csv``, which has a line for each entry and names the schemas that have it."""
    entries: dict[str, list[Entry]] = {name: [] for name in get_args(SchemaName)}
    for row in read_table("algorithms/schemas.csv"):
        key, kind = unravel_key(tuple(row["entry"].split("."))), cast("Kind", row["kind"])
        entry = Entry(key, row["shape"], kind, row["note"], required=row["required"] == "yes")
        for name in row["schemas"].split():
            entries[name].append(entry)
    schemas: Registry[Schema] = Registry("schema")
    for name, own in entries.items():
        schemas.add(name, Schema(name, tuple(own), paired=name == "dpo"))
    return schemas


#: The kinds of data, by name.
SCHEMAS = _read_schemas()
