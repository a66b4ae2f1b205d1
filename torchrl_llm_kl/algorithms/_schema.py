"""Schemas of an algorithm's data, and a check that reports every violation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_llm_kl._registry import Registry
from torchrl_llm_kl.ragged import read_column
from torchrl_llm_kl.rollouts import describe_entries, find_key

SchemaName = Literal["sft", "dpo", "unpaired", "experience", "rewards", "mix", "trajectory", "distill"]


class SchemaError(ValueError):
    """The data does not fit the schema; the message lists every violation."""


@dataclass(frozen=True)
class Entry:
    """One entry of a schema.

    Args:
        key: the entry, looked up on both sides of ``"next"`` (:func:`~torchrl_llm_kl.rollouts.find_key`).
        shape: for readers: ``B`` the batch, ``T`` tokens, ``P`` tokens of the prompt.
        kind: of its values; ``"identity"``: integers or strings.
        note: its meaning, for readers.
        per: one value per token, per sequence, or either; ``"several"``: as many as there are, of each sequence.
        required: whether the data must have it; optional entries are checked if present.
    """

    key: NestedKey
    shape: str
    kind: Literal["integer", "number", "boolean", "identity"]
    note: str
    per: Literal["token", "sequence", "either", "several"]
    required: bool = True


@dataclass(frozen=True)
class Schema:
    """The entries of a batch before scoring.

    Args:
        name: in :data:`SCHEMAS`.
        entries: the tokens first.
        paired: whether rows come in neighbouring pairs, chosen before rejected, unless ``pair_id`` and ``chosen`` are given.

    Example:
        >>> print(SCHEMAS["sft"].table().splitlines()[2])
        | `tokens, full` | `[*B, T]` | integer | prompt and response, as they were sampled |
    """

    name: str
    entries: tuple[Entry, ...]
    paired: bool = False

    def require(self, *keys: NestedKey) -> Schema:
        """A copy in which these entries are required."""
        return replace(self, entries=tuple(replace(e, required=e.required or e.key in keys) for e in self.entries))

    def check(self, td: TensorDictBase) -> None:
        """Raise unless ``td`` holds the required entries, all of the right kind and length.

        Raises:
            SchemaError: with every entry that is missing or wrong, what was found and what was expected.
        """
        complaints = [complaint for entry in self.entries if (complaint := _complaint(td, entry, self.entries[0]))]
        rows = td.batch_size.numel()
        if self.paired and find_key(td, "pair_id") is None and rows % 2:
            complaints.append(f"found {rows} sequences, expected pairs: chosen, rejected, ... (or pair_id and chosen)")
        if complaints:
            listed = "".join(f"\n  - {complaint}" for complaint in complaints)
            raise SchemaError(
                f"the data does not fit the schema {self.name!r}; it holds {describe_entries(td)}:{listed}"
            )

    def table(self) -> str:
        """A Markdown table of the entries."""
        rows = ["| entry | shape | kind | |", "|---|---|---|---|"]
        for entry in self.entries:
            key = entry.key if isinstance(entry.key, str) else ", ".join(entry.key)
            note = entry.note if entry.required else f"{entry.note} (optional)"
            rows.append(f"| `{key}` | `{entry.shape}` | {entry.kind} | {note} |")
        return "\n".join(rows) + "\n"


# ------------------------------------------------------------------ the check of an entry

# kind -> its plural, and the test of a tensor
_KINDS: dict[str, tuple[str, Callable[[Tensor], bool]]] = {
    "integer": ("integers", lambda x: not x.is_floating_point() and x.dtype != torch.bool),
    "number": ("numbers", lambda x: x.dtype != torch.bool),
    "boolean": ("booleans", lambda x: x.dtype == torch.bool),
    "identity": ("integers or strings", lambda x: not x.is_floating_point()),
}


def _complaint(td: TensorDictBase, entry: Entry, tokens: Entry) -> str | None:
    key = find_key(td, entry.key)
    if key is None:
        return f"{entry.key!r} {entry.shape} is missing: {entry.note}" if entry.required else None
    value = read_column(td, key)
    rows = value if isinstance(value, list) else [value]
    tensors = [row for row in rows if isinstance(row, Tensor)]
    plural, is_kind = _KINDS[entry.kind]
    if len(tensors) != len(rows):
        if entry.kind == "identity":
            return None
        return f"{key!r}: expected tensors of {plural} {entry.shape}, found {type(rows[0]).__name__}"
    for row in tensors:
        if not is_kind(row):
            return f"{key!r}: expected {plural}, found {row.dtype}"
    count = td.batch_size.numel()
    nested = isinstance(value, Tensor) and value.is_nested
    one_each = not nested and sum(row.numel() for row in tensors) == count
    if entry.per == "sequence" and not one_each:
        return f"{key!r}: expected one value for each of the {count} sequences {entry.shape}, found {_shape(value)}"
    if entry.per in ("sequence", "several") or (entry.per == "either" and one_each):
        return None
    if isinstance(value, Tensor) and not nested and value.ndim <= td.batch_dims:
        return f"{key!r}: expected a token dimension after the batch {tuple(td.batch_size)}, found {_shape(value)}"
    if entry.key != tokens.key and entry.per == "either":
        found, expected = _widths(value, td), _widths(read_column(td, tokens.key), td)
        if found is not None and expected is not None and len(found) == len(expected):
            for i, (a, b) in enumerate(zip(found, expected, strict=True)):
                if a > b:
                    return f"{key!r}: sequence {i} has {a} values and {b} tokens"
    return None


def _shape(value: Any) -> str:
    if isinstance(value, list):
        return f"rows of {sorted({tuple(row.shape) for row in value})}"
    return f"{len(list(value.unbind()))} nested rows" if value.is_nested else str(tuple(value.shape))


def _widths(value: Any, td: TensorDictBase) -> list[int] | None:
    """The number of positions of each sequence."""
    if isinstance(value, list):
        return [row.shape[0] if row.ndim else 1 for row in value]
    if not isinstance(value, Tensor):
        return None
    if value.is_nested:
        return [row.shape[0] for row in value.unbind()]
    return [value.shape[td.batch_dims]] * td.batch_size.numel() if value.ndim > td.batch_dims else None


# ------------------------------------------------------------------ the schemas

_TOKENS = (
    Entry(("tokens", "full"), "[*B, T]", "integer", "prompt and response, as they were sampled", "token"),
    Entry(("tokens", "prompt"), "[*B, P]", "integer", "the prompt alone; the rest is the response", "token", False),
    Entry(("masks", "all_attention_mask"), "[*B, T]", "boolean", "False at padding; needed if padded", "token", False),
    Entry(("masks", "all_assistant_mask"), "[*B, T]", "boolean", "True at the assistant's tokens", "token", False),
    Entry("loss_mask", "[*B] or [*B, T]", "boolean", "False leaves a sequence or a token out", "either", False),
)
_REWARD = Entry(
    ("next", "reward"), "[*B, 1] or [*B, T, 1]", "number", "the outcome, or token rewards that add up to it", "either"
)
_REWARDS = Entry(
    ("next", "reward"),
    "[*B, R]",
    "number",
    "several rewards of a sequence; or an entry for each, named by keys",
    "several",
    False,
)
_GROUP = Entry("query", "[*B]", "identity", "equal for all answers to a prompt; or pass group_size", "either", False)
_LOG_PROBS = (
    Entry(("next", "log_probs", "full"), "[*B, T]", "number", "nats, of the policy that sampled", "either", False),
    Entry(("next", "ref_log_probs", "full"), "[*B, T]", "number", "nats, of the reference", "either", False),
)
_TOP_K = (
    Entry(("top_k", "ids"), "[*B, T, k]", "integer", "a teacher's most probable tokens", "token", False),
    Entry(("top_k", "log_probs"), "[*B, T, k]", "number", "nats, of these under the teacher", "token", False),
    Entry(("top_k", "rest_log_prob"), "[*B, T]", "number", "nats, of all other tokens together", "token", False),
)
_TRAJECTORY = (
    Entry("query", "[*B]", "identity", "the task; or pass group_size", "either", False),
    Entry("run", "[*B]", "identity", "the trajectory, if keys name it; or rows [*envs, steps]", "either", False),
    Entry("step", "[*B]", "integer", "the place in it, if keys name it", "sequence", False),
    Entry("state", "[*B]", "identity", "the env's state before the step (gigpo)", "either", False),
)
_PAIR = (
    Entry("pair_id", "[*B]", "integer", "equal for the two answers of a pair", "sequence", False),
    Entry("chosen", "[*B]", "boolean", "True for the better one", "sequence", False),
)
_UNPAIRED = (
    Entry("chosen", "[*B]", "boolean", "True for a desirable answer, False for an undesirable one", "sequence"),
    Entry(
        "reference_point", "[*B]", "number", "nats, of the whole batch, if prepare cannot score it", "sequence", False
    ),
)
_EXPERT = Entry("expert_mask", "[*B]", "boolean", "True for the answers of experts", "sequence")

#: The kinds of data, by name.
SCHEMAS: Registry[Schema] = Registry("schema")
for _schema in (
    Schema("sft", _TOKENS),
    Schema("dpo", (*_TOKENS, *_PAIR, _LOG_PROBS[1]), paired=True),
    Schema("unpaired", (*_TOKENS, *_UNPAIRED, _LOG_PROBS[1])),
    Schema("experience", (*_TOKENS, _REWARD, _GROUP, *_LOG_PROBS)),
    Schema("rewards", (*_TOKENS, _REWARDS, _GROUP, *_LOG_PROBS)),
    Schema("mix", (*_TOKENS, _EXPERT, _REWARD, _GROUP, *_LOG_PROBS)),
    Schema("trajectory", (*_TOKENS, _REWARD, *_TRAJECTORY, *_LOG_PROBS)),
    Schema("distill", (*_TOKENS, *_LOG_PROBS, *_TOP_K)),
):
    SCHEMAS.add(_schema.name, _schema)
