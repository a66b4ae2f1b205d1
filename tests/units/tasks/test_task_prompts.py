"""Prompts from every source, errors that name the row, and an order that a resumed run continues."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torchrl_llm_kl import PromptError
from torchrl_llm_kl.datasets import DataError
from torchrl_llm_kl.tasks import PromptOrder, Prompts

ROWS = [
    {"question": "1 + 1?", "answer": "2", "level": 1},
    {"prompt": "2 + 1?", "answer": "3", "level": None},
    {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "3 + 1?"}], "level": [1, 2]},
]
USER = {"role": "user", "content": "a"}


class Table:
    """What a data set of Hugging Face looks like."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows, self.read = rows, 0
        self.column_names = list(rows[0])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        assert type(index) is int
        self.read += 1
        return self.rows[index]


def check(prompts: Prompts) -> None:
    metadata = [{"answer": "2", "level": 1}, {"answer": "3", "level": None}, {"level": [1, 2]}]
    assert len(prompts) == 3
    assert [p.question for p in prompts] == ["1 + 1?", "2 + 1?", "3 + 1?"]
    assert [[m["role"] for m in p.messages] for p in prompts] == [["user"], ["user"], ["system", "user"]]
    assert [p.metadata for p in prompts] == metadata


def test_rows_of_a_list_and_of_a_file(tmp_path: Path) -> None:
    check(Prompts(ROWS))
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n\n" for row in ROWS))
    check(Prompts(path))
    check(Prompts(str(path)))
    path.write_text(f'{json.dumps(ROWS[0])}\n{{"x": 1}}\n')
    with pytest.raises(PromptError, match=r"line 2 of .*a\.jsonl has no prompt: found the columns x"):
        Prompts(path)


def test_parquet_fills_missing_columns_with_none(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    rows = [{"question": "1 + 1?", "prompt": None, "answer": "2"}, {"question": None, "prompt": "2?", "answer": None}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    prompts = Prompts(tmp_path / "rows.parquet")
    assert [p.question for p in prompts] == ["1 + 1?", "2?"]
    assert prompts[0].metadata == {"prompt": None, "answer": "2"}


def test_a_data_set_is_read_when_a_row_is_posed() -> None:
    table = Table(ROWS)
    prompts = Prompts(table)
    assert table.read == 1
    check(prompts)
    assert prompts[1:][0].question == "2 + 1?"
    with pytest.raises(PromptError, match="row 2 of the data set has no prompt: found the columns text, expected one"):
        _ = Prompts(Table([{"prompt": "a"}, {"text": "b"}]))[1]


@pytest.mark.slow
def test_a_data_set_of_hugging_face() -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list([{"question": "a", "answer": "2"}, {"question": None, "answer": "3"}])
    assert Prompts(data)[0].question == "a"
    assert Prompts(data)[0].metadata == {"answer": "2"}
    with pytest.raises(TypeError, match="is a stream"):
        Prompts(data.to_iterable_dataset())
    with pytest.raises(PromptError, match="row 2 of the data set has no prompt: found the columns answer, expected"):
        _ = Prompts(data)[1]


def test_texts_conversations_and_columns() -> None:
    assert Prompts(["a", "b"])[1].messages == [{"role": "user", "content": "b"}]
    assert Prompts([[USER]])[0].question == "a"
    assert Prompts({"question": ["a", "b"], "answer": [1, 2]})[1].metadata == {"answer": 2}
    parts = [{"type": "text", "text": "Look"}, {"type": "image", "text": None}, {"type": "text", "text": "!"}]
    assert Prompts([{"prompt": [{"role": "user", "content": parts}]}])[0].question == "Look!"
    arrays = np.array([{"role": "user", "content": np.array(parts, dtype=object)}], dtype=object)  # of Parquet
    assert Prompts([{"messages": arrays}])[0].question == "Look!"
    row = {"messages": [USER], "question": "q", "prompt": "p"}  # the first column with a prompt is the prompt
    assert Prompts([row])[0].question == "p"
    assert Prompts([{**row, "prompt": None}])[0].question == "q"
    assert Prompts([{**row, "prompt": None}])[0].metadata == {"messages": row["messages"], "prompt": None}


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ([], PromptError, "0 rows"),
        ([{"text": "a", "n": "b"}], PromptError, "row 1 of the list has no prompt: found the columns text, n"),
        (["a", {}], PromptError, r"row 2 of the list has no prompt: found the columns \(none\)"),
        ([{"prompt": 3}], PromptError, "row 1 of the list has 3 as `prompt`, expected a text or a list of messages"),
        ([{"messages": []}], PromptError, r"has \[\] as `messages`"),
        ([{"messages": ["a"]}], PromptError, "has 'a' in `messages`, expected a dict with `role`"),
        ([[USER, {"role": "assistant", "content": "b"}]], PromptError, "ends with the assistant's message"),
        ([{"messages": [{**USER, "content": 5}]}], PromptError, "row 1 of the list has .* the content 5 in `messages`"),
        (["a", "b\ud83d"], PromptError, r"row 2 of .* no Unicode in `prompt`: '\\ud83d' at character 1"),
        (["a", 3], DataError, "row 2 of the list is of int"),
        (3, TypeError, "expected rows"),
    ],
)
def test_errors_name_the_row(source: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Prompts(source)


def test_each_epoch_is_a_permutation_of_its_own_and_the_order_of_today_is_that_of_tomorrow() -> None:
    """A run that is resumed with a later version must find its order again, from any position."""
    order = PromptOrder(50, seed=3)
    epochs = [tuple(order[i] for i in range(50 * e, 50 * e + 50)) for e in range(4)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len(set(epochs)) == 4
    assert epochs[0] != tuple(range(50))
    assert [PromptOrder(3, seed=None)[i] for i in range(7)] == [0, 1, 2, 0, 1, 2, 0]  # as they are
    order = PromptOrder(6, seed=0)
    assert [order[i] for i in reversed(range(12))][::-1] == [1, 5, 3, 0, 2, 4, 2, 1, 0, 4, 5, 3]
    assert [order[i] for i in range(12)] == [1, 5, 3, 0, 2, 4, 2, 1, 0, 4, 5, 3]
    assert [PromptOrder(6, seed=1)[i] for i in range(12)] != [order[i] for i in range(12)]
