"""Tests of the demo with a tool: its demonstrations, its rewards, and the tokens of a short run."""

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("omegaconf")
pytest.importorskip("rich")
import calculator
import calculator_demo as demo
from cli_files import read_jsonl
from project import PROJECT
from torchrl_llm_kl.masks import render_conversation
from torchrl_llm_kl.training import Run, loss_entries, read_config

SIZES = ["data.num_prompts=3", "data.group_size=4", "evaluation.num_prompts=6", "run.steps=2", "logging.doctor_every=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the demo. The model always calls the tool, so a short warm-up suffices."""
    folder = tmp_path_factory.mktemp("calculator")
    with pytest.MonkeyPatch.context() as patch:
        for constant, value in {"CALLS": 1.0, "DEMONSTRATIONS": 200}.items():
            patch.setattr(demo, constant, value)
        demo.prepare(folder, seed=0, steps=40, held_out=20)
    return folder


@pytest.fixture
def changes(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(PROJECT)  # where the paths of the tool and the rewards begin
    files = [f"data.{name}={folder / name}.jsonl" for name in ("prompts", "held_out")]
    return [f"model.name={folder / 'model'}", *files, f"run.out={tmp_path}", *SIZES]


def test_demonstrations_and_rewards_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: dict[tuple[bool, bool], Any] = {}
    for seed in range(40):
        messages = demo.demonstration(23, 47, random.Random(seed))
        metadata = {"answer": "1081", "messages": messages}
        assert calculator.right("", messages[-1]["content"], metadata) == 1
        scores = [reward("", "", metadata) for reward in (calculator.called, calculator.failed, calculator.turns)]
        assert scores[2] == 1 + scores[0] == len(messages) / 2
        kinds[bool(scores[0]), bool(scores[1])] = messages
    assert sorted(kinds) == [(False, False), (True, False), (True, True)]
    assert calculator.right("", "1080", {"answer": "1081"}) == 0
    tokenizer = demo.build_tokenizer(list(kinds.values()))
    rendered = render_conversation(tokenizer, kinds[True, False], tools=[calculator.multiply])
    learned = [tokenizer.decode([token]) for token in rendered.token_ids[rendered.assistant_mask]]
    begin, middle = '{"name": "multiply", "arguments": {"a": ', ', "b": '
    call = ["<tool_call>", begin, "2", "3", middle, "4", "7", "}}", "</tool_call>", "<|im_end|>"]
    assert learned == [*call, "1", "0", "8", "1", "<|im_end|>"]
    failing = render_conversation(tokenizer, kinds[True, True], tools=[calculator.multiply])
    with pytest.raises(TypeError) as error:
        calculator.multiply(a=23)  # type: ignore[call-arg]
    assert f"<tool_response>Error: TypeError: {error.value}</tool_response>" in failing.text


def test_sampled_tokens_stay_and_tokens_of_the_tool_are_not_trained(changes: list[str]) -> None:
    run = Run(read_config(demo.CONFIG, changes), say=lambda line: None)
    seen, join = [], run.inputs.rows
    object.__setattr__(run.inputs, "rows", lambda turns: seen.append(turns) or join(turns))
    batch = run.sample()
    (turns,) = seen
    width = turns["tokens", "prompt"].shape[-1]
    tokens, answers = [], []
    for row, mask in zip(turns["tokens", "full"], turns["masks", "all_attention_mask"], strict=True):
        tokens.append(row[mask].tolist())
        answers.append(row[width:][mask[width:]].tolist())
    second = (turns["step"].flatten() == 1).nonzero().flatten().tolist()
    assert second, "no conversation calls the tool"
    for place in second:
        before, own = tokens[place - 1], tokens[place]
        assert own[: len(before)] == before
        added = run.tokenizer.decode(own[len(before) : len(own) - len(answers[place])])
        result = next(each["content"] for each in turns[place]["next", "messages"] if each["role"] == "tool")
        assert added.endswith(f"<tool_response>{result}</tool_response><|im_end|>\n<|im_start|>assistant\n")
    sampled: dict[int, list[int]] = {}
    for number, answer in zip(turns["run"].flatten().tolist(), answers, strict=True):
        sampled.setdefault(number, []).extend(answer)
    trained = batch["masks", "all_assistant_mask"]
    assert [row[mask].tolist() for row, mask in zip(batch["tokens", "full"], trained, strict=True)] == [
        *sampled.values()
    ]
    assert run.parts.loss(loss_entries(batch))["num_tokens"] == trained.sum() == sum(map(len, answers))
    assert not batch["next", "log_probs", "full"][~trained].any()


def test_a_short_run(changes: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(changes) == 0
    out = capsys.readouterr().out
    assert "6 held-out products" in out
    assert "after 2 steps" in out
    rows, evaluations = (read_jsonl(tmp_path / f"{name}.jsonl") for name in ("metrics", "evaluations"))
    for row in rows:
        assert {"turns", "tools/multiply", "tool_errors"} < row.keys()
        assert row["turns"] == pytest.approx(1 + row["reward/called"])
        assert row["turns"] == pytest.approx(row["reward/turns"])
        callers = sum(value for name, value in row.items() if name.startswith("tools/"))  # tools/unknown: not JSON
        assert callers == pytest.approx(row["reward/called"] / row["turns"])
        assert row["tool_errors"] == pytest.approx(row["reward/failed"] / row["reward/called"])
    assert [row["step"] for row in evaluations] == [0, 2]
    page = (tmp_path / "rollouts.html").read_text()
    assert "tool_response" in page
    for name in demo.WRITTEN:
        assert f"see {tmp_path / name}" in out.replace("\n", "")
        assert (tmp_path / name).stat().st_size > 0
