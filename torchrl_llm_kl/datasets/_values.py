"""Values of a row: messages, token ids, per-token columns, and the layout of a row.

``rollout_columns.csv`` lists the column names of each framework and their roles. A per-token column may cover the whole
sequence, the sequence without its first token, the response, or only the masked-in tokens. Its length decides.

Shapes: ``T`` tokens of a sequence without padding, ``L`` tokens with padding.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias, TypeGuard

import numpy as np
import torch
from torch import Tensor

from torchrl_llm_kl._foreign import read_table
from torchrl_llm_kl.masks import Message, history_to_messages

#: The columns of a row by name.
Fields: TypeAlias = Mapping[str, Any]
#: The layouts of rows with tokens to score or to train on.
Layout = Literal["messages", "completion", "preference", "tokens"]

EXPECTED = "`messages`, `prompt` and `completion`, `chosen` and `rejected`, or `tokens` with `prompt_length` or `mask`"


class DataError(ValueError):
    """Data that cannot be used. The message gives the place, the value and the expectation."""


#: Why a row is left out.
Reason = Literal["malformed", "empty", "no assistant turn", "too long", "template", "equal answers", "not written"]


class RowError(DataError):
    """One row that cannot be used, with the reason. The message continues a sentence that begins with the row's place."""

    def __init__(self, detail: str, reason: Reason = "malformed") -> None:
        super().__init__(detail)
        self.reason: Reason = reason


def is_history(value: object) -> bool:
    """Whether a value is torchrl's ``History`` or ``ChatHistory``."""
    # Compares names, since an import of torchrl takes seconds and most callers have no History.
    return any(base.__name__ in ("History", "ChatHistory") for base in type(value).__mro__)


def as_list(value: object) -> object:
    """Convert an array to a list, since pandas and numpy store lists as arrays. Returns any other value unchanged.

    Example:
        >>> import numpy
        >>> as_list(numpy.array([1, 2])), as_list("text")
        ([1, 2], 'text')
    """
    return value.tolist() if hasattr(value, "tolist") else value


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Whether a value is a sequence other than text."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


#: Roles of the ShareGPT format.
_SHAREGPT = {
    **{"human": "user", "gpt": "assistant", "bot": "assistant", "chatgpt": "assistant", "model": "assistant"},
    **{"observation": "tool", "function_response": "tool", "function_call": "assistant"},
}
#: Keys of a message that say whether it is trained, in OpenAI's, axolotl's, TRL's and other formats.
TRAINED = ("weight", "loss", "trainable", "loss_mask", "train", "train_on_turn")


def read_messages(value: object, name: str) -> list[Message]:
    """Read the messages in column ``name``: dicts with ``role`` and ``content``, or in the ShareGPT format.

    Fields that are None are dropped at every depth, since Parquet fills missing fields with None. JSON text is parsed.

    Raises:
        RowError: if the value is not a list of messages.
    """
    if is_history(value):
        return history_to_messages(value)
    value = from_json(as_list(value))
    if not is_list(value):
        raise RowError(f"has `{name}` of {type(value).__name__}, expected a list of messages")
    return [_read_message(message, name) for message in value]


def _read_message(message: object, name: str) -> Message:
    if isinstance(message, Mapping) and isinstance(message.get("from"), str) and "role" not in message:
        kind = str(message["from"])
        others = {key: item for key, item in message.items() if key not in ("from", "value")}
        message = {"role": _SHAREGPT.get(kind, kind), "content": message.get("value"), **others}
        if kind == "function_call":
            call = from_json(message["content"])
            message |= {"content": "", "tool_calls": [{"type": "function", "function": call}]}
    if isinstance(message, Mapping) and isinstance(message.get("function_call"), Mapping):  # OpenAI's earlier form
        call = {"type": "function", "function": message["function_call"]}
        message = {"tool_calls": [call], **{key: item for key, item in message.items() if key != "function_call"}}
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RowError(f"has {message!r:.60} in `{name}`, expected an object with `role` and `content`")
    return without_nulls(message)


