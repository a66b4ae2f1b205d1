"""Rollouts of any framework: rows with token ids or text, log-probs, rewards and records of the sampler.

Shapes: ``T`` tokens of a sequence without padding, ``P`` tokens of its prompt.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack
from torch import Tensor
from typing_extensions import Unpack

from torchrl_llm_kl._registry import no_such
from torchrl_llm_kl.datasets._batches import SkippedRowsWarning, as_column
from torchrl_llm_kl.datasets._encoding import Encoder, EncodingArgs, Skip, Skipped
from torchrl_llm_kl.datasets._rows import DataSource, Row, read_rows
from torchrl_llm_kl.datasets._values import (
    DataError,
    Fields,
    Layout,
    Places,
    RowColumns,
    RowError,
    as_list,
    integers,
    is_list,
    rollout_columns,
    split_choices,
    standard_row,
)
from torchrl_llm_kl.masks import Tokenizer

#: The roles of columns whose values are numbers of tokens, and their name in messages.
_PER_TOKEN = {
    "sampler_log_prob": "log-probs",
    "old_log_prob": "log-probs of the trainer",
    "ref_log_prob": "log-probs of the reference",
    "advantage": "advantages",
}
#: The entries in which the columns are stored.
_ENTRIES = {
    "sampler_log_prob": ("next", "sampler_log_probs", "full"),
    "old_log_prob": ("next", "log_probs", "full"),
    "ref_log_prob": ("next", "ref_log_probs", "full"),
    "advantage": ("advantage",),
}
#: Columns that only TRL's table of completions has together. Its other numbers are the parts of the reward.
_TRL_TABLE = {"step", "prompt", "completion", "advantage"}


# ------------------------------------------------------------------ one row


@dataclass(frozen=True, eq=False)
class Rollout:
    """One sampled sequence.

    Args:
        tokens: ids of prompt and response, int64 ``[T]``.
        prompt: the number of prompt tokens, ``P``.
        mask: True at the sampled tokens, bool ``[T]``.
        per_token: ``sampler_log_prob``, ``old_log_prob``, ``ref_log_prob`` and ``advantage``, float32 ``[T]``, NaN where
            nothing was recorded. Log-probs are in nats.
        reward: the reward of the sequence. NaN if it is unknown.
        rewards: the parts of the reward by name.
        kept: the ids that the sampler could have drawn, concatenated ``[M]``, and their number for each token ``[T]``.
        routed_experts: ids ``[T, layers, k]``, -1 where nothing was recorded.
        sampled: False if the tokens were encoded from text.
        labels: ``group``, ``policy_version`` and ``left_out`` (whether the row is left out of training).
        metadata: all other columns.
    """

    tokens: Tensor
    prompt: int
    mask: Tensor
    per_token: dict[str, Tensor] = field(default_factory=dict)
    reward: float = math.nan
    rewards: dict[str, float] = field(default_factory=dict)
    kept: tuple[Tensor, Tensor] | None = None
    routed_experts: Tensor | None = None
    sampled: bool = True
    labels: dict[str, object] = field(default_factory=dict)
    metadata: dict[str, object] = field(default_factory=dict)


class RolloutReader:
    """Reads rows as rollouts.

    Args:
        tokenizer: encodes rows that hold text.
        columns: the column of each role, in place of the known names.
        encoding: options of :class:`Encoder` for text.

    Attributes:
        notes: the number of rows whose text the template does not write whole, by the description of the loss.

    Raises:
        ValueError: if ``columns`` names an unknown role, or for ``turns="each"``, which makes several rows of a conversation.

    Example:
        >>> row = {"prompt_ids": [5, 6], "completion_ids": [7, 8], "logprobs": [-0.5, -1.5], "reward": 1.0}
        >>> rollout = RolloutReader().read(Row(0, "row 1", row))
        >>> rollout.tokens.tolist(), rollout.per_token["sampler_log_prob"].tolist()
        ([5, 6, 7, 8], [nan, nan, -0.5, -1.5])
        >>> RolloutReader().read(Row(16, "row 17", row | {"logprobs": [-0.5]}))
        Traceback (most recent call last):
        ...
        torchrl_llm_kl.datasets._values.RowError: has 1 log-probs in `logprobs` for 2 response tokens (4 with the prompt)
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None = None,
        columns: Mapping[str, str] | None = None,
        **encoding: Unpack[EncodingArgs],
    ) -> None:
        if encoding.get("turns") == "each":
            raise ValueError(
                'turns="each" makes several rows of one conversation, but a rollout is one row: pass turns="all" or "last".'
            )
        self.tokenizer, self.encoding = tokenizer, encoding
        self.columns: dict[str, tuple[str, ...]] = dict(rollout_columns())
        for role, column in (columns or {}).items():
            if role not in self.columns:
                raise ValueError(no_such("columns= names an unknown role", role, self.columns))
            self.columns[role] = (column,)
        named = set((columns or {}).values())  # a column that is named has no other role
        for role, known in self.columns.items():
            if role not in (columns or {}):
                self.columns[role] = tuple(name for name in known if name not in named)
        self.named = dict(columns or {})
        self.notes: Counter[str] = Counter()
        self._encoders: dict[str, Encoder] = {}

    def read(self, row: Row) -> Rollout:
        """Read one row.

        Raises:
            RowError: if it holds no rollout. The message continues a sentence that begins with the row's place.
        """
        if not isinstance(row.value, Mapping):
            raise RowError(row.problem or "holds no columns")
        value = {str(name): as_list(item) for name, item in standard_row(row.value).items() if item is not None}
        for role, column in self.named.items():
            if column not in value:
                raise RowError(f"has no column `{column}`, which columns= names for {role}: it has {', '.join(value)}")
        own = RowColumns(value, self.columns)
        tokens, places = own.ids() if own.has_ids else self._of_text(row, own, value)
        used = own.used | (set() if own.has_ids else {"messages", "tools"})
        rewards: dict[str, float] = {}
        if value.keys() >= _TRL_TABLE:
            rewards = _numbers({k: x for k, x in value.items() if k not in _TRL_TABLE | used})
        reward, parts = _reward(own.values.get("reward"), own.names.get("reward", ""))
        rewards |= parts
        if math.isnan(reward) and rewards:
            reward = _total(rewards)
        return Rollout(
            tokens=tokens,
            prompt=int(places.keep[: places.prompt].sum()),
            mask=places.mask[places.keep],
            per_token={role: _per_token(own, role, places) for role in _PER_TOKEN if role in own},
            reward=reward,
            rewards=rewards,
            kept=_kept(own, places) if "kept" in own else None,
            routed_experts=_experts(own, places) if "routed_experts" in own else None,
            sampled=own.has_ids,
            labels=_labels(own),
            metadata={name: x for name, x in value.items() if name not in used and name not in rewards},
        )

    def _of_text(self, row: Row, own: RowColumns, value: Fields) -> tuple[Tensor, Places]:
        """Encode the text of a row."""
        layout: Layout = "completion"
        if "prompt" in own and "response" in own:
            text = {"prompt": own.values["prompt"], "completion": own.values["response"]}
        elif "messages" in value:
            layout, text = "messages", {"messages": value["messages"]}
        else:
            raise RowError(
                f"holds no rollout: it has {', '.join(value) or 'no columns'}, expected token ids with a mask or the "
                "length of the prompt, or text of a prompt and its response. Name other columns with columns="
            )
        if self.tokenizer is None:
            raise RowError("holds text: pass the tokenizer")
        if layout not in self._encoders:
            self._encoders[layout] = Encoder(layout, self.tokenizer, **self.encoding)
        # The system prompt, tools and template variables of the row stay.
        text = {name: item for name, item in value.items() if name not in own.used} | text
        (answer,) = self._encoders[layout].encode(Row(row.index, row.place, text))
        if isinstance(answer, Skip):
            raise RowError(answer.detail, answer.reason)
        self.notes.update(answer.notes)
        return answer.tokens, Places(int(answer.mask.int().argmax()), answer.mask, torch.ones_like(answer.mask))


