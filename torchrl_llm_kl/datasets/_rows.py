"""Rows of data, one after another, from a JSONL or Parquet file, a dataset of Hugging Face, a list, or columns.

A row that cannot be read is a :class:`Row` with its problem, so that a caller can count it; only a source that is
unreadable as a whole raises.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeGuard

from torchrl_llm_kl._registry import install_hint
from torchrl_llm_kl.masks import Message, history_to_messages

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile
    from torchrl.data.llm import History

#: A source of rows: the path of a JSONL or Parquet file; a dataset of Hugging Face's ``datasets``, or any other iterable of
#: dicts; a list of dicts, texts or conversations; a dict of columns; a ``History`` of TorchRL.
DataSource: TypeAlias = "str | PathLike[str] | Iterable[object] | Mapping[str, object] | History"

#: The kinds of rows that have tokens to score or to train on.
Layout = Literal["messages", "completion", "preference", "tokens"]

EXPECTED = "`messages`, `prompt` and `completion`, `chosen` and `rejected`, or `tokens` with `prompt_length` or `mask`"
#: Names of token ids.
TOKENS = ("tokens", "input_ids")
#: Names of the mask of token ids: this package's, transformers', TRL's.
MASKS = ("mask", "assistant_masks", "completion_mask")


class DataError(ValueError):
    """Data that cannot be used: the place, the value and the expectation."""


#: Why a row is left out.
Reason = Literal["malformed", "empty", "no assistant turn", "too long", "template", "equal answers"]


class RowError(DataError):
    """One row that cannot be used, and the reason; the message continues the row's place."""

    def __init__(self, detail: str, reason: Reason = "malformed") -> None:
        super().__init__(detail)
        self.reason: Reason = reason


@dataclass(frozen=True)
class Row:
    """One row of a source.

    Args:
        index: from 0; blank lines of a file are not rows.
        place: for people: ``"line 3"``, ``"row 3"``.
        value: the columns by name, a text, or the messages of a conversation; None if the row cannot be read.
        problem: why it cannot be read; empty if it can.
    """

    index: int
    place: str
    value: Any
    problem: str = ""


def read_rows(source: DataSource) -> Rows:
    """Open data of any form as rows.

    Args:
        source: the path of a JSONL or Parquet file (recognised by its content); a dataset of Hugging Face's ``datasets``,
            also a streamed one; a list of dicts, of texts or of conversations (lists of messages); a dict of columns of one
            length; a ``torchrl.data.llm.History`` of conversations. A :class:`Rows` is returned as it is.

    Returns:
        The :class:`Rows`; a file is read as it is iterated, and again by each iteration.

    Raises:
        FileNotFoundError: if the file does not exist.
        ImportError: for a Parquet file without pyarrow.
        DataError: a ``ValueError``; for a damaged file, or columns of unequal lengths.
        TypeError: for anything else.

    Example:
        >>> [row.value for row in read_rows({"question": ["1 + 1", "2 + 3"], "answer": [2, 5]})]
        [{'question': '1 + 1', 'answer': 2}, {'question': '2 + 3', 'answer': 5}]
        >>> read_rows(["a text", 3]).values()
        Traceback (most recent call last):
        ...
        torchrl_llm_kl.datasets._rows.DataError: row 2 of the list is of int, expected a dict of columns, a text or messages.
    """
    if isinstance(source, Rows):
        return source
    if isinstance(source, (str, PathLike)):
        return FileRows(Path(source))
    name = f"the {type(source).__name__}"
    if is_history(source):
        return _IterableRows(_conversations(source), name)
    if isinstance(source, Mapping):
        return _IterableRows(_of_columns(source), "the columns")
    if not isinstance(source, Iterable):
        raise TypeError(f"expected rows: a path, a dataset, a list, a dict of columns or a History, found {name}.")
    return _IterableRows(list(source) if isinstance(source, Iterator) else source, name)


