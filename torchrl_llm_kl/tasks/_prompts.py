"""Prompts of a task: rows of a file, a list or a data set, and the order in which they are posed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

#: The columns that may hold a prompt, the first of them that a row has.
PROMPT_COLUMNS = ("prompt", "question", "messages")


class PromptError(ValueError):
    """A row holds no prompt, or there are no rows; the message names the row and what it holds."""


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Args:
        question: the text of the user's last message.
        messages: the conversation up to the answer; None for a text that is posed as it is.
        metadata: all other columns of the row, among them ``answer``, the expected one.
    """

    question: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)


class Prompts(Sequence[Prompt]):
    """Prompts by number, checked when they are built; rows of a data set are read when they are posed.

    Args:
        source: texts; rows (dicts with ``prompt``, ``question`` or ``messages``); the path of a JSONL or Parquet file; or a
            Hugging Face ``Dataset``.

    Raises:
        PromptError: for a row without a prompt, or no rows.
        TypeError: for another source.

    Example:
        >>> prompts = Prompts([{"question": "2 + 2?", "answer": "4", "level": 1}])
        >>> prompts[0].messages, prompts[0].metadata
        ([{'role': 'user', 'content': '2 + 2?'}], {'answer': '4', 'level': 1})
    """

    def __init__(self, source: Any) -> None:
        if isinstance(source, (str, Path)):
            from torchrl_llm_kl.datasets import read_rows

            source = list(read_rows(source))
        if not _is_table(source) and (isinstance(source, Mapping) or not isinstance(source, Sequence)):
            raise TypeError(
                f"prompts must be a list of texts or rows, the path of a JSONL or Parquet file, or a data set, got "
                f"{type(source).__name__}. Of a stream, take the first rows: list(itertools.islice(stream, 10_000))."
            )
        if not len(source):
            raise PromptError("there are no prompts: found 0 rows, expected at least one.")
        self._table = source if _is_table(source) else None
        self._prompts = None if _is_table(source) else [parse_prompt(row, i) for i, row in enumerate(source)]
        self._length = len(source)
        _ = self[0]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if self._prompts is not None:
            return self._prompts[index]
        assert self._table is not None
        return parse_prompt(self._table[int(index)], int(index))


def _is_table(source: Any) -> bool:
    """Whether a source is a data set of rows by number, such as ``datasets.Dataset``."""
    return all(hasattr(source, name) for name in ("__len__", "__getitem__", "column_names"))


def parse_prompt(row: Any, index: int) -> Prompt:
    """The prompt of a row: a text, or a mapping with a column of :data:`PROMPT_COLUMNS`.

    Raises:
        PromptError: if there is none.

    Example:
        >>> parse_prompt("hi", 0)
        Prompt(question='hi', messages=[{'role': 'user', 'content': 'hi'}], metadata={})
    """
    if isinstance(row, str):
        return Prompt(row, [{"role": "user", "content": row}])
    if not isinstance(row, Mapping):
        raise PromptError(f"row {index} is {row!r:.60}, expected a text or a dict with a prompt.")
    # Parquet fills missing columns with None.
    column = next((name for name in PROMPT_COLUMNS if row.get(name) is not None), None)
    if column is None:
        raise PromptError(
            f"row {index} has no prompt: found the columns {', '.join(map(str, row)) or '(none)'}, expected one of "
            f"{', '.join(PROMPT_COLUMNS)}. Rename the column that holds the question."
        )
    value = row[column]
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else _messages(value, column, index)
    metadata = {str(key): item for key, item in row.items() if key != column}
    return Prompt(_question(messages), messages, metadata)


def _messages(value: Any, column: str, index: int) -> list[dict[str, Any]]:
    """Messages without the fields that Parquet fills with None."""
    if not isinstance(value, Sequence) or not value:
        raise PromptError(f"row {index} has {value!r:.60} as `{column}`, expected a text or a list of messages.")
    for message in value:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise PromptError(
                f"row {index} has {message!r:.60} in `{column}`, expected a dict with `role` and `content`."
            )
    if value[-1]["role"] == "assistant":
        raise PromptError(
            f"row {index}: `{column}` ends with the assistant's message, expected the prompt alone. Put the expected answer "
            "into another column."
        )
    return [{key: item for key, item in message.items() if item is not None} for message in value]


def _question(messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of the user's last message."""
    for message in reversed(messages):
        if message["role"] == "user":
            content = message.get("content", "")
            if isinstance(content, str):
                return content
            return "".join(part.get("text", "") for part in content if isinstance(part, Mapping))
    return ""


# ------------------------------------------------------------------ the order


class PromptOrder:
    """Which of ``total`` prompts is posed at a position of the run: a new permutation for each epoch.

    The number is a function of ``seed`` and position alone, so that a run continues anywhere.

    Args:
        total: prompts.
        seed: None to pose them as they come.

    Example:
        >>> order = PromptOrder(4, seed=0)
        >>> epochs = [[order[i] for i in range(start, start + 4)] for start in (0, 4)]
        >>> [sorted(epoch) for epoch in epochs], epochs[0] == epochs[1]
        ([[0, 1, 2, 3], [0, 1, 2, 3]], False)
    """

    def __init__(self, total: int, seed: int | None) -> None:
        self.total, self.seed = total, seed

    def __getitem__(self, position: int) -> int:
        epoch, place = divmod(position, self.total)
        if self.seed is None:
            return place
        return int(_permutation(self.total, self.seed, epoch)[place])


@lru_cache(maxsize=4)
def _permutation(total: int, seed: int, epoch: int) -> torch.Tensor:
    digest = sha256(f"{seed}/{epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.randperm(total, generator=generator)