def is_trained(message: Message) -> bool:
    """Whether a message is trained, according to its own keys.

    Raises:
        RowError: if one of the keys holds another value than 0, 1, False or True.
    """
    for key in TRAINED:
        if message.get(key, 1) not in (0, 1):
            raise RowError(f"has the {key} {message[key]!r} in a message, expected 0 or 1")
    return all(message.get(key, 1) for key in TRAINED)


def without_nulls(value: Any) -> Any:
    """Remove dict items that are None, at every depth.

    Example:
        >>> without_nulls({"city": "Oslo", "unit": None, "more": [{"a": None, "b": 1}]})
        {'city': 'Oslo', 'more': [{'b': 1}]}
    """
    if isinstance(value, np.ndarray) and value.dtype == object:  # a list in pandas. Images are arrays of numbers.
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if is_list(value) else value


def from_json(value: object) -> object:
    """Parse JSON text of a list or an object. Any other value is returned unchanged.

    Example:
        >>> from_json('[{"role": "user"}]'), from_json("[draft]")
        ([{'role': 'user'}], '[draft]')
    """
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def row_variables(row: Fields, names: Collection[str]) -> dict[str, Any]:
    """The columns of the row that are listed in ``names``, and the entries of its ``chat_template_kwargs``.

    Example:
        >>> row_variables({"enable_thinking": False, "level": 3, "chat_template_kwargs": {"x": 1}}, {"enable_thinking"})
        {'enable_thinking': False, 'x': 1}
    """
    given = {name: row[name] for name in names if row.get(name) is not None}
    for column in ("chat_template_kwargs", "template_kwargs"):
        own = from_json(row.get(column))
        given |= without_nulls(own) if isinstance(own, Mapping) else {}
    return given


def standard_row(value: object) -> Fields:
    r"""A row with this package's column names: ``messages`` for ShareGPT, ``prompt`` and ``completion`` for Alpaca.

    A text or a bare conversation becomes ``messages``. The ``tools`` column is parsed if it is JSON text.

    Example:
        >>> standard_row({"instruction": "Add.", "input": "1 + 1", "output": "2"})
        {'prompt': 'Add.\n\n1 + 1', 'completion': '2'}
    """
    if not isinstance(value, Mapping):
        return {"messages": value}
    row = _unbatched(value)
    for name in ("conversations", "conversation"):
        if row.get("messages") is None and row.get(name) is not None:
            row["messages"] = row.pop(name)
    if isinstance(row.get("instruction"), str) and row.get("output") is not None:
        asked = [row.pop("instruction"), row.pop("input", None)]
        row |= {"prompt": "\n\n".join(filter(None, asked)), "completion": row.pop("output")}
    if row.get("tools") is not None:
        row["tools"] = without_nulls(from_json(row["tools"])) or None
    return row


