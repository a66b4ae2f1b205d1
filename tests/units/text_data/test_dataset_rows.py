"""Rows of files, datasets, lists and columns; their places, and what is wrong with a source."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from torchrl_llm_kl.datasets import DataError, Row, Rows, read_rows

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    """Rows as JSON lines; text as it is."""
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return path


# ------------------------------------------------------------------ files


def test_lines_and_rows(tmp_path: Path) -> None:
    """Blank lines are no rows; a bad line keeps its number."""
    path = tmp_path / "data.jsonl"
    digits = b'{"a": ' + b"1" * 5000 + b"}"
    path.write_bytes(b'\xef\xbb\xbf{"messages": []}\n\n[1]\n{"messages"\n\xff\xfe\n  \n{"messages": []}\n' + digits)
    source = read_rows(path)
    assert source.total == 6
    rows = list(source)
    lines = [f"line {number}" for number in (1, 3, 4, 5, 7, 8)]
    assert [(row.index, row.place) for row in rows] == list(enumerate(lines))
    problems = ["", "is a JSON list, expected an object", "is not JSON", "is not UTF-8", "", "cannot be read"]
    assert [row.problem.split(":")[0] for row in rows] == problems
    assert rows[5].problem.startswith("cannot be read: Exceeds the limit")
    assert [row.index for row in source.read(2, 4)] == [2, 3]
    path = write_jsonl(path, [{"a": 1}, "", "{"])
    with pytest.raises(DataError, match=rf"line 3 of {path} is not JSON: .* at column \d+\.$"):
        read_rows(path).values()


def test_the_first_readable_row_decides_the_layout(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", ["oops", {"tokens": [1, 2], "mask": [0, 1]}])
    assert read_rows(path).layout == "tokens"
    path = write_jsonl(tmp_path / "data.jsonl", ["oops", {"tokens": [1, 2]}])
    with pytest.raises(DataError, match=r"line 2 of .* no `prompt_length` and no `mask`"):
        _ = read_rows(path).layout


def test_without_pyarrow_parquet_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "data.parquet").write_bytes(b"PAR1....")
    with pytest.raises(ImportError, match=r"pip install 'torchrl-llm-kl\[data\]'"):
        read_rows(tmp_path / "data.parquet")


def test_parquet_has_the_rows_of_json_lines(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    values = [{"question": "a", "answer": 1}, {"question": "b", "answer": None}, {"question": "ü", "answer": 3}]
    parquet.write_table(pa.Table.from_pylist(values), tmp_path / "data.bin", row_group_size=2)
    rows = read_rows(str(tmp_path / "data.bin"))
    assert rows.total == 3
    assert [(row.index, row.place) for row in rows] == [(0, "row 1"), (1, "row 2"), (2, "row 3")]
    assert rows.values() == read_rows(write_jsonl(tmp_path / "data.jsonl", values)).values() == values


def test_no_file(tmp_path: Path) -> None:
    message = r"there is no file word word .*\.\.\.: pass the path .* or a list of rows"
    with pytest.raises(FileNotFoundError, match=message):
        read_rows("word " * 200)
    with pytest.raises(FileNotFoundError, match=r"there is no file .*nothing"):
        read_rows(tmp_path / "nothing")
    with pytest.raises(DataError, match="is a folder, expected a JSONL or Parquet file"):
        read_rows(tmp_path)
    for content, expected in (
        (b"", "is empty: expected a JSON object on each line"),
        (b"PAR1 and no more", "is a damaged Parquet file"),
    ):
        (tmp_path / "data").write_bytes(content)
        with pytest.raises(DataError, match=expected):
            read_rows(tmp_path / "data")


# ------------------------------------------------------------------ what is in memory


class Streamed:
    """Iterates over dicts from the beginning each time, and has no length, as a streamed dataset."""

    column_names = ("question",)

    def __iter__(self) -> Iterator[dict[str, str]]:
        yield from ({"question": text} for text in "ab")


def test_rows_of_lists_columns_and_streams() -> None:
    questions = [{"question": "a"}, {"question": "b"}]
    sources: list[tuple[Any, list[Any], int | None]] = [
        (questions, questions, 2),
        (["a", "b"], ["a", "b"], 2),
        ([CHAT], [CHAT], 1),
        ({"question": ["a", "b"], "n": (1, 2)}, [{"question": "a", "n": 1}, {"question": "b", "n": 2}], 2),
        ({}, [], 0),
        (Streamed(), questions, None),
        (iter(["a", "b"]), ["a", "b"], 2),
    ]
    for source, values, total in sources:
        rows = read_rows(source)
        assert rows.values() == values
        assert rows.values() == values, "again"
        assert rows.total == total, values
        assert [(row.index, row.place) for row in rows] == [(i, f"row {i + 1}") for i in range(len(values))]
        assert read_rows(rows) is rows


def test_datasets_of_hugging_face() -> None:
    datasets = pytest.importorskip("datasets")
    values = [{"question": "a", "answer": 1}, {"question": "b", "answer": 2}]
    dataset = datasets.Dataset.from_list(values)
    assert read_rows(dataset).values() == values
    assert read_rows(dataset).total == 2
    streamed = read_rows(dataset.to_iterable_dataset())
    assert streamed.values() == streamed.values() == values
    with pytest.raises(DataError, match="found the splits train, test: pass one of them"):
        read_rows(datasets.DatasetDict(train=dataset, test=dataset))


def test_conversations_of_a_history() -> None:
    from torchrl.data.llm import History

    other = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "because"}]
    history = History.from_chats([CHAT, other])
    assert read_rows(history).values() == [CHAT, other]
    assert read_rows(history[0]).values() == [CHAT]  # one conversation
    assert read_rows(history.reshape(2, 1, 2)).values() == [CHAT, other]  # of any batch size
    assert read_rows({"chosen": history, "n": [1, 2]}).values() == [{"chosen": CHAT, "n": 1}, {"chosen": other, "n": 2}]


def test_rows_of_the_wrong_type_keep_their_place() -> None:
    rows = read_rows([{"a": 1}, 3, None, b"x"])
    assert [row.problem.split(",")[0] for row in rows] == ["", "is of int", "is of NoneType", "is of bytes"]
    with pytest.raises(DataError, match="row 2 of the list is of int, expected a dict of columns, a text or messages"):
        rows.values()


def test_what_has_no_rows() -> None:
    class DataFrame:
        iterrows = staticmethod(list)

    sources: list[tuple[Any, type[Exception], str]] = [
        (3, TypeError, "found int"),
        (b"data.jsonl", TypeError, "found bytes"),
        (None, TypeError, "found NoneType"),
        (DataFrame(), TypeError, r"pass to_dict\('records'\)"),
        ({"question": "a"}, DataError, "found 'question' of str: pass a list of dicts for rows, or a dict of lists"),
        ({"a": [1], "b": [1, 2]}, DataError, "of one length, found {'a': 1, 'b': 2}"),
    ]
    for source, error, expected in sources:
        with pytest.raises(error, match=expected):
            read_rows(source)


def test_no_row_that_can_be_read() -> None:
    rows = read_rows([3])
    assert isinstance(rows, Rows)
    assert list(rows) == [Row(0, "row 1", None, "is of int, expected a dict of columns, a text or messages")]
    with pytest.raises(DataError, match="the list holds no row that can be read"):
        _ = rows.layout
    with pytest.raises(DataError, match=r"the list holds no row that can be read \(no row at all\)"):
        _ = read_rows([]).layout
    with pytest.raises(DataError, match="row 1 of the list is a text; expected `messages`"):
        _ = read_rows(["a"]).layout
