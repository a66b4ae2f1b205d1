"""Rows of files, datasets, lists and columns. Tokens and masks of each layout by hand, and the reasons of skipped rows."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torchrl.data.llm import History
from transformers import PreTrainedTokenizerFast

from cli_files import write_jsonl
from template_pairs import assistant, user
from torchrl_llm_kl.datasets import Answer, DataError, Encoder, Row, Skip, layout_of, read_rows
from toy_tokenizer import build_tokenizer

HI = [user("hi")]
CHAT = [*HI, assistant("ho")]


def test_jsonl_lines_become_rows(tmp_path: Path) -> None:
    """Blank lines are not rows, and a bad line keeps its number."""
    path = tmp_path / "data.jsonl"
    digits = b'{"a": ' + b"1" * 5000 + b"}"
    path.write_bytes(b'\xef\xbb\xbf{"messages": []}\n\n[1]\n{"messages"\n\xff\xfe\n  \n{"messages": []}\n' + digits)
    source = read_rows(path)
    assert source.total == 6
    rows = list(source)
    lines = [f"line {number}" for number in (1, 3, 4, 5, 7, 8)]
    assert [(row.index, row.place) for row in rows] == list(enumerate(lines))
    problems = ["", "is a JSON list, expected an object", "is not JSON", "cannot be read", "", "cannot be read"]
    assert [row.problem.split(":")[0] for row in rows] == problems
    assert [row.index for row in source.read(2, 4)] == [2, 3]
    path = write_jsonl(path, [{"a": 1}, "", "{"])
    with pytest.raises(DataError, match=rf"line 3 of {path} is not JSON: .* at column \d+\.$"):
        read_rows(path).values()


def test_parquet_rows_equal_jsonl_rows_and_the_first_readable_row_decides_the_layout(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    values = [{"question": "a", "answer": 1}, {"question": "b", "answer": None}, {"question": "ü", "answer": 3}]
    parquet.write_table(pa.Table.from_pylist(values), tmp_path / "data.bin", row_group_size=2)
    rows = read_rows(str(tmp_path / "data.bin"))
    assert (rows.total, [(row.index, row.place) for row in rows]) == (3, [(0, "row 1"), (1, "row 2"), (2, "row 3")])
    assert rows.values() == read_rows(write_jsonl(tmp_path / "data.jsonl", values)).values() == values
    path = write_jsonl(tmp_path / "data.jsonl", ["oops", {"tokens": [1, 2], "mask": [0, 1]}])
    assert read_rows(path).layout == "tokens"
    path = write_jsonl(tmp_path / "data.jsonl", ["oops", {"tokens": [1, 2]}])
    for rows, message in (
        (path, "line 2 of .* has the columns tokens; expected .* with `prompt_length` or `mask`"),
        ([], r"the list holds no row that can be read \(no row at all\)"),
    ):
        with pytest.raises(DataError, match=message):
            _ = read_rows(rows).layout


def test_a_missing_or_damaged_file_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad").write_bytes(b"PAR1 and no more")
    for source in ("word " * 200, tmp_path / "nothing", tmp_path):
        with pytest.raises(FileNotFoundError, match=r"there is no file .*: pass a path, or a list of rows"):
            read_rows(source)
    with pytest.raises(DataError, match="is a damaged Parquet file"):
        read_rows(tmp_path / "bad")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match=r"run pip install '\.\[data\]' in the checkout"):
        read_rows(tmp_path / "bad")


class Streamed:
    """Like a streamed dataset: each iteration starts again, and there is no length."""

    column_names = ("question",)

    def __iter__(self) -> Iterator[dict[str, str]]:
        return iter([{"question": "a"}, {"question": "b"}])


def test_rows_of_lists_columns_streams_and_histories() -> None:
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
        assert rows.values() == rows.values() == values
        assert rows.total == total, values
        assert [(row.index, row.place) for row in rows] == [(i, f"row {i + 1}") for i in range(len(values))]
        assert read_rows(rows) is rows
    other = [user("why?"), assistant("because")]
    history = History.from_chats([CHAT, other])
    assert read_rows(history).values() == [CHAT, other]
    assert read_rows(history[0]).values() == [CHAT]  # one conversation
    assert read_rows(history.reshape(2, 1, 2)).values() == [CHAT, other]  # of any batch size
    assert read_rows({"chosen": history, "n": [1, 2]}).values() == [{"chosen": CHAT, "n": 1}, {"chosen": other, "n": 2}]


def test_datasets_of_hugging_face() -> None:
    datasets = pytest.importorskip("datasets")
    values = [{"question": "a", "answer": 1}, {"question": "b", "answer": 2}]
    dataset = datasets.Dataset.from_list(values)
    assert read_rows(dataset).values() == values
    assert read_rows(dataset).total == 2
    streamed = read_rows(dataset.to_iterable_dataset())
    assert streamed.values() == streamed.values() == values
    with pytest.raises(DataError, match=r"found \{'train': 'Dataset', 'test': 'Dataset'\}"):
        read_rows(datasets.DatasetDict(train=dataset, test=dataset))


def test_columns_of_unequal_lengths_and_rows_of_the_wrong_type() -> None:
    for columns, lengths in (({"question": "a"}, "{'question': 'str'}"), ({"a": [1], "b": [1, 2]}, "{'a': 1, 'b': 2}")):
        with pytest.raises(DataError, match=f"of one length, found {lengths}: pass a dict of columns, or a list of"):
            read_rows(columns)
    rows = read_rows([{"a": 1}, 3, None, b"x"])
    assert [row.problem.split(",")[0] for row in rows] == ["", "is of int", "is of NoneType", "is of bytes"]
    with pytest.raises(DataError, match="row 2 of the list is of int, expected a dict of columns, a text or messages"):
        rows.values()


TOKENIZER = build_tokenizer(pad_token="<|pad|>")
EARLIER = [*CHAT, user("and?")]
ABCD = TOKENIZER("abcd").input_ids


def encode(value: Any, *, tokenizer: Any = TOKENIZER, **settings: Any) -> list[Answer | Skip]:
    return Encoder(layout_of(value), tokenizer, **settings).encode(Row(0, "line 1", value))


def scored(answer: Answer | Skip, tokenizer: Any = TOKENIZER) -> str:
    """The text of the masked-in tokens."""
    assert isinstance(answer, Answer), answer
    assert answer.tokens.shape == answer.mask.shape
    return tokenizer.decode(answer.tokens[answer.mask])


SCORED = [
    ({"messages": [*HI, assistant("yes")]}, ["yes<|im_end|>"]),
    ({"messages": [*EARLIER, assistant("no")]}, ["ho<|im_end|>no<|im_end|>"]),
    ({"prompt": "2 + 2 =", "completion": " 4"}, [" 4"]),
    ({"prompt": "", "completion": "abc"}, ["bc"]),  # the first token has no prefix
    ({"prompt": HI, "completion": [assistant("yes")]}, ["yes<|im_end|>"]),
    ({"prompt": EARLIER, "completion": [assistant("no")]}, ["no<|im_end|>"]),  # the prompt's own turn is not scored
    ({"prompt": "a", "chosen": "bc", "rejected": "d"}, ["bc", "d"]),
    ({"prompt": EARLIER, "chosen": [assistant("x")], "rejected": [assistant("yz")]}, ["x<|im_end|>", "yz<|im_end|>"]),
    # the prompt is what both share
    ({"chosen": [*EARLIER, assistant("x")], "rejected": [*EARLIER, assistant("yz")]}, ["x<|im_end|>", "yz<|im_end|>"]),
    ({"tokens": ABCD, "prompt_length": 3}, ["d"]),
    ({"input_ids": ABCD, "mask": [0, 1, 0, 1]}, ["bd"]),
    ({"input_ids": ABCD, "completion_mask": [False, False, True, True]}, ["cd"]),
    ({"tokens": ABCD, "assistant_masks": [1, 1, 0, 0]}, ["b"]),  # the first has no prefix
    ({"messages": [assistant("yes", tool_calls=None), user("?")]}, ["yes<|im_end|>"]),
    # lists of pandas are arrays
    ({"messages": np.array([*HI, assistant("b")], dtype=object)}, ["b<|im_end|>"]),
    ({"tokens": np.array(ABCD), "mask": np.array([False, True, False, False])}, ["b"]),
]


def test_which_tokens_of_each_layout_are_scored() -> None:
    for value, expected in SCORED:
        assert [scored(answer) for answer in encode(value)] == expected, value
    (answer,) = encode({"prompt": "2 + 2 =", "completion": " 4"})
    assert TOKENIZER.decode(answer.tokens) == "2 + 2 = 4"  # plain text is not templated
    tokenizer = build_tokenizer(bos_token="<|begin|>")
    bos = ("<|begin|>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<|begin|> $A", special_tokens=[bos])
    for prompt in ("ab", "<|begin|>ab"):
        (answer,) = encode({"prompt": prompt, "completion": "cd"}, tokenizer=tokenizer)
        assert tokenizer.decode(answer.tokens) == "<|begin|>abcd"
        assert answer.mask.tolist() == [False, False, False, True, True]
    (alone,) = encode({"prompt": "", "completion": "cd"}, tokenizer=tokenizer)
    assert scored(alone, tokenizer) == "cd"


SKIPPED = [
    *yaml.safe_load(Path(__file__).with_name("skipped_rows.yaml").read_text(encoding="utf-8")),
    ({"prompt": "a", "completion": "b\ud83d"}, "malformed", "not Unicode: '\\ud83d' at character 2"),
]


def test_unusable_rows_are_skipped_with_a_reason() -> None:
    for value, reason, detail in SKIPPED:
        for skip in encode(value, vocab_size=259, max_length=60):
            assert isinstance(skip, Skip), skip
            assert skip.reason == reason, value
            assert detail in skip.detail, value
    chosen, rejected = encode({"prompt": "a", "chosen": "b", "rejected": ""})  # one bad answer leaves the other
    assert scored(chosen) == "b"
    assert (type(rejected), rejected.part, rejected.reason) == (Skip, "rejected", "empty")
    words = Tokenizer(models.WordLevel({"a": 0, "<end>": 1}))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    encoder = Encoder("completion", PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>"), add_eos=True)
    (skip,) = encoder.encode(Row(0, "row 1", {"prompt": "", "completion": " "}))
    assert (type(skip), skip.reason, skip.detail) == (Skip, "empty", "no token to score")
    strict = build_tokenizer("{{ raise_exception('roles must alternate') }}")
    (skip,) = encode({"messages": [*HI, assistant("yes")]}, tokenizer=strict)
    assert (type(skip), skip.reason, "roles must alternate" in skip.detail) == (Skip, "template", True)
    (skip,) = Encoder("messages", TOKENIZER).encode(Row(3, "line 4", {"prompt": "a", "completion": "b"}))
    assert (type(skip), skip.detail) == (Skip, "holds completion, expected messages")