def _numbers(values: Fields) -> dict[str, float]:
    """The entries that are numbers, including booleans and numbers of numpy and torch."""
    kinds = (bool, int, float, np.generic, Tensor)
    numbers = {str(k): x for k, x in values.items() if isinstance(x, kinds) and getattr(x, "ndim", 0) == 0}
    return {name: float(x) for name, x in numbers.items()}


def _total(parts: Mapping[str, float]) -> float:
    """The sum of the parts that are known. NaN if none is."""
    known = [part for part in parts.values() if not math.isnan(part)]
    return sum(known) if known else math.nan


def _labels(own: RowColumns) -> dict[str, object]:
    labels = {role: own.values[role] for role in ("group", "policy_version") if role in own}
    for role, flipped in (("left_out", False), ("in_loss", True)):
        flag = own.values.get(role)
        flag = flag[0] if is_list(flag) and len(flag) == 1 else flag
        if flag is None or flag != flag:  # pandas fills missing values with NaN
            continue
        if flag not in (0, 1):
            raise RowError(f"has {flag!r} in `{own.names[role]}`, expected 0 or 1")
        labels["left_out"] = bool(flag) != flipped
    return labels


def _per_token(own: RowColumns, role: str, places: Places) -> Tensor:
    """A column of numbers of tokens, float32 ``[T]``."""
    name, noun = own.names[role], _PER_TOKEN[role]
    numbers = _number_list(own.values[role], name)
    if numbers.ndim == 0 and role == "advantage":  # one number for the whole response
        numbers = numbers.expand(len(places.mask))
    elif numbers.ndim == 0:
        raise RowError(f"has the number {own.values[role]!r} in `{name}`, expected {noun} of all response tokens")
    return places.spread(numbers, name, noun, math.nan)


