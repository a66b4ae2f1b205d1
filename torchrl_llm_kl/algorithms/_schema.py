"""What the data of an algorithm holds, and a check that says what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_llm_kl.ragged import read_column
from torchrl_llm_kl.rollouts import find_key
from torchrl_llm_kl.transforms._errors import entries

__all__ = ["SCHEMAS", "Entry", "Schema", "SchemaError"]


class SchemaError(ValueError):
    """The data is not what the algorithm reads; the message lists everything that is wrong with it."""


@dataclass(frozen=True)
class Entry:
    """One entry of a schema.

    Args:
        key: where it is; under ``"next"`` or, failing that, at the root.
        shape: for readers: ``B`` the batch, ``T`` tokens, ``P`` tokens of the prompt.
        kind: ``"integer"``, ``"number"``, ``"boolean"``, or ``"identity"``: integers or strings.
        note: what it is.
        per: ``"token"``, ``"sequence"``, or ``"either"``.
        required: whether the data must have it; otherwise it is checked where it is there.
    """

    key: NestedKey
    shape: str
    kind: str
    note: str
    per: str
    required: bool = True


_PLURAL = {"integer": "integers", "number": "numbers", "boolean": "booleans", "identity": "integers or strings"}
_KINDS: dict[str, Callable[[Tensor], bool]] = {
    "integer": lambda x: not x.is_floating_point() and x.dtype != torch.bool,
    "number": lambda x: x.dtype != torch.bool,
    "boolean": lambda x: x.dtype == torch.bool,
    "identity": lambda x: not x.is_floating_point(),
}


@dataclass(frozen=True)
class Schema:
    """The entries of a batch before anything is scored.

    Args:
        name: in :data:`SCHEMAS`.
        entries: what it holds.
        paired: rows come in neighbouring pairs, chosen before rejected, unless ``pair_id`` and ``chosen`` say otherwise.
    """

    name: str
    entries: tuple[Entry, ...]
    paired: bool = False

    def require(self, *keys: NestedKey) -> Schema:
        """The same, with some of its entries required."""
        return replace(
            self, entries=tuple(replace(entry, required=entry.required or entry.key in keys) for entry in self.entries)
        )

    def check(self, td: TensorDictBase) -> None:
        """Raise unless ``td`` holds what it must, of the right kind and length.

        Raises:
            SchemaError: with every entry that is missing or wrong, what was found and what was expected.
        """
        complaints = [complaint for entry in self.entries if (complaint := _complaint(td, entry, self.entries[0]))]
        if self.paired and find_key(td, "pair_id") is None and td.batch_size.numel() % 2:
            complaints.append(
                f"found {td.batch_size.numel()} sequences, expected pairs: chosen, rejected, chosen, ... (or pair_id and "
                "chosen)"
            )
        if complaints:
            listed = "\n".join(f"  - {complaint}" for complaint in complaints)
            raise SchemaError(f"the data does not fit the schema {self.name!r}; it holds {entries(td)}:\n{listed}")

    def table(self) -> str:
        """A Markdown table of the entries."""
        rows = ["| entry | shape | kind | |", "|---|---|---|---|"]
        for entry in self.entries:
            key = entry.key if isinstance(entry.key, str) else ", ".join(entry.key)
            note = entry.note if entry.required else f"{entry.note} (optional)"
            rows.append(f"| `{key}` | `{entry.shape}` | {entry.kind} | {note} |")
        return "\n".join(rows) + "\n"


def _complaint(td: TensorDictBase, entry: Entry, tokens: Entry) -> str | None:
    key = find_key(td, entry.key)
    if key is None:
        return f"{entry.key!r} {entry.shape} is missing: {entry.note}" if entry.required else None
    value = read_column(td, key)
    rows = value if isinstance(value, list) else [value]
    tensors = [row for row in rows if isinstance(row, Tensor)]
    if len(tensors) != len(rows):
        if entry.kind == "identity":
            return None
        return f"{key!r}: expected tensors of {_PLURAL[entry.kind]} {entry.shape}, found {type(rows[0]).__name__}"
    wrong = next((row for row in tensors if not _KINDS[entry.kind](row)), None)
    if wrong is not None:
        return f"{key!r}: expected {_PLURAL[entry.kind]}, found {wrong.dtype}"
    count = td.batch_size.numel()
    one_each = not _is_ragged(value) and sum(row.numel() for row in tensors) == count
    if entry.per == "sequence" and not one_each:
        return f"{key!r}: expected one value for each of the {count} sequences {entry.shape}, found {_shape(value)}"
    if entry.per == "sequence" or (entry.per == "either" and one_each):
        return None
    if isinstance(value, Tensor) and not value.is_nested and value.ndim <= td.batch_dims:
        return f"{key!r}: expected a dimension of tokens behind the batch {tuple(td.batch_size)}, found {_shape(value)}"
    if entry.key != tokens.key and entry.per == "either":
        found, expected = _widths(value, td), _widths(read_column(td, tokens.key), td)
        if found is not None and expected is not None and len(found) == len(expected):
            for i, (a, b) in enumerate(zip(found, expected, strict=True)):
                if a > b:
                    return f"{key!r}: sequence {i} has {a} values and {b} tokens"
    return None


def _is_ragged(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_nested


def _shape(value: Any) -> str:
    if isinstance(value, list):
        return f"rows of {sorted({tuple(row.shape) for row in value})}"
    return f"{len(list(value.unbind()))} nested rows" if value.is_nested else str(tuple(value.shape))


def _widths(value: Any, td: TensorDictBase) -> list[int] | None:
    """Positions in each sequence."""
    if isinstance(value, list):
        return [row.shape[0] if row.ndim else 1 for row in value]
    if not isinstance(value, Tensor):
        return None
    if value.is_nested:
        return [row.shape[0] for row in value.unbind()]
    return [value.shape[td.batch_dims]] * td.batch_size.numel() if value.ndim > td.batch_dims else None


_TOKENS = (
    Entry(("tokens", "full"), "[*B, T]", "integer", "prompt and response, as they were sampled", "token"),
    Entry(
        ("tokens", "prompt"),
        "[*B, P]",
        "integer",
        "the prompt alone, which tells the response",
        "token",
        required=False,
    ),
    Entry(
        ("masks", "all_attention_mask"),
        "[*B, T]",
        "boolean",
        "False at padding; needed if padded",
        "token",
        required=False,
    ),
    Entry(
        ("masks", "all_assistant_mask"), "[*B, T]", "boolean", "True where the assistant spoke", "token", required=False
    ),
    Entry(
        "loss_mask", "[*B] or [*B, T]", "boolean", "False takes a sequence or a token away", "either", required=False
    ),
)
_REWARD = Entry(
    ("next", "reward"),
    "[*B, 1] or [*B, T, 1]",
    "number",
    "the outcome, or rewards of tokens that add up to it",
    "either",
)
_GROUP = Entry(
    "query", "[*B]", "identity", "equal for all answers to a prompt; or give group_size", "either", required=False
)
_LOG_PROBS = (
    Entry(
        ("next", "log_probs", "full"), "[*B, T]", "number", "nats, of the policy that sampled", "either", required=False
    ),
    Entry(("next", "ref_log_probs", "full"), "[*B, T]", "number", "nats, of the reference", "either", required=False),
)

#: What data there is, by name.
SCHEMAS: MappingProxyType[str, Schema] = MappingProxyType(
    {
        schema.name: schema
        for schema in (
            Schema("sft", _TOKENS),
            Schema(
                "dpo",
                (
                    *_TOKENS,
                    Entry(
                        "pair_id", "[*B]", "integer", "equal for the two answers of a pair", "sequence", required=False
                    ),
                    Entry("chosen", "[*B]", "boolean", "True for the better one", "sequence", required=False),
                    _LOG_PROBS[1],
                ),
                paired=True,
            ),
            Schema("experience", (*_TOKENS, _REWARD, _GROUP, *_LOG_PROBS)),
            Schema(
                "mix",
                (
                    *_TOKENS,
                    Entry("expert_mask", "[*B]", "boolean", "True for the answers of experts", "sequence"),
                    _REWARD,
                    _GROUP,
                    *_LOG_PROBS,
                ),
            ),
            Schema(
                "trajectory",
                (
                    *_TOKENS,
                    _REWARD,
                    Entry("query", "[*B]", "identity", "the task; or give group_size", "either", required=False),
                    Entry(
                        "run",
                        "[*B]",
                        "identity",
                        "the trajectory, if keys say so; or rows [*envs, steps]",
                        "either",
                        required=False,
                    ),
                    Entry("step", "[*B]", "integer", "the place in it, if keys say so", "sequence", required=False),
                    Entry(
                        "state", "[*B]", "identity", "the env's state before the step (gigpo)", "either", required=False
                    ),
                    *_LOG_PROBS,
                ),
            ),
            Schema("distill", (*_TOKENS, *_LOG_PROBS)),
        )
    }
)
