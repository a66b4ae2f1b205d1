"""Rollouts of other frameworks: every layout of tokens, masks, log-probs, rewards and records, and the errors of bad rows.

Each framework's row is written as its own code writes it (``rollout_columns.csv`` names the releases). All of them hold the
same rollout: the prompt ``5 6`` and the response ``7 8 9`` with log-probs -0.5, -1.5, -2.5, a reward of 1, and nothing else.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from torchrl_llm_kl.datasets import (
    DataError,
    Encoder,
    Row,
    SkippedRowsWarning,
    from_rollouts,
    load_batch,
    read_rows,
    save_batch,
)
from torchrl_llm_kl.diagnostics import diagnose, read_columns
from toy_tokenizer import CHATML, build_tokenizer

NAN = float("nan")
LOG_PROBS = [-0.5, -1.5, -2.5]
IDS = [5, 6, 7, 8, 9]
CHOICE = {"index": 0, "finish_reason": "stop", "token_ids": [7, 8, 9]}
#: Framework -> a row as it writes it.
ROWS: dict[str, dict[str, Any]] = {
    "this package": {"tokens": IDS, "prompt_length": 2, "log_probs": LOG_PROBS, "reward": 1.0},
    "TRL's batch": {
        "prompt_ids": [0, 5, 6],  # padded on the left
        "prompt_mask": [0, 1, 1],
        "completion_ids": [7, 8, 9],
        "completion_mask": [1, 1, 1],
        "sampling_per_token_logps": LOG_PROBS,
        "rewards": 1.0,
    },
    "verl's DataProto": {
        "prompts": [0, 5, 6],
        "responses": [7, 8, 9, 0],
        "input_ids": [0, 5, 6, 7, 8, 9, 0],
        "attention_mask": [0, 1, 1, 1, 1, 1, 0],
        "response_mask": [1, 1, 1, 0],
        "rollout_log_probs": [*LOG_PROBS, 0.0],
        "token_level_scores": [0.0, 0.0, 1.0, 0.0],
        "uid": "a7f3",
    },
    "OpenRLHF's Experience": {
        "sequences": IDS,
        "attention_mask": [1, 1, 1, 1, 1],
        "action_mask": [0, 1, 1, 1],  # without the first token
        "rollout_log_probs": [0.0, *LOG_PROBS],
        "rewards": 1.0,
    },
    "prime-rl's sample": {
        "token_ids": IDS,
        "mask": [False, False, True, True, True],
        "logprobs": [0.0, 0.0, *LOG_PROBS],
        "reward": 1,
    },
    "prime-rl's token export": {
        "token_ids": IDS,
        "loss_mask": [False, False, True, True, True],
        "inference_logprobs": [0.0, 0.0, *LOG_PROBS],
        "reward": 1,
    },
    "slime's Sample": {
        "prompt": "5 6",
        "tokens": IDS,
        "response": "7 8 9",
        "response_length": 3,
        "loss_mask": [1, 1, 1],
        "rollout_log_probs": LOG_PROBS,
        "reward": {"score": 1.0, "format": 0.25},
        "group_index": 3,
        "remove_sample": False,
        "weight_versions": ["4", "4"],
        "rollout_top_p_token_ids": [7, 3, 8, 9, 2],
        "rollout_top_p_token_offsets": [0, 2, 3, 5],
        "rollout_routed_experts": [[[1, 0]], [[2, 0]], [[3, 0]], [[1, 2]]],
    },
    "NeMo-RL's log": {  # a batch of one per line
        "token_ids": [[*IDS, 0, 0]],
        "input_lengths": [5],
        "token_loss_mask": [[0, 0, 1, 1, 1, 0, 0]],
        "sample_loss_mask": [1.0],
        "generation_logprobs": [[0.0, 0.0, *LOG_PROBS, 0.0, 0.0]],
        "rewards": [1.0],
        "idx": 0,
    },
    "vLLM's completions": {
        "id": "cmpl-1",
        "choices": [{**CHOICE, "prompt_token_ids": [5, 6], "logprobs": {"token_logprobs": LOG_PROBS}}],
        "reward": 1.0,
    },
    "vLLM's chat": {
        "request": {"messages": [{"role": "user", "content": "5 6"}]},
        "response": {
            "id": "chat-1",
            "prompt_token_ids": [5, 6],
            "choices": [{**CHOICE, "logprobs": {"content": [{"token": "t", "logprob": x} for x in LOG_PROBS]}}],
        },
        "reward": 1.0,
    },
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return build_tokenizer(CHATML)


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_each_framework(name: str) -> None:
    (row,) = from_rollouts([ROWS[name]])
    assert row["tokens", "full"].tolist() == IDS
    assert (row["tokens", "prompt"].tolist(), row["tokens", "response"].tolist()) == ([5, 6], [7, 8, 9])
    assert row["masks", "all_assistant_mask"].tolist() == [False, False, True, True, True]
    assert row["next", "sampler_log_probs", "full"][2:].tolist() == LOG_PROBS
    assert (row["next", "reward"].tolist(), bool(row["sampled"])) == ([1.0], True)


def test_records_of_the_sampler_and_labels() -> None:
    (row,) = from_rollouts([ROWS["slime's Sample"]])
    assert (row["kept", "ids"].tolist(), row["kept", "counts"].tolist()) == ([7, 3, 8, 9, 2], [0, 0, 2, 1, 2])
    assert row["routed_experts"].tolist() == [[[1, 0]], [[2, 0]], [[3, 0]], [[1, 2]], [[-1, -1]]]
    assert (int(row["group"]), row["policy_version"], bool(row["left_out"])) == (3, ["4", "4"], False)
    assert row["next", "rewards", "format"].tolist() == [0.25]
    assert (row["metadata", "prompt"], row["metadata", "response"]) == ("5 6", "7 8 9")
    (row,) = from_rollouts([{**ROWS["NeMo-RL's log"], "sample_loss_mask": [0.0]}])
    assert bool(row["left_out"])
    rows = [{**ROWS["this package"], "kept": [[7], [8, 1], [9]], "advantage": 0.5}, ROWS["this package"]]
    first, second = from_rollouts(rows)
    assert (first["kept", "counts"].tolist(), second["kept", "counts"].tolist()) == ([0, 0, 1, 2, 1], [0] * 5)
    assert first["advantage"].tolist() == [0.5] * 5
    assert bool(second["advantage"].isnan().all())


def test_log_probs_of_masked_in_tokens_of_several_turns() -> None:
    """Two turns: tokens 7 and 9, 10 were sampled, 8 is a tool's."""
    tokens, mask = [5, 6, 7, 8, 9, 10], [0, 0, 1, 0, 1, 1]
    expected = [NAN, NAN, -0.5, NAN, -1.5, -2.5]
    of_response = [-0.5, 0.0, -1.5, -2.5]
    for log_probs, want in (
        (LOG_PROBS, expected),
        (of_response, [NAN, NAN, *of_response]),
        ([0.0, *of_response], [NAN, 0.0, *of_response]),
        ([None, 0.0, *of_response], [NAN, 0.0, *of_response]),
    ):
        (row,) = from_rollouts([{"tokens": tokens, "mask": mask, "logprobs": log_probs}])
        assert torch.equal(
            row["next", "sampler_log_probs", "full"].nan_to_num(nan=9), torch.tensor(want).nan_to_num(nan=9)
        )
        assert row["tokens", "prompt"].tolist() == [5, 6]