def _number_list(value: object, name: str) -> Tensor:
    if is_list(value):  # an engine gives no log-prob for the first token
        value = [math.nan if item is None else item for item in value]
    numbers = None
    with suppress(TypeError, ValueError):
        numbers = torch.tensor(value, dtype=torch.float32)
    if numbers is None or numbers.ndim > 1:
        raise RowError(f"has {value!r:.40} in `{name}`, expected a list of numbers")
    return numbers


def _reward(value: object, name: str) -> tuple[float, dict[str, float]]:
    """The reward and its parts."""
    if value is None:
        return math.nan, {}
    if isinstance(value, Mapping):
        parts = _numbers(value)
        total = next((parts.pop(key) for key in ("reward", "score", "total") if key in parts), None)
        return _total(parts) if total is None else total, parts
    return float(_number_list(value, name).sum()), {}  # rewards of tokens are summed


def _kept(own: RowColumns, places: Places) -> tuple[Tensor, Tensor]:
    """The kept ids ``[M]`` and their counts ``[T]``."""
    name = own.names["kept"]
    if "kept_offsets" in own:
        offsets, ids = own.integers("kept_offsets"), own.integers("kept")
        counts = offsets.diff()
        if len(offsets) == 0 or int(offsets[-1]) != len(ids) or bool((counts < 0).any()):
            raise RowError(f"has {len(ids)} ids in `{name}`, which `{own.names['kept_offsets']}` does not divide")
    else:
        lists = [integers([] if item is None else item, name) for item in own.values["kept"]]
        ids, counts = (
            torch.cat([torch.tensor([], dtype=torch.long), *lists]),
            torch.tensor([len(each) for each in lists]),
        )
    if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < 2**31):
        raise RowError(f"has ids from {int(ids.min())} to {int(ids.max())} in `{name}`, expected ids of tokens")
    spread = places.spread(counts, name, "lists of kept ids", 0)
    if int(spread.sum()) != len(ids):
        raise RowError(f"has kept ids in `{name}` at padding")
    return ids, spread


def _experts(own: RowColumns, places: Places) -> Tensor:
    """The recorded experts ``[T, layers, k]``."""
    name, experts = own.names["routed_experts"], torch.as_tensor(own.values["routed_experts"])
    if experts.ndim != 3 or experts.is_floating_point():
        raise RowError(f"has {list(experts.shape)} in `{name}`, expected whole numbers [tokens, layers, experts]")
    if len(experts) == len(places.mask) - 1:  # engines record forwarded tokens, so the last one is missing
        experts = torch.cat([experts, torch.full_like(experts[:1], -1)])
    return places.spread(experts.int(), name, "rows of experts", -1)


# ------------------------------------------------------------------ a batch