def check_unicode(text: str) -> None:
    """Raise a RowError for half of a surrogate pair. JSON can contain one, but no tokenizer accepts it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError(f"has text that is not Unicode: {text[error.start]!a} at character {error.start}") from None


# ------------------------------------------------------------------ token ids


@cache
def rollout_columns() -> Mapping[str, tuple[str, ...]]:
    """The known column names of each role, in the order in which they are tried.

    Example:
        >>> rollout_columns()["old_log_prob"][:2]
        ('old_log_probs', 'prev_logprobs')
    """
    columns: dict[str, tuple[str, ...]] = {}
    for row in read_table("datasets/rollout_columns.csv"):
        columns[row["role"]] = (*columns.get(row["role"], ()), row["column"])
    return columns


@dataclass(frozen=True, eq=False)
class Places:
    """Where the tokens of a row are: ``prompt`` of ``L`` tokens come first, ``mask`` and ``keep`` are bool ``[L]``."""

    prompt: int
    mask: Tensor
    keep: Tensor

    def spread(self, values: Tensor, name: str, noun: str, fill: float) -> Tensor:
        """Place the values ``[l, ...]`` of a column at their tokens, ``[T, ...]``. Other tokens get ``fill``.

        Raises:
            RowError: if the length fits neither the sequence nor the response.
        """
        total, count = len(self.mask), len(values)
        out = values.new_full((total, *values.shape[1:]), fill)
        response = int((self.keep & (torch.arange(total) >= self.prompt)).sum())
        # Padded tokens come with padded columns, so their lengths are tried first.
        if count == total:
            out = values
        elif count == total - self.prompt:
            out[self.prompt :] = values
        elif count == total - 1:
            out[1:] = values
        elif count == int(self.keep.sum()):
            out[self.keep] = values
        elif count == response:
            out[self.keep & (torch.arange(total) >= self.prompt)] = values
        elif count == int(self.mask.sum()):
            out[self.mask] = values
        else:
            raise RowError(
                f"has {count} {noun} in `{name}` for {response} response tokens ({int(self.keep.sum())} with the prompt)"
            )
        return out[self.keep]


class RowColumns:
    """The columns of a row by role.

    Args:
        value: the row.
        known: the column names of each role. Default: :func:`rollout_columns`.

    Attributes:
        names: the column of each role that the row has.
        values: the value of each role.

    Example:
        >>> columns = RowColumns({"input_ids": [5, 6, 7], "loss_mask": [0, 0, 1]})
        >>> columns.names
        {'tokens': 'input_ids', 'mask': 'loss_mask'}
        >>> ids, places = columns.ids()
        >>> ids.tolist(), places.mask.tolist()
        ([5, 6, 7], [False, False, True])
    """

    def __init__(self, value: Mapping[str, object], known: Mapping[str, Sequence[str]] | None = None) -> None:
        self.names: dict[str, str] = {}
        for role, names in (known or rollout_columns()).items():
            column = next((name for name in names if value.get(name) is not None), None)
            if column is not None:
                self.names[role] = column
        # With the sampler's log-probs beside them, `log_probs` are the trainer's, as in slime's training data.
        if self.names.get("sampler_log_prob") not in (None, "log_probs") and value.get("log_probs") is not None:
            self.names.setdefault("old_log_prob", "log_probs")
        self.values: dict[str, Any] = {role: as_list(value[column]) for role, column in self.names.items()}

    def __contains__(self, role: str) -> bool:
        return role in self.names

    def _is_list_of_ids(self, role: str) -> bool:
        value = self.values.get(role)
        return is_list(value) and all(isinstance(item, int) for item in value[:8])

    @property
    def has_ids(self) -> bool:
        """Whether the row has the token ids of prompt and response, and not only text."""
        parts = [self._is_list_of_ids(role) for role in ("prompt", "response")]
        bounded = any(parts) or any(role in self for role in ("mask", "prompt_length", "response_length"))
        return all(parts) or ("tokens" in self and bounded)

    @property
    def used(self) -> set[str]:
        """The columns that are read: all of them, except text beside the token ids."""
        texts = [role for role in ("prompt", "response") if self.has_ids and not self._is_list_of_ids(role)]
        return {name for role, name in self.names.items() if role not in texts}

    def integers(self, role: str) -> Tensor:
        """A list of whole numbers, int64. Raises a RowError for anything else."""
        return integers(self.values[role], self.names[role])

    def ids(self) -> tuple[Tensor, Places]:
        """Token ids without padding, ``[T]``, and their places.

        Raises:
            RowError: if the row does not show which tokens are the response, or its columns contradict each other.
        """
        parts = {role: self.integers(role) for role in ("prompt", "response") if self._is_list_of_ids(role)}
        ids = self.integers("tokens") if "tokens" in self else torch.cat([parts["prompt"], parts["response"]])
        if not len(ids):
            raise RowError("no tokens", "empty")
        keep = self._kept_places(len(ids), len(parts.get("prompt", ())))
        prompt = self._prompt_length(ids, parts, keep)
        every = torch.ones_like(keep)
        mask = keep & (torch.arange(len(ids)) >= (prompt or 0))
        for role in ("mask", "tool_mask"):
            if role in self:
                numbers = self.integers(role)
                sizes = {len(ids), len(ids) - (prompt or 0), int(keep.sum())}
                if self.names[role] == "action_mask":  # OpenRLHF leaves out the first token
                    sizes.add(len(ids) - 1)
                if len(numbers) not in sizes or bool(((numbers != 0) & (numbers != 1)).any()):
                    name = self.names[role]
                    raise RowError(
                        f"has {len(numbers)} numbers in `{name}`, expected {len(ids) - (prompt or 0)} of 0 and 1"
                    )
                given = Places(prompt or 0, every, keep).spread(numbers, self.names[role], "numbers", 0)
                mask[keep] = mask[keep] & (given == 1)
        if prompt is None:
            prompt = int(mask.int().argmax())
        ids = ids[keep]
        if len(ids) and int(ids.min()) < 0:
            name = self.names.get("tokens") or self.names["response"]
            raise RowError(f"has the token id {int(ids.min())} in `{name}`, expected ids of at least 0 without padding")
        mask[int(keep.int().argmax())] = False  # the first token has no prefix, so it has no log-prob
        return ids, Places(prompt, mask, keep)

    def _kept_places(self, total: int, prompt: int) -> Tensor:
        """True at tokens other than padding, bool ``[L]``. ``prompt`` is the length of the separate prompt."""
        keep = torch.ones(total, dtype=torch.bool)
        if "attention_mask" in self:
            given = self.integers("attention_mask") == 1
            if len(given) != total:
                raise RowError(f"has {len(given)} numbers in `{self.names['attention_mask']}` for {total} tokens")
            return given
        if "length" in self:
            keep[self._length("length", total) :] = False
        if "prompt_mask" in self:
            given = self.integers("prompt_mask") == 1
            if len(given) != prompt:
                raise RowError(f"has {len(given)} numbers in `{self.names['prompt_mask']}` for {prompt} prompt tokens")
            if bool(given.any()):  # a mask of zeros means that the prompt is not trained
                keep[:prompt] = given
        return keep

    def _length(self, role: str, most: int) -> int:
        length = self.values[role]
        if not isinstance(length, int) or isinstance(length, bool) or not 0 <= length <= most:
            raise RowError(f"has {self.names[role]} {length!r}, expected a whole number from 0 to {most}")
        return length

    def _prompt_length(self, ids: Tensor, parts: Mapping[str, Tensor], keep: Tensor) -> int | None:
        """The number of tokens before the response, with padding. None if only the mask shows the response."""
        total = len(ids)
        if parts:
            role, part = next(iter(parts.items()))
            inside = ids[: len(part)] if role == "prompt" else ids[total - len(part) :]
            if not torch.equal(inside, part):
                raise RowError(f"has other tokens in `{self.names[role]}` than in `{self.names['tokens']}`")
            return len(part) if role == "prompt" else total - len(part)
        real = int(keep.sum())
        if "prompt_length" in self:
            count = self._length("prompt_length", real)
        elif "response_length" in self:
            count = real - self._length("response_length", real)
        else:
            return None
        # Both lengths are without padding.
        return int(keep.nonzero()[count]) if count < real else total


def integers(value: object, name: str) -> Tensor:
    """Read a list of whole numbers, int64.

    Raises:
        RowError: if the value is anything else.
    """
    numbers = None
    with suppress(TypeError, ValueError, RuntimeError):  # a number beyond int64 is a RuntimeError
        numbers = torch.tensor(as_list(value))
    if numbers is None or numbers.ndim != 1 or (len(numbers) and numbers.dtype not in (torch.long, torch.bool)):
        raise RowError(f"has {value!r:.40} in `{name}`, expected a list of whole numbers")
    return numbers.long()


# ------------------------------------------------------------------ responses of an engine's API


#: Each choice of a response has at least one of these entries.
_OF_CHOICE = {"message", "token_ids", "text"}


def split_choices(value: Any) -> list[Any]:
    """Split a response object of the OpenAI API into one row for each choice. Any other row is returned unchanged.

    The object may be the row, or its column ``response`` with the request in ``request``. vLLM adds token ids with
    ``return_token_ids``.

    Example:
        >>> choice = {"token_ids": [7], "logprobs": {"token_logprobs": [-0.5]}, "prompt_token_ids": [5, 6]}
        >>> split_choices({"id": "cmpl-1", "choices": [choice]})[0]
        {'prompt_ids': [5, 6], 'completion_ids': [7], 'logprobs': [-0.5], 'group': 'cmpl-1'}
    """
    if not isinstance(value, Mapping):
        return [value]
    answer = value.get("response")
    if isinstance(answer, Mapping) and "choices" in answer:
        request = value.get("request")
        asked = dict(request) if isinstance(request, Mapping) else {}
        others = {name: item for name, item in value.items() if name not in ("response", "request")}
        passed_on = ("prompt", "messages", "tools", "chat_template_kwargs", "system")
        value = {**others, **{name: asked[name] for name in passed_on if name in asked}, **answer}
    choices = value.get("choices")
    of_engine = is_list(choices) and all(isinstance(c, Mapping) and c.keys() & _OF_CHOICE for c in choices)
    if not choices or not of_engine or value.keys() & {"completion", "completion_ids", "responses", "output"}:
        return [value]
    rows: list[Fields] = []
    for number, choice in enumerate(choices):
        known = {"choices", "prompt_token_ids", "id", "object", "created", "model", "usage", "messages", "prompt"}
        row = {name: item for name, item in value.items() if name not in known}
        row["prompt_ids"] = choice.get("prompt_token_ids") or value.get("prompt_token_ids")
        row["completion_ids"] = choice.get("token_ids")
        row["logprobs"] = _log_probs_of(choice.get("logprobs"))
        row["group"] = value.get("id")
        for name in rollout_columns()["reward"]:  # one reward for each choice
            if is_list(row.get(name)) and len(row[name]) == len(choices):
                row[name] = row[name][number]
        if row["completion_ids"] is None or row["prompt_ids"] is None:
            row["prompt"] = value.get("messages", value.get("prompt"))
            message = choice.get("message")
            row["completion"] = choice.get("text") if message is None else [message]
        rows.append({name: item for name, item in row.items() if item is not None})
    return rows


def _log_probs_of(value: object) -> list[float] | None:
    """The log-probs of the sampled tokens in a choice, of the completions or the chat API."""
    if not isinstance(value, Mapping):
        return None
    if is_list(value.get("content")):
        return [token["logprob"] for token in value["content"]]
    return value.get("token_logprobs")


# ------------------------------------------------------------------ layouts of rows


def _unbatched(value: Fields) -> dict[str, Any]:
    """The columns of a row that is a batch of one, as NeMo-RL writes them. Any other row is returned unchanged."""
    items = {name: as_list(item) for name, item in value.items()}
    lists: dict[str, Sequence[Any]] = {name: item for name, item in items.items() if is_list(item)}
    flat = {name for role in ("tokens", "prompt", "response", "mask") for name in rollout_columns()[role]}
    nested = any(is_list(item[0]) for name, item in lists.items() if name in flat and len(item) == 1)
    is_batch = nested and len(lists) > 1 and all(len(item) == 1 for item in lists.values())
    return {**value, **({name: item[0] for name, item in lists.items()} if is_batch else {})}


def layout_of(value: object) -> Layout:
    """Determine the layout of a row.

    Raises:
        RowError: if the row has no known layout.

    Example:
        >>> layout_of({"prompt": "2 + 2 =", "completion": " 4"})
        'completion'
    """
    value = standard_row(split_choices(value)[0])
    has = {key for key, item in value.items() if item is not None}  # Parquet fills missing columns with None
    if "chosen" in has and "rejected" in has:
        return "preference"
    own = RowColumns(value)
    if own.has_ids:
        return "tokens"
    if "prompt" in own and "response" in own:
        return "completion"
    if "messages" in has:
        return "messages"
    raise RowError(f"has the columns {', '.join(sorted(value)) or '(none)'}; expected {EXPECTED}")
