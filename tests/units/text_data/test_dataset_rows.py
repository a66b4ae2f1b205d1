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
    path.write_bytes(b'\xef\xbb\xbf{"messages": []}\n\n[1]\n{"messages"\n\xff\xfe\n  \n{"messages": []}')
    source = read_rows(path)
    assert source.total == 5
    rows = list(source)
    assert [(row.index, row.place) for row in rows] == [
        (0, "line 1"),
        (1, "line 3"),
        (2, "line 4"),
        (3, "line 5"),
        (4, "line 7"),
    ]
    assert [row.problem.split(":")[0] for row in rows] == [
        "",
        "is a JSON list, expected an object",
        "is not JSON",
        "is not UTF-8",
        "",
    ]
    assert [row.index for row in source.read(2, 4)] == [2, 3]


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


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"", "is empty: expected a JSON object on each line"), (b"PAR1 and no more", "is a damaged Parquet file")],
)
def test_files_that_are_unreadable_as_a_whole(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "data").write_bytes(content)
    with pytest.raises(DataError, match=expected):
        read_rows(tmp_path / "data")


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no file .*nothing"):
        read_rows(tmp_path / "nothing")
    with pytest.raises(DataError, match="is a folder, expected a JSONL or Parquet file"):
        read_rows(tmp_path)


def test_a_text_in_place_of_a_path() -> None:
    with pytest.raises(
        FileNotFoundError, match=r"there is no file word word .*\.\.\.: pass the path .* or a list of rows"
    ):
        read_rows("word " * 200)


def test_a_number_of_thousands_of_digits_is_one_bad_line(tmp_path: Path) -> None:
    rows = list(read_rows(write_jsonl(tmp_path / "data.jsonl", ['{"a": ' + "1" * 5000 + "}", {"a": 1}])))
    assert rows[0].problem.startswith("cannot be read: Exceeds the limit")
    assert rows[1].value == {"a": 1}


def test_values_name_the_first_line_that_cannot_be_read(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", [{"a": 1}, "", "{"])
    with pytest.raises(DataError, match=rf"line 3 of {path} is not JSON: .* at column \d+\.$"):
        read_rows(path).values()


# ------------------------------------------------------------------ what is in memory


class Streamed:
    """Iterates over dicts from the beginning each time, and has no length, as a streamed dataset."""

    column_names = ("question",)

    def __iter__(self) -> Iterator[dict[str, str]]:
        yield from ({"question": text} for text in "ab")


@pytest.mark.parametrize(
    ("source", "values", "total"),
    [
        ([{"question": "a"}, {"question": "b"}], [{"question": "a"}, {"question": "b"}], 2),
        (["a", "b"], ["a", "b"], 2),
        ([CHAT], [CHAT], 1),
        ({"question": ["a", "b"], "n": (1, 2)}, [{"question": "a", "n": 1}, {"question": "b", "n": 2}], 2),
        ({}, [], 0),
        (Streamed(), [{"question": "a"}, {"question": "b"}], None),
        (iter(["a", "b"]), ["a", "b"], 2),
    ],
)
def test_rows_of_lists_columns_and_streams(source: Any, values: list[Any], total: int | None) -> None:
    rows = read_rows(source)
    assert rows.values() == values
    assert rows.values() == values  # again
    assert rows.total == total
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


@pytest.mark.parametrize(
    ("source", "error", "expected"),
    [
        (3, TypeError, "found int"),
        (b"data.jsonl", TypeError, "found bytes"),
        (None, TypeError, "found NoneType"),
        ({"question": "a"}, DataError, "found 'question' of str: pass a list of dicts for rows, or a dict of lists"),
        ({"a": [1], "b": [1, 2]}, DataError, "of one length, found {'a': 1, 'b': 2}"),
    ],
)
def test_what_has_no_rows(source: Any, error: type[Exception], expected: str) -> None:
    with pytest.raises(error, match=expected):
        read_rows(source)


def test_a_table_of_pandas_says_how_to_pass_it() -> None:
    class DataFrame:
        iterrows = staticmethod(list)

    with pytest.raises(TypeError, match=r"pass to_dict\('records'\)"):
        read_rows(DataFrame())


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