def test_choices_of_one_request_are_a_group() -> None:
    value = dict(ROWS["vLLM's chat"]["response"])
    value["choices"] = [{**value["choices"][0], "token_ids": ids} for ids in ([7, 8, 9], [7, 8, 4])]
    batch = from_rollouts([value])
    assert [row["tokens", "response"].tolist() for row in batch] == [[7, 8, 9], [7, 8, 4]]
    assert [row["group"] for row in batch] == ["chat-1", "chat-1"]


def test_text_of_trl_verl_and_an_api(tokenizer: PreTrainedTokenizerBase) -> None:
    table = {"step": 3, "prompt": "ab", "completion": "cd", "correct": 1.0, "brief": -0.25, "advantage": 0.5}
    (row,) = from_rollouts([table], tokenizer)
    assert tokenizer.decode(row["tokens", "full"]) == "abcd"
    assert tokenizer.decode(row["tokens", "response"]) == "cd"
    assert (row["next", "reward"].tolist(), bool(row["sampled"])) == ([0.75], False)
    assert row["next", "rewards"].to_dict() == {"correct": torch.tensor([1.0]), "brief": torch.tensor([-0.25])}
    dump = {"input": "ab", "output": "cd", "gts": "x", "score": 1.0, "step": 1}
    (row,) = from_rollouts([dump], tokenizer)
    assert (tokenizer.decode(row["tokens", "response"]), row["next", "reward"].tolist()) == ("cd", [1.0])
    assert (row["metadata", "gts"], int(row["metadata", "step"])) == ("x", 1)
    messages = [{"role": "user", "content": "ab"}]
    chat = {
        "request": {"messages": messages},
        "response": {"choices": [{"message": {"role": "assistant", "content": "cd"}}]},
    }
    (row,) = from_rollouts([chat], tokenizer)
    expected = tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": "cd"}], tokenize=False)
    assert tokenizer.decode(row["tokens", "full"]) == expected
    (row,) = from_rollouts([{"messages": [*messages, {"role": "assistant", "content": "cd"}]}], tokenizer)
    assert tokenizer.decode(row["tokens", "full"]) == expected


