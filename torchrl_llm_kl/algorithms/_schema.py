"""Schemas of an algorithm's data, and a check that reports every violation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_llm_kl._registry import Registry
from torchrl_llm_kl.ragged import Node, read_column
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
        complaints = list(filter(None, (_complaint(td, entry, self.entries[0]) for entry in self.entries)))
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
        widths, lengths = _widths(value, td), _widths(read_column(td, tokens.key), td)
        if widths is not None and lengths is not None and len(widths) == len(lengths):
            for i, (a, b) in enumerate(zip(widths, lengths, strict=True)):
                if a > b:
                    return f"{key!r}: sequence {i} has {a} values and {b} tokens"
    return None


def _shape(value: Node) -> str:
    if isinstance(value, list):
        return f"rows of {sorted({tuple(row.shape) for row in value})}"
    return f"{len(list(value.unbind()))} nested rows" if value.is_nested else str(tuple(value.shape))


def _widths(value: Node, td: TensorDictBase) -> list[int] | None:
    """The number of positions of each sequence."""
    if isinstance(value, list):
        return [row.shape[0] if row.ndim else 1 for row in value]
    if not isinstance(value, Tensor):
        return None
    if value.is_nested:
        return [row.shape[0] for row in value.unbind()]
    return [value.shape[td.batch_dims]] * td.batch_size.numel() if value.ndim > td.batch_dims else None


# ------------------------------------------------------------------ the schemas


_optional = partial(Entry, required=False)
_OF_ALL = (
    Entry(("tokens", "full"), "[*B, T]", "integer", "prompt and response, as they were sampled", "token"),
    _optional(("tokens", "prompt"), "[*B, P]", "integer", "the prompt alone; the rest is the response", "token"),
    _optional(("masks", "all_attention_mask"), "[*B, T]", "boolean", "False at padding; needed if padded", "token"),
    _optional(("masks", "all_assistant_mask"), "[*B, T]", "boolean", "True at the assistant's tokens", "token"),
    _optional("loss_mask", "[*B] or [*B, T]", "boolean", "False leaves a sequence or a token out", "either"),
)
_REWARD = Entry(
    ("next", "reward"), "[*B, 1] or [*B, T, 1]", "number", "the outcome, or token rewards that add up to it", "either"
)
_QUERY = _optional("query", "[*B]", "identity", "equal for all answers to a prompt; or pass group_size", "either")
_SAMPLER = _optional(("next", "log_probs", "full"), "[*B, T]", "number", "nats, of the policy that sampled", "either")
_REFERENCE = _optional(("next", "ref_log_probs", "full"), "[*B, T]", "number", "nats, of the reference", "either")

_OWN: dict[SchemaName, tuple[Entry, ...]] = {
    "sft": (),
    "dpo": (
        _optional("pair_id", "[*B]", "integer", "equal for the two answers of a pair", "sequence"),
        _optional("chosen", "[*B]", "boolean", "True for the better one", "sequence"),
        _REFERENCE,
    ),
    "unpaired": (
        Entry("chosen", "[*B]", "boolean", "True for a desirable answer, False for an undesirable one", "sequence"),
        _optional(
            "reference_point", "[*B]", "number", "nats, of the whole batch, if prepare cannot score it", "sequence"
        ),
        _REFERENCE,
    ),
    "experience": (
        _optional("chosen", "[*B]", "boolean", "True for right answers (vapo)", "sequence"),
        _optional("expert_mask", "[*B, T]", "boolean", "True for tokens of tools and users (echo)", "either"),
        _optional("role", "[*B]", "identity", "the agent (rae, hierarchical_grpo)", "either"),
        _optional("reward_baseline", "[*B]", "number", "of the prompt (remax, a2po)", "sequence"),
        _REWARD,
        _QUERY,
        _SAMPLER,
        _REFERENCE,
    ),
    "rewards": (
        _optional(
            ("next", "reward"), "[*B, R]", "number", "several rewards; or an entry for each, named by keys", "several"
        ),
        _QUERY,
        _SAMPLER,
        _REFERENCE,
    ),
    "mix": (
        Entry("expert_mask", "[*B]", "boolean", "True for the answers of experts", "sequence"),
        _REWARD,
        _QUERY,
        _SAMPLER,
        _REFERENCE,
    ),
    "trajectory": (
        _REWARD,
        _optional("query", "[*B]", "identity", "the task; or pass group_size", "either"),
        _optional("run", "[*B]", "identity", "the trajectory, if keys name it; or rows [*envs, steps]", "either"),
        _optional("step", "[*B]", "integer", "the place in it, if keys name it", "sequence"),
        _optional("state", "[*B]", "identity", "the env's state before the step (gigpo)", "either"),
        _SAMPLER,
        _REFERENCE,
    ),
    "distill": (
        _SAMPLER,
        _REFERENCE,
        _optional(("top_k", "ids"), "[*B, T, k]", "integer", "a teacher's most probable tokens", "token"),
        _optional(("top_k", "log_probs"), "[*B, T, k]", "number", "nats, of these under the teacher", "token"),
        _optional(("top_k", "rest_log_prob"), "[*B, T]", "number", "nats, of all other tokens together", "token"),
    ),
}
#: The kinds of data, by name.
SCHEMAS: Registry[Schema] = Registry("schema")
for _name, _own in _OWN.items():
    SCHEMAS.add(_name, Schema(_name, _OF_ALL + _own, paired=_name == "dpo"))
