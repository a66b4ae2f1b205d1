"""Rows of every layout: their tokens and masks by hand, and what is wrong with a bad one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_files import CHATS, Cli, read_jsonl, write_jsonl

from torchrl_llm_kl.cli._console import CommandError
from torchrl_llm_kl.cli._data import Answer, Encoder, Row, Skip, Source, layout_of
from toy_tokenizer import build_tokenizer

TOKENIZER = build_tokenizer(pad_token="<|pad|>")
HI = [{"role": "user", "content": "hi"}]
EARLIER = [*HI, {"role": "assistant", "content": "ho"}, {"role": "user", "content": "and?"}]


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def encode(value: Any, *, tokenizer: Any = TOKENIZER, **settings: Any) -> list[Answer | Skip]:
    encoder = Encoder(layout_of(value), tokenizer, settings.pop("vocab_size", None), settings.pop("max_length", None))
    return encoder.encode(Row(0, "line 1", value))


def scored(answer: Answer | Skip, tokenizer: Any = TOKENIZER) -> str:
    """The text of the tokens that are masked in."""
    assert isinstance(answer, Answer), answer
    assert answer.tokens.shape == answer.mask.shape
    return tokenizer.decode(answer.tokens[answer.mask])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"messages": [*HI, *said("yes")]}, ["yes<|im_end|>"]),
        ({"messages": [*EARLIER, *said("no")]}, ["ho<|im_end|>no<|im_end|>"]),
        ({"prompt": "2 + 2 =", "completion": " 4"}, [" 4"]),
        ({"prompt": HI, "completion": said("yes")}, ["yes<|im_end|>"]),
        ({"prompt": EARLIER, "completion": said("no")}, ["no<|im_end|>"]),  # the prompt's own turn is not scored
        ({"prompt": "a", "chosen": "bc", "rejected": "d"}, ["bc", "d"]),
        ({"prompt": EARLIER, "chosen": said("x"), "rejected": said("yz")}, ["x<|im_end|>", "yz<|im_end|>"]),
        (
            {"chosen": [*EARLIER, *said("x")], "rejected": [*EARLIER, *said("yz")]},  # the prompt is what both share
            ["x<|im_end|>", "yz<|im_end|>"],
        ),
        ({"tokens": TOKENIZER("abcd").input_ids, "prompt_length": 3}, ["d"]),
        ({"input_ids": TOKENIZER("abcd").input_ids, "mask": [0, 1, 0, 1]}, ["bd"]),
        ({"input_ids": TOKENIZER("abcd").input_ids, "completion_mask": [False, False, True, True]}, ["cd"]),
        ({"tokens": TOKENIZER("abcd").input_ids, "assistant_masks": [1, 1, 0, 0]}, ["b"]),  # the first has no prefix
        ({"messages": [{**said("yes")[0], "tool_calls": None}, {"role": "user", "content": "?"}]}, ["yes<|im_end|>"]),
    ],
)
def test_what_is_scored(value: Any, expected: list[str]) -> None:
    assert [scored(answer) for answer in encode(value)] == expected


def test_plain_text_is_not_templated() -> None:
    (answer,) = encode({"prompt": "2 + 2 =", "completion": " 4"})
    assert isinstance(answer, Answer)
    assert TOKENIZER.decode(answer.tokens) == "2 + 2 = 4"


def test_a_begin_of_sequence_token_is_a_prefix() -> None:
    from tokenizers import processors

    tokenizer = build_tokenizer(bos_token="<|begin|>")
    bos = ("<|begin|>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<|begin|> $A", special_tokens=[bos])
    (answer,) = encode({"prompt": "ab", "completion": "cd"}, tokenizer=tokenizer)
    assert isinstance(answer, Answer)
    assert tokenizer.decode(answer.tokens) == "<|begin|>abcd"
    assert answer.mask.tolist() == [False, False, False, True, True]
    (alone,) = encode({"prompt": "", "completion": "cd"}, tokenizer=tokenizer)
    assert scored(alone, tokenizer) == "cd"
    (written,) = encode({"prompt": "<|begin|>ab", "completion": "cd"}, tokenizer=tokenizer)
    assert isinstance(written, Answer)
    assert written.tokens.tolist() == answer.tokens.tolist()


def test_without_a_prompt_the_first_token_has_no_prefix() -> None:
    (answer,) = encode({"prompt": "", "completion": "abc"})
    assert scored(answer) == "bc"


@pytest.mark.parametrize(
    ("value", "reason", "detail"),
    [
        ({"messages": []}, "empty", "no message"),
        ({"messages": HI}, "no assistant turn", ""),
        ({"prompt": HI, "completion": []}, "empty", "no message"),
        ({"prompt": HI, "completion": HI}, "no assistant turn", ""),
        ({"prompt": "a", "completion": ""}, "empty", "no text to score"),
        ({"prompt": "", "completion": "a"}, "empty", "no token to score"),
        ({"tokens": [], "prompt_length": 0}, "empty", "no tokens"),
        ({"tokens": [3, 4], "prompt_length": 2}, "empty", "no token to score"),
        ({"tokens": [3, 4], "prompt_length": 3}, "malformed", "expected a whole number from 0 to 2"),
        ({"tokens": [3, 4], "prompt_length": True}, "malformed", "expected a whole number"),
        ({"tokens": [3, -100], "prompt_length": 1}, "malformed", "the token id -100"),
        ({"tokens": [3, 300], "prompt_length": 1}, "malformed", "outside the vocabulary of 259"),
        ({"tokens": [3, 4.5], "prompt_length": 1}, "malformed", "4.5 in `tokens`"),
        ({"tokens": [3, 2**70], "prompt_length": 1}, "malformed", "in `tokens`, expected whole numbers"),
        ({"tokens": "34", "prompt_length": 1}, "malformed", "`tokens` of str"),
        ({"tokens": [[3, 4]], "prompt_length": 1}, "malformed", "[3, 4] in `tokens`"),
        ({"tokens": [3, 4], "mask": [1]}, "malformed", "has 1 numbers in `mask`, expected 2"),
        ({"tokens": [3, 4], "mask": 5}, "malformed", "has `mask` of int, expected a list"),
        ({"tokens": [3, 4], "mask": [0, 2]}, "malformed", "1 at the tokens to score"),
        ({"messages": "hi"}, "malformed", "`messages` of str"),
        ({"messages": [HI]}, "malformed", "expected an object with `role`"),
        ({"prompt": "a", "completion": said("b")}, "malformed", "give both alike"),
        ({"chosen": "b", "rejected": "c"}, "malformed", "without a `prompt`"),
        ({"prompt": 3, "completion": "b"}, "malformed", "give both alike"),
        ({"messages": [*HI, {"role": "assistant", "content": {"a": 1}}]}, "template", ""),
        ({"messages": [*HI, *said("x" * 50)]}, "too long", "73 tokens, at most 60"),
    ],
)
def test_what_is_skipped(value: Any, reason: str, detail: str) -> None:
    for skip in encode(value, vocab_size=259, max_length=60):
        assert isinstance(skip, Skip), skip
        assert skip.reason == reason
        assert detail in skip.detail


def test_one_bad_answer_of_a_pair_leaves_the_other() -> None:
    chosen, rejected = encode({"prompt": "a", "chosen": "b", "rejected": ""})
    assert scored(chosen) == "b"
    assert isinstance(rejected, Skip)
    assert (rejected.part, rejected.reason) == ("rejected", "empty")


def test_a_template_that_refuses_a_conversation_is_the_reason() -> None:
    strict = build_tokenizer("{{ raise_exception('roles must alternate') }}")
    (skip,) = encode({"messages": [*HI, *said("yes")]}, tokenizer=strict)
    assert isinstance(skip, Skip)
    assert skip.reason == "template"
    assert "roles must alternate" in skip.detail


def test_rows_of_another_layout_are_malformed() -> None:
    encoder = Encoder("messages", TOKENIZER, None, None)
    (skip,) = encoder.encode(Row(3, "line 4", {"prompt": "a", "completion": "b"}))
    assert isinstance(skip, Skip)
    assert skip.detail == "holds completion, while the first row holds messages"


# ------------------------------------------------------------------ files


def test_lines_and_rows(tmp_path: Path) -> None:
    """Blank lines are no rows; a bad line keeps its number."""
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"messages": []}\n\n[1]\n{"messages"\n\xff\xfe\n  \n{"messages": []}')
    source = Source(path)
    assert source.total == 5
    rows = list(source.rows())
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
    assert [row.index for row in source.rows(2, 4)] == [2, 3]


def test_the_first_readable_row_decides_the_layout(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", ["oops", {"tokens": [1, 2], "mask": [0, 1]}])
    assert Source(path).layout == "tokens"
    path = write_jsonl(tmp_path / "data.jsonl", ["oops", {"tokens": [1, 2]}])
    with pytest.raises(CommandError, match=r"line 2 of .* no `prompt_length` and no `mask`"):
        Source(path)


def test_parquet_scores_as_json_lines(cli: Cli, tmp_path: Path, model: str) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    rows = [*CHATS, {"messages": HI}, {"messages": None}]
    rows[1] = {"messages": [{**message, "tool_calls": None} for message in rows[1]["messages"]]}
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "data.parquet", row_group_size=2)
    lines = write_jsonl(tmp_path / "data.jsonl", rows)
    cli("score", model, tmp_path / "data.parquet", "--out", tmp_path / "a.jsonl")
    cli("score", model, lines, "--out", tmp_path / "b.jsonl")
    found, expected = (read_jsonl(tmp_path / name) for name in ("a.jsonl", "b.jsonl"))
    for record in (*found, *expected):
        record.pop("place", None)
    assert found == expected
    assert [record.get("skipped", "") for record in found] == [""] * 4 + ["no assistant turn", "malformed"]


def test_without_pyarrow_parquet_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "data.parquet").write_bytes(b"PAR1....")
    with pytest.raises(CommandError, match=r"pip install 'torchrl-llm-kl\[cli\]'"):
        Source(tmp_path / "data.parquet")


def test_pairs_are_summed_apart(cli: Cli, tmp_path: Path, model: str) -> None:
    pairs = [{"prompt": "a", "chosen": "bcd", "rejected": "ef"}, {"prompt": "g", "chosen": "h", "rejected": ""}]
    data, out = write_jsonl(tmp_path / "pairs.jsonl", pairs), tmp_path / "scores.jsonl"
    result = cli("score", model, data, "--out", out)
    assert [(r["index"], r["answer"], r.get("num_scored")) for r in read_jsonl(out)] == [
        (0, "chosen", 3),
        (0, "rejected", 2),
        (1, "chosen", 1),
        (1, "rejected", None),
    ]
    assert [line for line in result.stdout.splitlines() if "answers: " in line] == [
        "all answers: 3",
        "chosen answers: 2",
        "rejected answers: 1",
    ]
    assert "skipped 1, empty: line 2 (rejected): no text to score" in result.stdout


def test_token_ids_need_no_tokenizer(cli: Cli, tmp_path: Path, checkpoints: Path) -> None:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(checkpoints / "model").save_pretrained(tmp_path / "bare")
    data, out = (
        write_jsonl(tmp_path / "ids.jsonl", [{"tokens": [5, 6, 7, 8], "prompt_length": 2}]),
        tmp_path / "s.jsonl",
    )
    cli("score", tmp_path / "bare", data, "--out", out)
    model = AutoModelForCausalLM.from_pretrained(checkpoints / "model").double()
    with torch.no_grad():
        log_probs = model(torch.tensor([[5, 6, 7, 8]])).logits[0].log_softmax(-1)
    assert read_jsonl(out)[0]["log_prob"] == pytest.approx(float(log_probs[1, 7] + log_probs[2, 8]), abs=1e-5)
