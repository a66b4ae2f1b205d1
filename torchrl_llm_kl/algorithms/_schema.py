"""The entries that each algorithm needs in its data, and a check that reports every violation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_llm_kl._registry import Registry
from torchrl_llm_kl.ragged import read_column
from torchrl_llm_kl.rollouts import describe_entries, find_key

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
    kind: Literal["integer", "number", "boolean", "identity"]
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
            listed = "".join(f"\n  - {complaint}" for complaint in complaints)
            raise SchemaError(
                f"The data does not fit the schema {self.name!r}. It holds {describe_entries(td)}. Problems:{listed}"
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

# kind -> plural for messages, and whether a tensor is of this kind
_KINDS: dict[str, tuple[str, Callable[[Tensor], bool]]] = {
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


_optional = partial(Entry, required=False)
_OF_ALL = (
    Entry(("tokens", "full"), "[*B, T]", "integer", "the sampled prompt and response"),
    _optional(("tokens", "prompt"), "[*B, P]", "integer", "the prompt without the response"),
    _optional(("masks", "all_attention_mask"), "[*B, T]", "boolean", "False at padding. Padded data must have it"),
    _optional(("masks", "all_assistant_mask"), "[*B, T]", "boolean", "True at the assistant's tokens"),
    _optional("loss_mask", "[*B] or [*B, T]", "boolean", "False leaves out a sequence or a token"),
)
_REWARD = Entry(
    ("next", "reward"), "[*B, 1] or [*B, T, 1]", "number", "the outcome, or rewards per token that add up to it"
)
_QUERY = _optional("query", "[*B]", "identity", "equal for all answers to one prompt. group_size replaces it")
_SAMPLER = _optional(("next", "log_probs", "full"), "[*B, T]", "number", "nats, under the policy that sampled")
_REFERENCE = _optional(("next", "ref_log_probs", "full"), "[*B, T]", "number", "nats, under the reference")
_ROLLOUT = (_REWARD, _QUERY, _SAMPLER, _REFERENCE)

_OWN: dict[SchemaName, tuple[Entry, ...]] = {
    "sft": (),
    "dpo": (
        _optional("pair_id", "[*B]", "integer", "equal for the two answers of a pair"),
        _optional("chosen", "[*B]", "boolean", "True for the better answer"),
        _REFERENCE,
    ),
    "unpaired": (
        Entry("chosen", "[*B]", "boolean", "True for a desirable answer, False for an undesirable one"),
        _optional("reference_point", "[*B]", "number", "nats, for the whole batch, if prepare cannot compute it"),
        _REFERENCE,
    ),
    "experience": (
        _optional("chosen", "[*B]", "boolean", "True for right answers (vapo)"),
        _optional("expert_mask", "[*B, T]", "boolean", "True for tokens of tools and users (echo)"),
        _optional("role", "[*B]", "identity", "the role of the agent (rae, hierarchical_grpo)"),
        _optional("reward_baseline", "[*B]", "number", "the baseline of the prompt (remax, a2po)"),
        *_ROLLOUT,
    ),
    "rewards": (
        _optional(("next", "reward"), "[*B, R]", "number", "several rewards. keys may name one entry for each instead"),
        _QUERY,
        _SAMPLER,
        _REFERENCE,
    ),
    "mix": (
        Entry("expert_mask", "[*B]", "boolean", "True for the answers of experts"),
        *_ROLLOUT,
    ),
    "trajectory": (
        _REWARD,
        _optional("query", "[*B]", "identity", "the task. group_size replaces it"),
        _optional("run", "[*B]", "identity", "the trajectory, named by keys. Rows [*envs, steps] need none"),
        _optional("step", "[*B]", "integer", "the place in the trajectory, named by keys"),
        _optional("state", "[*B]", "identity", "the env's state before the step (gigpo)"),
        _SAMPLER,
        _REFERENCE,
    ),
    "distill": (
        _SAMPLER,
        _REFERENCE,
        _optional(("top_k", "ids"), "[*B, T, k]", "integer", "a teacher's most probable tokens"),
        _optional(("top_k", "log_probs"), "[*B, T, k]", "number", "nats, of these tokens under the teacher"),
        _optional(("top_k", "rest_log_prob"), "[*B, T]", "number", "nats, of all other tokens together"),
    ),
}
#: The kinds of data, by name.
SCHEMAS: Registry[Schema] = Registry("schema")
for _name, _own in _OWN.items():
    SCHEMAS.add(_name, Schema(_name, _OF_ALL + _own, paired=_name == "dpo"))