def from_rollouts(
    data: DataSource,
    tokenizer: Tokenizer | None = None,
    *,
    columns: Mapping[str, str] | None = None,
    **encoding: Unpack[EncodingArgs],
) -> LazyStackedTensorDict:
    """Convert rollouts of any framework to a batch that transforms, losses, the doctor and the inspector read.

    Token ids are read as they are. Text is encoded with the tokenizer, so its tokens may differ from those that were sampled.
    ``rollout_columns.csv`` lists the known column names of TRL, verl, OpenRLHF, prime-rl, slime, NeMo-RL, vLLM and the OpenAI
    API.

    Args:
        data: rows in any form that :func:`read_rows` accepts: a path of JSONL, JSON or Parquet, a dataset, or a list of dicts.
        tokenizer: encodes rows of text.

    Keyword Args:
        columns: the column of each role, such as ``{"response": "answer_ids", "sampler_log_prob": "lp"}``. The roles are
            ``tokens``, ``prompt``, ``response``, ``mask``, ``attention_mask``, ``length``, ``prompt_length``,
            ``response_length``, ``sampler_log_prob``, ``old_log_prob``, ``ref_log_prob``, ``reward``, ``advantage``,
            ``group``, ``policy_version``, ``left_out``, ``in_loss`` (its opposite), ``kept``, ``kept_offsets``,
            ``routed_experts``, ``tool_mask`` and ``prompt_mask``.
        encoding: options of :class:`Encoder` for text.

    Returns:
        A lazy stack ``[N]`` of unpadded rows, each with the entries that its columns give:

        - ``("tokens", "full")``, ``("tokens", "prompt")``, ``("tokens", "response")``: int64.
        - ``("masks", "all_attention_mask")``, ``("masks", "all_assistant_mask")``: bool ``[T]``.
        - ``("next", "sampler_log_probs", "full")``, ``("next", "log_probs", "full")`` (of the trainer before its update) and
          ``("next", "ref_log_probs", "full")``: nats, float32 ``[T]``, NaN where nothing was recorded.
        - ``("next", "reward")`` ``[1]`` and ``("next", "rewards", name)`` ``[1]``, ``"advantage"`` ``[T]``.
        - ``"group"``, ``"policy_version"``, ``"left_out"``, ``"kept"`` and ``"routed_experts"``.
        - ``"metadata"``: all other columns.
        - ``"sampled"``: False if the tokens were encoded from text.

    Raises:
        DataError: for the first row that holds no rollout, or whose columns have lengths that do not fit its tokens.
        ValueError: if ``columns`` names an unknown role, or for ``turns="each"``, which makes several rows of a conversation.

    Example:
        >>> rows = [{"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1], "logprobs": [0.0, 0.0, -0.5, -1.5], "score": 1}]
        >>> batch = from_rollouts(rows)
        >>> batch[0]["next", "sampler_log_probs", "full"].tolist(), batch["next", "reward"].tolist()
        ([0.0, 0.0, -0.5, -1.5], [[1.0]])
    """
    reader = RolloutReader(tokenizer, columns, **encoding)
    rows = read_rows(data)
    rollouts = []
    for row in rows:
        values = split_choices(row.value)
        try:
            rollouts += [reader.read(replace(row, value=value)) for value in values]
        except RowError as error:
            raise rows.error(row, str(error)) from None
    if not rollouts:
        raise DataError(f"{rows.name} holds no rows.")
    if reader.notes:
        warnings.warn(SkippedRowsWarning(rows.name, Skipped(notes=reader.notes)), stacklevel=2)
    return _batch(rollouts)


def _batch(rollouts: Sequence[Rollout]) -> LazyStackedTensorDict:
    """Stack rollouts. An entry that some rows have is filled in the others: NaN, zero counts, -1, or None."""

    def names(of: Callable[[Rollout], Mapping[str, object]]) -> list[str]:
        return list(dict.fromkeys(name for each in rollouts for name in of(each)))

    per_token, parts = names(lambda r: r.per_token), names(lambda r: r.rewards)
    labels, metadata = names(lambda r: r.labels), names(lambda r: r.metadata)
    columns = {
        name: as_column([r.labels.get(name, False if name == "left_out" else None) for r in rollouts])
        for name in labels
    }
    others = {name: as_column([r.metadata.get(name) for r in rollouts]) for name in metadata}
    has_reward = any(not math.isnan(r.reward) for r in rollouts)
    experts = next((r.routed_experts for r in rollouts if r.routed_experts is not None), None)
    stack = []
    for i, each in enumerate(rollouts):
        count = len(each.tokens)
        row = TensorDict({name: values[i] for name, values in columns.items()})
        row["tokens"] = TensorDict(
            full=each.tokens, prompt=each.tokens[: each.prompt], response=each.tokens[each.prompt :]
        )
        row["masks"] = TensorDict(all_attention_mask=torch.ones(count, dtype=torch.bool), all_assistant_mask=each.mask)
        for name in per_token:
            row[_ENTRIES[name]] = each.per_token.get(name, torch.full((count,), math.nan))
        if has_reward:
            row["next", "reward"] = torch.tensor([each.reward])
        for name in parts:
            row["next", "rewards", name] = torch.tensor([each.rewards.get(name, math.nan)])
        if any(r.kept is not None for r in rollouts):
            ids, counts = each.kept or (torch.empty(0), torch.zeros(count))
            row["kept"] = TensorDict(ids=ids.int(), counts=counts.int())
        if experts is not None:
            missing = torch.full((count, *experts.shape[1:]), -1, dtype=torch.int32)
            row["routed_experts"] = missing if each.routed_experts is None else each.routed_experts
        if others:
            row["metadata"] = TensorDict({name: values[i] for name, values in others.items()})
        row["sampled"] = torch.tensor(each.sampled)
        stack.append(row)
    return lazy_stack(stack)
