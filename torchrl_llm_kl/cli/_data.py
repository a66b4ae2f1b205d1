"""Files of conversations, pairs or token ids, row by row, and their tokens.

``T`` is the number of tokens of an answer, prompt and response together. A row that cannot be scored is a :class:`Skip`
with its reason; only a file that is unreadable as a whole raises.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from torchrl_llm_kl.cli._console import CommandError
from torchrl_llm_kl.masks import (
    AssistantMaskError,
    MissingChatTemplateError,
    encode_with_mask,
    mask_from_prompt_lengths,
    render_conversation,
)

Layout = Literal["messages", "completion", "preference", "tokens"]
Reason = Literal["malformed", "empty", "no assistant turn", "too long", "template"]

EXPECTED = "`messages`, `prompt` and `completion`, `chosen` and `rejected`, or `tokens` with `prompt_length` or `mask`"
_TOKENS = ("tokens", "input_ids")
#: Names of the mask of token ids: this package's, transformers', TRL's.
_MASKS = ("mask", "assistant_masks", "completion_mask")


class Unscorable(ValueError):
    """A row without anything to score, and the reason."""

    def __init__(self, detail: str, reason: Reason = "malformed") -> None:
        super().__init__(detail)
        self.reason: Reason = reason


# ------------------------------------------------------------------ rows of a file


@dataclass(frozen=True)
class Row:
    """One row of a file."""

    index: int  #: from 0; blank lines are not rows
    place: str  #: for people: ``"line 3"``, ``"row 3"``
    value: Mapping[str, Any] | None  #: None if it cannot be read
    problem: str = ""  #: why


class Source:
    """A JSONL or Parquet file of rows.

    Args:
        path: the file; Parquet is recognised by its content.

    Attributes:
        total: number of rows.
        digest: of the file's bytes.
        layout: of the first readable row.

    Raises:
        CommandError: if the file is missing, empty, unreadable, or its first readable row has no known layout.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.is_dir():
            raise CommandError(f"{path} is a folder, expected a JSONL or Parquet file.")
        try:
            self.digest, lines, start = _read_through(path)
        except FileNotFoundError:
            raise CommandError(f"there is no file {path}: pass the path of a JSONL or Parquet file.") from None
        if not start:
            raise CommandError(f"{path} is empty: expected a JSON object on each line, or a Parquet file.")
        self.parquet = start.startswith(b"PAR1")
        self.total = self._parquet_file().metadata.num_rows if self.parquet else lines
        self.layout = self._first_layout()

    def _parquet_file(self) -> Any:
        try:
            import pyarrow.parquet as parquet
        except ModuleNotFoundError:
            raise CommandError(
                f"{self.path} is a Parquet file, which needs pyarrow: pip install 'torchrl-llm-kl[cli]'."
            ) from None
        try:
            return parquet.ParquetFile(self.path)
        except (OSError, ValueError) as error:
            raise CommandError(f"{self.path} is a damaged Parquet file: {error}.") from error

    def _first_layout(self) -> Layout:
        first = ""
        for row in self.rows():
            if row.value is not None:
                try:
                    return layout_of(row.value)
                except Unscorable as error:
                    raise CommandError(f"{row.place} of {self.path} {error}.") from None
            first = first or f"{row.place} {row.problem}"
        raise CommandError(
            f"{self.path} holds no row that can be read ({first or 'no row at all'}): expected {EXPECTED}."
        )

    def rows(self, start: int = 0, limit: int | None = None) -> Iterator[Row]:
        """Rows from number ``start`` to before number ``limit``."""
        return islice(self._parquet_rows() if self.parquet else self._json_rows(), start, limit)

    def _parquet_rows(self) -> Iterator[Row]:
        index = 0
        for batch in self._parquet_file().iter_batches(batch_size=256):
            for value in batch.to_pylist():
                yield Row(index, f"row {index + 1}", value)
                index += 1

    def _json_rows(self) -> Iterator[Row]:
        index = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                yield _parse(index, f"line {number}", line)
                index += 1


def _read_through(path: Path) -> tuple[str, int, bytes]:
    """Digest, number of lines that are not blank, and the first bytes."""
    digest, count, start = sha256(), 0, b""
    with path.open("rb") as file:
        for line in file:
            start = start or line[:4]
            digest.update(line)
            count += bool(line.strip())
    return digest.hexdigest(), count, start


