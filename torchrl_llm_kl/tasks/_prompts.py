"""Prompts of a task: the rows of a file, a list or a dataset, and their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from typing import Any, cast

import torch

from torchrl_llm_kl._numerics import check_range
from torchrl_llm_kl.datasets import (
    DataError,
    DataSource,
    RowError,
    as_list,
    check_unicode,
    read_messages,
    read_rows,
    standard_row,
)
from torchrl_llm_kl.masks import ASSISTANT, Message, split_images

#: The columns that may hold a prompt. The first one that a row has is used.
PROMPT_COLUMNS = ("prompt", "question", "messages")


class PromptError(DataError):
    """A row holds no prompt, or the source has no rows. The message names the row and its columns."""


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Args:
        question: the text of the user's last message.
        messages: the conversation before the answer.
        metadata: all other columns of the row, such as the expected ``answer``.
    """

    question: str
    messages: list[Message] = field(default_factory=list)
    metadata: dict[str, object] = field(default_factory=dict)


class Prompts(Sequence[Prompt]):
    """A sequence of prompts.

    The rows of a file or a list are checked at construction. The rows of a dataset are read and checked when they are used.

    Args:
        source: a list of texts, of rows (dicts with ``prompt``, ``question`` or ``messages``) or of conversations, a dict of
            columns, the path of a JSONL or Parquet file, or a ``Dataset`` of Hugging Face's ``datasets``.

    Raises:
        PromptError: if a row has no prompt, or the source has no rows.
        DataError: if a file or a row cannot be read.
        TypeError: if the source has another type.

    Example:
        >>> prompts = Prompts([{"question": "2 + 2?", "answer": "4", "level": 1}])
        >>> prompts[0].messages, prompts[0].metadata
        ([{'role': 'user', 'content': '2 + 2?'}], {'answer': '4', 'level': 1})
    """

    def __init__(self, source: DataSource) -> None:
        self._table: Any = source if _is_table(source) else None
        self._prompts: list[Prompt] = []
        if self._table is None:
            rows = read_rows(source)
            if rows.total is None:
                raise TypeError(f"{rows.name} is a stream without a length: pass a list of its first rows.")
            for row in rows:
                if row.value is None:
                    raise rows.error(row, row.problem)
                self._prompts.append(parse_prompt(row.value, f"{row.place} of {rows.name}"))
        if not len(self):
            raise PromptError("no prompts: found 0 rows, expected at least one.")
        _ = self[0]

    def __len__(self) -> int:
        return len(self._prompts if self._table is None else self._table)

    def __getitem__(self, index: int) -> Prompt:  # type: ignore[override]  # no slices
        if self._table is None:
            return self._prompts[index]
        return parse_prompt(self._table[int(index)], f"row {int(index) + 1} of the data set")


def _is_table(source: object) -> bool:
    """Whether a source is a dataset with random access to its rows, such as ``datasets.Dataset``."""
    return all(hasattr(source, name) for name in ("__len__", "__getitem__", "column_names"))


def parse_prompt(row: object, place: str) -> Prompt:
    """Parse a row into a prompt.

    Args:
        row: a text, messages, or a mapping with a column of :data:`PROMPT_COLUMNS`.
        place: the name of the row in errors.

    Raises:
        PromptError: if the row holds no prompt.

    Example:
        >>> parse_prompt("hi", "row 1")
        Prompt(question='hi', messages=[{'role': 'user', 'content': 'hi'}], metadata={})
    """
    try:
        return _parsed(row if isinstance(row, Mapping) else {"prompt": row})
    except (TypeError, ValueError) as error:  # a RowError, or of messages and images
        raise PromptError(f"{place} {error}.") from None


def _parsed(row: Mapping[str, object]) -> Prompt:
    row = standard_row(row)
    # Parquet fills missing columns with None, so None counts as missing.
    column = next((name for name in PROMPT_COLUMNS if row.get(name) is not None), None)
    if column is None:
        filled = ", ".join(str(name) for name, value in row.items() if value is not None) or "(none)"
        raise RowError(f"has no prompt: found the columns {filled}, expected one of {', '.join(PROMPT_COLUMNS)}")
    value = row[column]
    messages: list[Message] = [{"role": "user", "content": value}]
    if not isinstance(value, str):
        messages = read_messages(value, column)
    if not messages or messages[-1]["role"] == ASSISTANT:
        raise RowError(f"has a `{column}` without a last message of the user: put the answer into another column")
    if split_images(messages)[1]:
        raise RowError(f"has images in `{column}`, and a task supports only text. Leave such rows out")
    if isinstance(row.get("system"), str) and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": row["system"]}, *messages]
    question = _question(messages)
    check_unicode(question)
    return Prompt(question, messages, {str(key): item for key, item in row.items() if key != column})


def _question(messages: Sequence[Message]) -> str:
    """The text of the user's last message."""
    content = as_list(next((m.get("content", "") for m in reversed(messages) if m["role"] == "user"), ""))
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in cast(Sequence[object], content) if isinstance(part, Mapping))


# ------------------------------------------------------------------ the order


@dataclass(frozen=True)
class PromptOrder:
    """The order of the prompts: a new permutation for each epoch.

    The prompt at a position of the run depends only on ``seed`` and the position, so a run can continue from any position.

    Args:
        seed: the seed of the permutations. None keeps the order of the source.
        start: the number of prompts that all ranks together have used already. A resumed run continues with the next prompt.
        rank: the index of this env among ``world_size`` envs that share the prompts. Together they use each prompt once in an
            epoch.
        world_size: the number of envs that share the prompts.

    Raises:
        ValueError: if a number is out of range.

    Example:
        >>> order = PromptOrder(seed=0)
        >>> epochs = [[order.at(i, 4) for i in range(start, start + 4)] for start in (0, 4)]
        >>> [sorted(epoch) for epoch in epochs], epochs[0] == epochs[1]
        ([[0, 1, 2, 3], [0, 1, 2, 3]], False)
    """

    seed: int | None = 0
    start: int = 0
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        check_range(1, world_size=self.world_size)
        check_range(0, start=self.start)
        check_range(0, self.world_size - 1, rank=self.rank)

    def at(self, position: int, total: int) -> int:
        """The index of the prompt at a position of the run, among ``total`` prompts."""
        epoch, place = divmod(position, total)
        return place if self.seed is None else int(_permutation(total, self.seed, epoch)[place])


@lru_cache(maxsize=4)  # training and evaluation, and the two epochs of a step at their border
def _permutation(total: int, seed: int, epoch: int) -> torch.Tensor:
    # A hash of both numbers: with seed + epoch, neighbouring seeds would share the permutations of all but one epoch.
    digest = sha256(f"{seed}/{epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))  # torch takes less than 64 bits
    return torch.randperm(total, generator=generator)