def test_columns_with_other_names() -> None:
    row = {"p": [5, 6], "a": [7, 8, 9], "lp": LOG_PROBS, "r": 1.0, "logprobs": [0.0]}
    columns = {"prompt": "p", "response": "a", "sampler_log_prob": "lp", "reward": "r"}
    (read,) = from_rollouts([row], columns=columns)
    assert read["next", "sampler_log_probs", "full"][2:].tolist() == LOG_PROBS
    assert read["next", "reward"].tolist() == [1.0]
    with pytest.raises(ValueError, match=r"unknown role 'responce'.*response"):
        from_rollouts([row], columns={"responce": "a"})
    with pytest.raises(
        DataError, match="row 1 of the list has no column `x`, which columns= names for reward: it has p, a"
    ):
        from_rollouts([row], columns={"reward": "x"})


BASE = {"prompt_ids": [5, 6], "completion_ids": [7, 8, 9]}
#: A bad row, and a part of its error.
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "too few log-probs": ({**BASE, "logprobs": [-1.0, -2.0]}, "2 log-probs in `logprobs` for 3 response tokens"),
    "too many log-probs": ({**BASE, "logprobs": [-1.0] * 6}, r"6 log-probs .* 3 response tokens \(5 with the prompt\)"),
    "one number": (
        {**BASE, "logprobs": -1.0},
        "the number -1.0 in `logprobs`, expected log-probs of all response tokens",
    ),
    "text as log-probs": ({**BASE, "logprobs": ["a", "b", "c"]}, "expected a list of numbers"),
    "no boundary": ({"tokens": IDS}, "it has tokens, expected token ids with a mask or the length of the prompt"),
    "a mask off by one": ({"tokens": IDS, "mask": [0, 1, 1, 1]}, "4 numbers in `mask`, expected 5 of 0 and 1"),
    "weights as a mask": ({"tokens": IDS, "mask": [0, 0, 1, 2, 1]}, "expected 5 of 0 and 1"),
    "other prompts": ({"input_ids": IDS, "prompts": [5, 7]}, "other tokens in `prompts` than in `input_ids`"),
    "padding": ({"tokens": [*IDS, -100], "prompt_length": 2}, "the token id -100 in `tokens`"),
    "a length": ({"tokens": IDS, "prompt_length": 6}, "prompt_length 6, expected a whole number from 0 to 5"),
    "an attention mask": ({**BASE, "attention_mask": [1, 1]}, "2 numbers in `attention_mask` for 5 tokens"),
    "kept ids": ({**BASE, "kept": [[7], [8]]}, "2 lists of kept ids in `kept` for 3 response tokens"),
    "offsets": ({**BASE, "kept": [7, 8], "rollout_top_p_token_offsets": [0, 1, 2, 3]}, "2 ids in `kept`"),
    "experts": ({**BASE, "routed_experts": [[1], [2], [3]]}, "expected whole numbers"),
    "text without a tokenizer": ({"prompt": "a", "completion": "b"}, "holds text: pass the tokenizer"),
    "no response": ({"prompt": "a"}, "holds no rollout: it has prompt"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_refused_by_number(name: str) -> None:
    row, message = BAD[name]
    with pytest.raises(DataError, match=f"row 2 of the list .*{message}"):
        from_rollouts([BASE, row])


def test_files_of_every_format_give_the_same_batch(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    rows = [{**BASE, "logprobs": LOG_PROBS, "reward": float(i)} for i in range(3)]
    lines = "\n".join(map(json.dumps, rows))
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.json").write_text(json.dumps(rows, indent=2))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    pandas.DataFrame(rows).to_parquet(tmp_path / "d.parquet")
    torch.save({"rollout_id": 1, "samples": rows}, tmp_path / "e.pt")  # slime's dump
    for path in sorted(tmp_path.iterdir()):
        batch = load_batch(path)
        assert batch["next", "reward"].flatten().tolist() == [0.0, 1.0, 2.0], path
        columns = read_columns(batch)
        assert columns.columns["sampler_log_prob"][columns.mask].tolist() == LOG_PROBS * 3
    (tmp_path / "f.gz").write_bytes(gzip.compress(lines.encode())[:-9])
    with pytest.raises(DataError, match=r"f\.gz is a damaged gzip file"):
        load_batch(tmp_path / "f.gz")


def test_the_doctor_sees_text_beside_log_probs(tokenizer: PreTrainedTokenizerBase) -> None:
    (cause,) = diagnose(
        from_rollouts([{"prompt": "ab", "completion": "cd", "logprobs": [-1.0, -2.0]}], tokenizer)
    ).faults
    assert cause.cause == "retokenised"
    report = diagnose(from_rollouts([{"prompt": "ab", "completion": "cd"}], tokenizer))
    assert any("only text" in each for each in report.left_out)


def test_score_reads_the_same_rows(tokenizer: PreTrainedTokenizerBase) -> None:
    """Token ids of every framework, and text of verl's dump."""
    for name, row in ROWS.items():
        (answer,) = Encoder("tokens", None).encode(Row(0, "row 1", row))
        assert (answer.tokens.tolist(), answer.mask.tolist()) == (IDS, [False, False, True, True, True]), name
        assert read_rows([row]).layout == "tokens", name
    value = dict(ROWS["vLLM's chat"]["response"])
    value["choices"] = value["choices"] * 2
    assert len(Encoder("tokens", None).encode(Row(0, "row 1", value))) == 2
    (answer,) = Encoder("completion", tokenizer).encode(Row(0, "row 1", {"input": "ab", "output": "cd", "score": 1.0}))
    assert tokenizer.decode(answer.tokens[answer.mask]) == "cd"


def one(row: dict[str, Any], **given: Any) -> Any:
    (td,) = from_rollouts([row], **given)
    return td


def test_padded_columns_stay_at_their_tokens() -> None:
    """The number of real tokens equals the length of the padded response, or that of the sequence without its first token."""
    row: dict[str, Any] = {
        "prompts": [0, 0, 5, 6],
        "responses": [7, 8, 9, 10, 0, 0],
        "response_mask": [1, 1, 1, 1, 0, 0],
    }
    row |= {"input_ids": [0, 0, 5, 6, 7, 8, 9, 10, 0, 0], "attention_mask": [0, 0, 1, 1, 1, 1, 1, 1, 0, 0]}
    td = one(row | {"rollout_log_probs": [-1.0, -2.0, -3.0, -4.0, 0.0, 0.0]})
    assert td["masks", "all_assistant_mask"].tolist() == [False, False, True, True, True, True]
    assert td["next", "sampler_log_probs", "full"][2:].tolist() == [-1, -2, -3, -4]
    row = {"sequences": [5, 6, 7, 8, 0], "attention_mask": [1, 1, 1, 1, 0], "action_mask": [0, 1, 1, 0]}
    td = one(row | {"action_log_probs": [0.0, -1.0, -2.0, 0.0]})
    assert td["tokens", "response"].tolist() == [7, 8]
    assert td["next", "log_probs", "full"][2:].tolist() == [-1, -2]


def test_lengths_count_tokens_without_padding() -> None:
    for tokens, keep, lengths in (
        ([5, 6, 7, 8, 9, 0], [1, 1, 1, 1, 1, 0], {"response_length": 3}),
        ([0, 0, 5, 6, 7, 8, 9], [0, 0, 1, 1, 1, 1, 1], {"prompt_length": 2}),
    ):
        td = one({"tokens": tokens, "attention_mask": keep, "logprobs": LOG_PROBS, **lengths})
        assert (td["tokens", "prompt"].tolist(), td["tokens", "response"].tolist()) == ([5, 6], [7, 8, 9])
        assert td["next", "sampler_log_probs", "full"][2:].tolist() == LOG_PROBS
    assert one({**BASE, "prompt_mask": [0, 0]})["tokens", "prompt"].tolist() == [5, 6]  # not trained, and no padding
    with pytest.raises(DataError, match="9 numbers in `prompt_mask` for 2 prompt tokens"):
        one({**BASE, "prompt_mask": [1] * 9})


def test_a_column_has_one_role() -> None:
    row = {**BASE, "old_log_probs": LOG_PROBS}
    td = one(row, columns={"sampler_log_prob": "old_log_probs"})
    assert ("log_probs", "full") not in td["next"].keys(True)
    assert td["next", "sampler_log_probs", "full"][2:].tolist() == LOG_PROBS
    td = one({**BASE, "log_probs": [-9.0] * 3, "rollout_log_probs": LOG_PROBS})  # slime's training data
    assert td["next", "sampler_log_probs", "full"][2:].tolist() == LOG_PROBS
    assert td["next", "log_probs", "full"][2:].tolist() == [-9] * 3


def test_rewards_and_flags_of_every_type() -> None:
    for reward, expected in (
        ({"correct": True}, 1.0),
        ({"correct": np.float32(0.5)}, 0.5),
        (True, 1.0),
        ([0.0, 1.0], 1.0),
    ):
        assert one({**BASE, "reward": reward})["next", "reward"].tolist() == [expected]
    for reward in ({}, {"score": None}):
        assert "reward" not in one({**BASE, "reward": reward}).get("next", {})
    table = {"step": 1, "prompt": "a", "completion": "b", "advantage": 0.5, "acc": NAN, "fmt": 1.0}
    assert one(table, tokenizer=build_tokenizer(CHATML))["next", "reward"].tolist() == [1.0]
    flags = [{"remove_sample": [False]}, {"left_out": NAN}, {"sample_loss_mask": [0]}, {"left_out": 1}, {}]
    batch = from_rollouts([{**BASE, **flag} for flag in flags])
    assert batch["left_out"].tolist() == [False, False, True, True, False]
    with pytest.raises(DataError, match="has 'false' in `left_out`, expected 0 or 1"):
        one({**BASE, "left_out": "false"})


def test_choices_of_a_question_are_no_response() -> None:
    tokenizer = build_tokenizer(CHATML)
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "choices": ["A", "B"]}
    assert "q" in tokenizer.decode(one(row, tokenizer=tokenizer)["tokens", "full"])
    row = {"prompt": "q", "completion": "a", "choices": [{"text": "zz"}, {"text": "yy"}]}
    assert tokenizer.decode(one(row, tokenizer=tokenizer)["tokens", "full"]) == "qa"
    with pytest.raises(DataError, match="row 1 of the list holds no rollout: it has id, choices"):
        from_rollouts([{"id": "x", "choices": []}, BASE])
    choices = [{"token_ids": [7, 8], "prompt_token_ids": [5]}, {"token_ids": [7, 9], "prompt_token_ids": [5]}]
    assert from_rollouts([{"id": "x", "choices": choices, "rewards": [1.0, 0.0]}])["next", "reward"].tolist() == [
        [1],
        [0],
    ]


def test_text_keeps_the_system_prompt_and_the_variables_of_its_row() -> None:
    template = "{% if thinking is defined %}[{{ thinking }}]{% endif %}"
    template += "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    tokenizer = build_tokenizer(template)
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "reasoning_content": "deep"}]
    with pytest.warns(SkippedRowsWarning, match="does not write the reasoning"):
        td = one({"messages": chat, "system": "S", "thinking": False}, tokenizer=tokenizer)
    assert tokenizer.decode(td["tokens", "full"]) == "[False]<system>S<user>q<assistant>a"