def _parse(index: int, place: str, line: bytes) -> Row:
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return Row(index, place, None, "is not UTF-8")
    except json.JSONDecodeError as error:
        return Row(index, place, None, f"is not JSON: {error.msg} at column {error.colno}")
    except RecursionError:
        return Row(index, place, None, "is not JSON: nested too deeply")
    if not isinstance(value, dict):
        return Row(index, place, None, f"is a JSON {type(value).__name__}, expected an object")
    return Row(index, place, value)


def layout_of(value: Mapping[str, Any]) -> Layout:
    """What a row holds.

    Raises:
        Unscorable: if it is none of the layouts.

    Example:
        >>> layout_of({"prompt": "2 + 2 =", "completion": " 4"})
        'completion'
    """
    has = {key for key, item in value.items() if item is not None}  # Parquet fills missing columns with None
    if "chosen" in has and "rejected" in has:
        return "preference"
    if "prompt" in has and "completion" in has:
        return "completion"
    if "messages" in has:
        return "messages"
    if has & set(_TOKENS):
        if "prompt_length" in has or has & set(_MASKS):
            return "tokens"
        raise Unscorable("has token ids but no `prompt_length` and no `mask`, which say what to score")
    raise Unscorable(f"has the columns {', '.join(sorted(value)) or '(none)'}; expected {EXPECTED}")


# ------------------------------------------------------------------ answers and their tokens


@dataclass(frozen=True, eq=False)
class Answer:
    """One sequence to score."""

    index: int  #: of its row
    part: str  #: ``"chosen"``, ``"rejected"``, or empty
    tokens: Tensor  #: int64 ``[T]``
    mask: Tensor  #: True at the tokens to score; bool ``[T]``, False at the first


@dataclass(frozen=True)
class Skip:
    """A sequence that is not scored."""

    index: int
    part: str
    place: str
    reason: Reason
    detail: str = ""


