"""Iteration over rows of data from a JSON, JSONL or Parquet file, a Hugging Face dataset, a list, or columns.

An unreadable row is a :class:`Row` that states its problem, so that a caller can count it. Only an unreadable source raises.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias, cast

from torchrl_llm_kl._registry import install_hint
from torchrl_llm_kl.datasets._values import (
    EXPECTED,
    DataError,
    Layout,
    RowError,
    as_list,
    is_history,
    is_list,
    layout_of,
)
from torchrl_llm_kl.masks import Message, history_to_messages

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile
    from torchrl.data.llm import History

#: A source of rows: the path of a JSON, JSONL or Parquet file, a dataset of Hugging Face's ``datasets`` or any other iterable
#: of dicts, a list of dicts, texts or conversations, a dict of columns, or a ``History`` of TorchRL.
DataSource: TypeAlias = "str | PathLike[str] | Iterable[object] | Mapping[str, object] | History"


@dataclass(frozen=True)
class Row:
    """One row of a source.

    Args:
        index: the number of the row, from 0. Blank lines of a file are not counted.
        place: the place in words, such as ``"line 3"`` or ``"row 3"``.
        value: the columns by name, a text, or the messages of a conversation. None if the row cannot be read.
        problem: why the row cannot be read. Empty if it can be read.
    """

    index: int
    place: str
    value: Any
    problem: str = ""


def read_rows(source: DataSource) -> Rows:
    """Open a data source as rows.

    Args:
        source: one of these:

            - the path of a JSONL, JSON or Parquet file, also compressed with gzip; the content decides the format
            - a dataset of Hugging Face's ``datasets``, which may be streamed
            - a list of dicts, texts or conversations (lists of messages)
            - a dict of columns of equal lengths
            - a ``torchrl.data.llm.History`` of conversations
            - a :class:`Rows`, which is returned unchanged

    Returns:
        The :class:`Rows`. Each iteration reads a file again, row by row.

    Raises:
        FileNotFoundError: if the file does not exist.
        ImportError: for a Parquet file without pyarrow.
        DataError: a ``ValueError``, for a damaged file or for columns of unequal lengths.
        TypeError: for anything else.

    Example:
        >>> [row.value for row in read_rows({"question": ["1 + 1", "2 + 3"], "answer": [2, 5]})]
        [{'question': '1 + 1', 'answer': 2}, {'question': '2 + 3', 'answer': 5}]
        >>> read_rows(["a text", 3]).values()
        Traceback (most recent call last):
        ...
        torchrl_llm_kl.datasets._values.DataError: row 2 of the list is of int, expected a dict of columns, a text or messages.
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
    # An iterator can be read only once, but rows are iterated repeatedly.
    return _IterableRows(list(source) if isinstance(source, Iterator) else source, name)


class Rows:
    """The rows of one source, which can be iterated repeatedly. Use :func:`read_rows` to create them.

    Attributes:
        name: the name of the source in messages.
        total: the number of rows. None for a streamed dataset, whose length is unknown.

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
        """Iterate over rows ``start`` (included) to ``stop`` (excluded)."""
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
        """Create an error that names the row, such as ``line 3 of data.jsonl``, and the problem."""
        return DataError(f"{row.place} of {self.name} {problem.rstrip('.')}.")

    @cached_property
    def layout(self) -> Layout:
        """The layout of the first readable row. Raises a ``DataError`` if that row has no known layout."""
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
    """The rows of a list or of another iterable."""

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
    """List the conversations of a History of any batch size."""
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
    """Rows of a JSON Lines, JSON or Parquet file, which may be compressed with gzip. The content decides the format.

    A JSON file holds an array of rows, one row, or the messages of one conversation. A damaged line of JSON Lines is a row
    that states its problem. Blank lines are skipped.

    Args:
        path: the file.

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
            raise FileNotFoundError(f"there is no file {self.name:.200}: pass a path, or a list of rows.")
        with path.open("rb") as file:
            start = file.read(4)
        self._parquet, self._gzip = start == b"PAR1", start.startswith(b"\x1f\x8b")
        self._whole: list[object] | None = None
        if self._parquet:
            self.total = self._parquet_file().metadata.num_rows
            return
        try:
            with self._open() as file:
                self._whole = _json_document(file)
                file.seek(0)
                self.total = sum(bool(line.strip()) for line in file) if self._whole is None else len(self._whole)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{path} is a damaged gzip file: {error}.") from error

    def _open(self) -> BinaryIO:
        return cast(BinaryIO, gzip.open(self.path)) if self._gzip else self.path.open("rb")

    def _parquet_file(self) -> ParquetFile:
        try:
            import pyarrow.parquet as parquet
        except ModuleNotFoundError:
            raise ImportError(f"a Parquet file needs pyarrow: {install_hint('data')}.") from None
        try:
            return parquet.ParquetFile(self.path)
        except (OSError, ValueError) as error:
            raise DataError(f"{self.path} is a damaged Parquet file: {error}.") from error

    def _read(self) -> Iterator[Row]:
        if self._parquet:
            batches = self._parquet_file().iter_batches(batch_size=256)  # a small part of a file in memory
            yield from _IterableRows(chain.from_iterable(batch.to_pylist() for batch in batches), self.name)
            return
        if self._whole is not None:
            yield from _IterableRows(self._whole, self.name)
            return
        with self._open() as file:
            lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
            for index, (number, line) in enumerate(lines):
                yield _parse(index, f"line {number}", line)


def _json_document(file: BinaryIO) -> list[object] | None:
    """The rows of a file that is one JSON array, or one object on several lines. None for JSON Lines."""
    first = next((line for line in file if line.strip()), b"").strip().removeprefix(b"\xef\xbb\xbf")
    whole_line = first[:1] == b"{" and _parse(0, "", first).value is not None
    if first[:1] not in (b"[", b"{") or whole_line:
        return None
    file.seek(0)
    try:
        document = json.loads(file.read().decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return None  # lines are then reported one by one
    if isinstance(document, list) and not all(isinstance(item, dict) and "role" in item for item in document):
        return document
    return [document]  # one row, or the messages of one conversation


def _parse(index: int, place: str, line: bytes) -> Row:
    try:
        value = json.loads(line.decode("utf-8-sig"))  # a byte order mark may precede the first line
    except json.JSONDecodeError as error:
        return Row(index, place, None, f"is not JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:  # not UTF-8, too many digits, or too deep a nesting
        return Row(index, place, None, f"cannot be read: {error}")
    if not isinstance(value, dict):
        return Row(index, place, None, f"is a JSON {type(value).__name__}, expected an object")
    return Row(index, place, value)