def test_files_that_are_no_batches_name_the_reason(tmp_path: Path) -> None:
    torch.save({"samples": [{"tokens": IDS, "response_length": 3, "mine": LOG_PROBS}]}, tmp_path / "a.pt")
    batch = load_batch(tmp_path / "a.pt", columns={"sampler_log_prob": "mine"})
    assert batch[0]["next", "sampler_log_probs", "full"][2:].tolist() == LOG_PROBS
    save_batch(batch, tmp_path / "b.pt")
    with pytest.raises(DataError, match="whose entries have their names"):
        load_batch(tmp_path / "b.pt", columns={"reward": "x"})
    (tmp_path / "c.jsonl").write_bytes("{}".encode("utf-16"))
    with pytest.raises(DataError, match=r"line 1 of .* cannot be read"):
        load_batch(tmp_path / "c.jsonl")
    (tmp_path / "d.jsonl").write_text("\n" * 80)
    with pytest.raises(DataError, match="holds no rows"):
        load_batch(tmp_path / "d.jsonl")


def test_kept_ids_out_of_range_and_of_one_token() -> None:
    for ids in ([7, 2**31], [8, -1]):
        with pytest.raises(DataError, match="expected ids of tokens"):
            one({"prompt_ids": [5], "completion_ids": [6], "kept": [ids]})
    td = one({"prompt_ids": [5], "completion_ids": [6], "kept": np.array([[6, 7]], dtype=object)})
    assert (td["kept", "ids"].tolist(), td["kept", "counts"].tolist()) == ([6, 7], [0, 2])