@dataclass(frozen=True)
class Encoder:
    """Turns rows into answers.

    Args:
        layout: that every row must have.
        tokenizer: None for token ids.
        vocab_size: of the models; None if unknown.
        max_length: the longest sequence that is scored; None for no limit.
    """

    layout: Layout
    tokenizer: Any
    vocab_size: int | None
    max_length: int | None

    def encode(self, row: Row) -> list[Answer | Skip]:
        """The answers of a row: two for a preference, else one."""
        parts = ("chosen", "rejected") if self.layout == "preference" else ("",)
        return [self._part(row, part) for part in parts]

    def _part(self, row: Row, part: str) -> Answer | Skip:
        def skip(reason: Reason, detail: str = "") -> Skip:
            return Skip(row.index, part, row.place, reason, detail)

        if row.value is None:
            return skip("malformed", row.problem)
        try:
            layout = layout_of(row.value)
            if layout != self.layout:
                raise Unscorable(f"holds {layout}, while the first row holds {self.layout}")
            tokens, mask = self._tokens(row.value, part)
        except Unscorable as error:
            return skip(error.reason, str(error))
        if self.max_length is not None and len(tokens) > self.max_length:
            return skip("too long", f"{len(tokens)} tokens, at most {self.max_length}")
        if self.vocab_size is not None and len(tokens) and int(tokens.max()) >= self.vocab_size:
            found = f"token id {int(tokens.max())} is outside the vocabulary of {self.vocab_size}"
            return skip("malformed", found)
        if not mask.any():
            return skip("empty", "no token to score")
        return Answer(row.index, part, tokens, mask)

    def _tokens(self, value: Mapping[str, Any], part: str) -> tuple[Tensor, Tensor]:
        if self.layout == "tokens":
            return _of_ids(value)
        if self.layout == "messages":
            return self._of_messages([], _messages(value["messages"], "messages"), value)
        name = part or "completion"
        prompt, answer = value.get("prompt"), value[name]
        if isinstance(answer, str) and isinstance(prompt, str):
            return self._of_text(prompt, answer)
        if isinstance(answer, str) and prompt is None:
            raise Unscorable(f"has `{name}` as text without a `prompt`")
        if isinstance(answer, str) or isinstance(prompt, str):
            raise Unscorable(f"has one of `prompt` and `{name}` as text and the other as messages: give both alike")
        answer = _messages(answer, name)
        if prompt is None:  # both conversations begin with the prompt
            other = _messages(value["rejected" if part == "chosen" else "chosen"], "chosen and rejected")
            shared = next((i for i, (a, b) in enumerate(zip(answer, other, strict=False)) if a != b), None)
            shared = min(len(answer), len(other)) if shared is None else shared
            return self._of_messages(answer[:shared], answer[shared:], value)
        return self._of_messages(_messages(prompt, "prompt"), answer, value)

    def _of_messages(
        self, prompt: list[Mapping[str, Any]], answer: list[Mapping[str, Any]], value: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """The assistant's turns of ``answer``, on the chat template."""
        if not answer:
            raise Unscorable("no message", "empty")
        if not any(message["role"] == "assistant" for message in answer):
            raise Unscorable("", "no assistant turn")
        try:
            rendered = render_conversation(self.tokenizer, [*prompt, *answer], tools=value.get("tools"))
            if not any(message["role"] == "assistant" for message in prompt):
                return rendered.token_ids, rendered.assistant_mask
            before = render_conversation(self.tokenizer, prompt, tools=value.get("tools"))
            spans = rendered.assistant_spans[len(before.assistant_spans) :]
            ((tokens, mask),) = encode_with_mask(self.tokenizer, [rendered.text], [spans])
            return tokens, mask
        except MissingChatTemplateError:
            raise
        except AssistantMaskError as error:
            raise Unscorable(str(error), "template") from error
        except Exception as error:  # whatever a template raises
            raise Unscorable(f"{type(error).__name__}: {error}", "template") from error

    def _of_text(self, prompt: str, answer: str) -> tuple[Tensor, Tensor]:
        """Plain text without a template, after the begin-of-sequence token if the tokenizer adds one."""
        if not answer:
            raise Unscorable("no text to score", "empty")
        ((tokens, mask),) = encode_with_mask(
            self.tokenizer, [prompt + answer], [[(len(prompt), len(prompt) + len(answer))]]
        )
        bos = self.tokenizer.bos_token_id
        if bos is not None and bos in self.tokenizer("").input_ids[:1] and tokens[:1].tolist() != [bos]:
            mask[:1] = not prompt  # an answer without a prompt has a prefix after all
            tokens, mask = torch.cat([torch.tensor([bos]), tokens]), torch.cat([torch.tensor([False]), mask])
        return tokens, mask


def _messages(value: Any, name: str) -> list[Mapping[str, Any]]:
    """Messages without the fields that Parquet fills with None."""
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise Unscorable(f"has `{name}` of {type(value).__name__}, expected a list of messages")
    for message in value:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise Unscorable(f"has {message!r:.60} in `{name}`, expected an object with `role` and `content`")
    return [{key: item for key, item in message.items() if item is not None} for message in value]


def _of_ids(value: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    name = next(key for key in _TOKENS if value.get(key) is not None)
    ids = _integers(value[name], name)
    if not len(ids):
        raise Unscorable("no tokens", "empty")
    if int(ids.min()) < 0:
        raise Unscorable(f"has the token id {int(ids.min())} in `{name}`, expected ids of at least 0 without padding")
    given = next((key for key in _MASKS if value.get(key) is not None), None)
    if given is None:
        length = value["prompt_length"]
        if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length <= len(ids):
            raise Unscorable(f"has prompt_length {length!r}, expected a whole number from 0 to {len(ids)}")
        return ids, mask_from_prompt_lengths(torch.tensor([length]), torch.tensor([len(ids)]))
    held = value[given]
    mask = _integers([int(x) if isinstance(x, bool) else x for x in held] if isinstance(held, list) else held, given)
    if len(mask) != len(ids) or bool(((mask != 0) & (mask != 1)).any()):
        raise Unscorable(
            f"has {len(mask)} numbers in `{given}`, expected {len(ids)}, 1 at the tokens to score and 0 elsewhere"
        )
    mask = mask.bool()
    mask[:1] = False  # it has no prefix
    return ids, mask


def _integers(value: Any, name: str) -> Tensor:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise Unscorable(f"has `{name}` of {type(value).__name__}, expected a list of whole numbers")
    wrong = next((x for x in value if isinstance(x, bool) or not isinstance(x, int) or abs(x) >= 2**63), None)
    if wrong is not None:
        raise Unscorable(f"has {wrong!r:.40} in `{name}`, expected whole numbers")
    return torch.tensor(value, dtype=torch.long)