def is_history(value: object) -> bool:
    """Whether a value is torchrl's ``History`` or ``ChatHistory``, without loading torchrl."""
    return any(base.__name__ in ("History", "ChatHistory") for base in type(value).__mro__)


class Rows:
    """Rows of one source; iterate over them as often as needed. :func:`read_rows` makes them.

    Attributes:
        name: of the source, for messages.
        total: the number of rows; None for a streamed dataset, which does not know it.

    Example:
        >>> rows = read_rows([{"prompt": "1 + 1 =", "completion": " 2"}])
        >>> rows.total, rows.layout, [row.place for row in rows]
        (1, 'completion', ['row 1'])
    """

    name: str
    total: int | None

    def __iter__(self) -> Iterator[Row]:
        return self.read()

    def read(self, start: int = 0, stop: int | None = None) -> Iterator[Row]:
        """Rows from number ``start`` to before number ``stop``."""
        return islice(self._read(), start, stop)

    def values(self) -> list[Mapping[str, object] | str | Sequence[object]]:
        """The values of all rows.

        Raises:
            DataError: at the first row that cannot be read.
        """
        values = []
        for row in self:
            if row.value is None:
                raise self.error(row, row.problem)
            values.append(row.value)
        return values

    def error(self, row: Row, problem: str) -> DataError:
        """An error that names the row: ``line 3 of data.jsonl`` and the problem."""
        return DataError(f"{row.place} of {self.name} {problem.rstrip('.')}.")

    @cached_property
    def layout(self) -> Layout:
        """The layout of the first readable row; a ``DataError`` if it holds nothing to score or train on."""
        first = ""
        for row in self:
            if row.value is not None:
                try:
                    return layout_of(row.value)
                except RowError as error:
                    raise self.error(row, str(error)) from None
            first = first or f"{row.place} {row.problem}"
        raise DataError(f"{self.name} holds no row that can be read ({first or 'no row at all'}): expected {EXPECTED}.")

    def _read(self) -> Iterator[Row]:
        raise NotImplementedError


# ------------------------------------------------------------------ rows in memory


class _IterableRows(Rows):
    """Rows of a list, or of anything that iterates over dicts."""

    def __init__(self, items: Iterable[object], name: str) -> None:
        self._items, self.name = items, name
        self.total = len(items) if isinstance(items, Sized) else None  # a streamed dataset has no length

    def _read(self) -> Iterator[Row]:
        for index, item in enumerate(self._items):
            place = f"row {index + 1}"
            if isinstance(item, (Mapping, str)) or is_list(item):
                yield Row(index, place, item)
            else:
                problem = f"is of {type(item).__name__}, expected a dict of columns, a text or messages"
                yield Row(index, place, None, problem)


def _conversations(history: History) -> list[list[Message]]:
    """The conversations of a History of any batch size."""
    rows: list[Any] = history_to_messages(history)
    while rows and isinstance(rows[0], list) and rows[0] and isinstance(rows[0][0], list):
        rows = [conversation for several in rows for conversation in several]
    return [rows] if rows and not isinstance(rows[0], list) else rows


def _of_columns(columns: Mapping[str, object]) -> list[dict[str, object]]:
    lists = {name: _conversations(x) if is_history(x) else as_list(x) for name, x in columns.items()}
    lengths = {name: len(x) if is_list(x) else type(x).__name__ for name, x in lists.items()}
    if len(set(lengths.values())) > 1 or not all(map(is_list, lists.values())):
        raise DataError(f"expected lists of one length, found {lengths}: pass a dict of columns, or a list of dicts.")
    return [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]


# ------------------------------------------------------------------ files