def test_tokens_that_were_not_sampled_are_masked_out() -> None:
    for row, expected in (
        ({"tokens": IDS, "mask": [1] * 5}, [False, True, True, True, True]),
        ({"tokens": [0, *IDS], "attention_mask": [0, 1, 1, 1, 1, 1], "mask": [1] * 6}, [False, True, True, True, True]),
        ({**BASE, "completion_mask": [1, 1, 0], "tool_mask": [1, 0, 1]}, [False, False, True, False, False]),
    ):
        assert one(row)["masks", "all_assistant_mask"].tolist() == expected
    padded = {"prompt_ids": [0, 5, 6], "prompt_mask": [0, 1, 1], "completion_ids": [7, 8, 9]}
    kept: list[list[int]] = [[], [], [], [7], [8], [9]]
    assert one({**padded, "kept": kept})["kept", "counts"].tolist() == [0, 0, 1, 1, 1]
    with pytest.raises(DataError, match="has kept ids in `kept` at padding"):
        one({**padded, "kept": [[5], *kept[1:]]})
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    with pytest.raises(ValueError, match=r'turns="each" makes several rows .* pass turns="all" or "last"'):
        one({"messages": chat}, tokenizer=build_tokenizer(CHATML), turns="each")


def test_a_missing_version_is_no_other_version() -> None:
    rows = [{**BASE, "logprobs": LOG_PROBS, **({"policy_version": 1} if i else {})} for i in range(3)]
    assert not read_columns(from_rollouts(rows)).several_versions
    assert read_columns(from_rollouts([{**row, "policy_version": i} for i, row in enumerate(rows)])).several_versions
