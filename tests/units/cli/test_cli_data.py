"""Scores of files of every layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cli_files import CHATS, Cli, read_jsonl, write_jsonl
from closeness import assert_near
from toy_models import FORWARD

HI = [{"role": "user", "content": "hi"}]


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
    counts = [line for line in result.stdout.splitlines() if "answers: " in line]
    assert counts == ["all answers: 3", "chosen answers: 2", "rejected answers: 1"]
    assert "skipped 1, empty: line 2 (rejected): no text to score" in result.stdout


def test_token_ids_need_no_tokenizer(cli: Cli, tmp_path: Path, checkpoints: Path) -> None:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(checkpoints / "model").save_pretrained(tmp_path / "bare")
    data = write_jsonl(tmp_path / "ids.jsonl", [{"tokens": [5, 6, 7, 8], "prompt_length": 2}])
    out = tmp_path / "s.jsonl"
    cli("score", tmp_path / "bare", data, "--out", out)
    model = AutoModelForCausalLM.from_pretrained(checkpoints / "model").double()
    with torch.no_grad():
        log_probs = model(torch.tensor([[5, 6, 7, 8]])).logits[0].log_softmax(-1)
    expected = float(log_probs[1, 7] + log_probs[2, 8])
    assert_near(read_jsonl(out)[0]["log_prob"], expected, **FORWARD, dtype=torch.float32)