class FileRows(Rows):
    """Rows of a JSONL or Parquet file. A damaged line is a row with its problem, and blank lines are none.

    Args:
        path: the file; Parquet is recognised by its content.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "data.jsonl"
        ...     _ = path.write_text('{"prompt": "a", "completion": "b"}' + chr(10) + "oops")
        ...     [(row.place, row.problem) for row in FileRows(path)]
        [('line 1', ''), ('line 2', 'is not JSON: Expecting value at column 1')]
    """

    total: int

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, str(path)
        if not os.path.isfile(path):  # unlike Path.is_file, also False for a name that is too long
            raise FileNotFoundError(
                f"there is no file {self.name:.200}: pass the path of a JSONL or Parquet file, or a list of rows."
            )
        with path.open("rb") as file:
            self.parquet = file.read(4) == b"PAR1"
            file.seek(0)
            lines = 0 if self.parquet else sum(bool(line.strip()) for line in file)
        self.total = self._parquet_file().metadata.num_rows if self.parquet else lines

    def _parquet_file(self) -> ParquetFile:
        try:
            import pyarrow.parquet as parquet
        except ModuleNotFoundError:
            raise ImportError(f"{self.path} is a Parquet file, which needs pyarrow: {install_hint('data')}.") from None
        try:
            return parquet.ParquetFile(self.path)
        except (OSError, ValueError) as error:
            raise DataError(f"{self.path} is a damaged Parquet file: {error}.") from error

    def _read(self) -> Iterator[Row]:
        if self.parquet:
            batches = self._parquet_file().iter_batches(batch_size=256)
            yield from _IterableRows(chain.from_iterable(batch.to_pylist() for batch in batches), self.name)
            return
        with self.path.open("rb") as file:
            lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
            for index, (number, line) in enumerate(lines):
                yield _parse(index, f"line {number}", line)


def _parse(index: int, place: str, line: bytes) -> Row:
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        return Row(index, place, None, f"is not JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:  # not UTF-8, too many digits, or nested too deeply
        return Row(index, place, None, f"cannot be read: {error}")
    if not isinstance(value, dict):
        return Row(index, place, None, f"is a JSON {type(value).__name__}, expected an object")
    return Row(index, place, value)


# ------------------------------------------------------------------ layouts of rows


def as_list(value: object) -> object:
    """An array, in which pandas and numpy hold a list, as that list; anything else as it is.

    Example:
        >>> import numpy
        >>> as_list(numpy.array([1, 2])), as_list("text")
        ([1, 2], 'text')
    """
    return value.tolist() if hasattr(value, "tolist") else value


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Whether a value is a sequence, but no text."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def read_messages(value: object, name: str) -> list[Message]:
    """Messages without the fields that Parquet fills with None; a RowError for anything else under ``name``."""
    if is_history(value):
        return history_to_messages(value)
    value = as_list(value)
    if not is_list(value):
        raise RowError(f"has `{name}` of {type(value).__name__}, expected a list of messages")
    for message in value:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RowError(f"has {message!r:.60} in `{name}`, expected an object with `role` and `content`")
    return [{key: item for key, item in message.items() if item is not None} for message in value]


def check_unicode(text: str) -> None:
    """Raise a RowError for half of a surrogate pair, which JSON can write and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError(f"has text that is not Unicode: {text[error.start]!a} at character {error.start}") from None


def layout_of(value: object) -> Layout:
    """The layout of a row.

    Raises:
        RowError: if it is none of the layouts; the message continues the row's place.

    Example:
        >>> layout_of({"prompt": "2 + 2 =", "completion": " 4"})
        'completion'
    """
    if not isinstance(value, Mapping):  # a conversation by itself
        return "messages"
    has = {key for key, item in value.items() if item is not None}  # Parquet fills missing columns with None
    if "chosen" in has and "rejected" in has:
        return "preference"
    if "prompt" in has and "completion" in has:
        return "completion"
    if "messages" in has:
        return "messages"
    if has & set(TOKENS) and has & {"prompt_length", *MASKS}:
        return "tokens"
    raise RowError(f"has the columns {', '.join(sorted(value)) or '(none)'}; expected {EXPECTED}")
