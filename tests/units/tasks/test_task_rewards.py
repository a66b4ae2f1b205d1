"""Tests of prompts, their sources and order, and of rewards from functions, their failures and time-outs."""

import asyncio
import functools
import itertools
import json
import logging
import math
import pickle
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase, lazy_stack
from torchrl.envs.transforms import StepCounter

from closeness import assert_near
from refused import refused
from torchrl_llm_kl import FunctionReward, PromptError, RewardError
from torchrl_llm_kl.advantages import Advantage, gdpo
from torchrl_llm_kl.datasets import DataError
from torchrl_llm_kl.tasks import PromptOrder, Prompts, _calls, _rewards, reward_metrics
from torchrl_llm_kl.tasks._calls import Call, Caller, Failure, check_takes
from waits import LONG

ROWS = [
    {"question": "1 + 1?", "answer": "2", "level": 1},
    {"prompt": "2 + 1?", "answer": "3", "level": None},
    {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "3 + 1?"}], "level": [1, 2]},
]
USER = {"role": "user", "content": "a"}


class Table:
    """A stand-in for a dataset of Hugging Face."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows, self.read = rows, 0
        self.column_names = list(rows[0])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        assert type(index) is int
        self.read += 1
        return self.rows[index]


def test_prompts_from_lists_files_and_datasets(tmp_path: Path) -> None:
    """Parquet fills missing columns with None. A dataset is read only when a row is used."""
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n\n" for row in ROWS))
    table = Table(ROWS)
    for source in (ROWS, path, str(path), table):
        prompts = Prompts(source)
        assert (len(prompts), table.read) == (3, int(source is table))
        assert [p.question for p in prompts] == ["1 + 1?", "2 + 1?", "3 + 1?"]
        assert [[m["role"] for m in p.messages] for p in prompts] == [["user"], ["user"], ["system", "user"]]
        metadata = [{"answer": "2", "level": 1}, {"answer": "3", "level": None}, {"level": [1, 2]}]
        assert [p.metadata for p in prompts] == metadata
    assert prompts[1].question == "2 + 1?"
    with pytest.raises(PromptError, match="row 2 of the data set has no prompt: found the columns text, expected one"):
        _ = Prompts(Table([{"prompt": "a"}, {"text": "b"}]))[1]
    path.write_text(f'{json.dumps(ROWS[0])}\n{{"x": 1}}\n')
    with pytest.raises(PromptError, match=r"line 2 of .*a\.jsonl has no prompt: found the columns x"):
        Prompts(path)
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    rows = [{"question": "1 + 1?", "prompt": None, "answer": "2"}, {"question": None, "prompt": "2?", "answer": None}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    prompts = Prompts(tmp_path / "rows.parquet")
    assert [p.question for p in prompts] == ["1 + 1?", "2?"]
    assert prompts[0].metadata == {"prompt": None, "answer": "2"}


@pytest.mark.slow
def test_a_dataset_of_hugging_face() -> None:
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


test_errors_name_the_row = refused(
    Prompts,
    ([], PromptError, "0 rows"),
    ([{"text": "a", "n": "b"}], PromptError, "row 1 of the list has no prompt: found the columns text, n"),
    ([{"prompt": 3}], PromptError, "row 1 of the list has `prompt` of int, expected a list of messages"),
    ([{"messages": []}], PromptError, "has a `messages` without a last message of the user"),
    ([[USER, {"role": "assistant", "content": "b"}]], PromptError, "without a last message of the user"),
    ([{"messages": [{**USER, "content": 5}]}], PromptError, "row 1 of the list 'int' object is not iterable"),
    (["a", "b\ud83d"], PromptError, r"row 2 of .* not Unicode: '\\ud83d' at character 1"),
    (["a", 3], DataError, "row 2 of the list is of int"),
    (3, TypeError, "expected rows"),
)


def test_each_epoch_has_its_own_permutation_which_later_versions_keep() -> None:
    """A run that resumes with a later version must continue its order, from any position."""
    order = PromptOrder(seed=3)
    epochs = [tuple(order.at(i, 50) for i in range(50 * e, 50 * e + 50)) for e in range(4)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len(set(epochs)) == 4
    assert epochs[0] != tuple(range(50))
    assert [PromptOrder(seed=None).at(i, 3) for i in range(7)] == [0, 1, 2, 0, 1, 2, 0]  # as they are
    order = PromptOrder(seed=0)
    assert [order.at(i, 6) for i in reversed(range(12))][::-1] == [1, 5, 3, 0, 2, 4, 2, 1, 0, 4, 5, 3]
    assert [order.at(i, 6) for i in range(12)] == [1, 5, 3, 0, 2, 4, 2, 1, 0, 4, 5, 3]
    assert [PromptOrder(seed=1).at(i, 6) for i in range(12)] != [order.at(i, 6) for i in range(12)]


ANSWERS = ["4", "22", "", "4<|im_end|><|pad|>"]


def batch(answers: list[str] = ANSWERS) -> TensorDictBase:
    count = len(answers)
    return TensorDict(
        query=[f"question {i}" for i in range(count)],
        text=TensorDict(response=answers, batch_size=[count]),
        metadata=NonTensorStack(*({"answer": "4", "row": i} for i in range(count))),
        batch_size=[count],
    )


def values(td: TensorDictBase, *key: str) -> list[float]:
    return td[("next", *(key or ("reward",)))].squeeze(-1).tolist()


def length(question: str, answer: str, metadata: dict[str, Any]) -> int:
    return len(answer)


def test_a_function_gets_question_answer_and_metadata(tokenizer: Any) -> None:
    seen: list[Any] = []
    td = FunctionReward(lambda *args: seen.append(args) or 0.5, tokenizer=tokenizer)(batch())
    answers = ["4", "22", "", "4"]  # without end token and padding
    assert seen == [(f"question {i}", answer, {"answer": "4", "row": i}) for i, answer in enumerate(answers)]
    assert values(td) == [0.5] * 4
    assert td["next", "reward"].dtype == torch.float32
    assert td["next", "reward"].shape == td["next", "reward_failures"].shape == (4, 1)
    assert "rewards" not in td["next"]
    td = batch()  # what a function does to its metadata stays there
    pops = {name: lambda q, a, metadata: float(metadata.pop("row")) for name in "ab"}
    assert values(FunctionReward(pops)(td)) == [0.0, 2.0, 4.0, 6.0]
    assert td["metadata"][1] == {"answer": "4", "row": 1}


def test_named_parts_weights_and_numbers_of_any_kind(tokenizer: Any) -> None:
    parts = {"right": (3.0, lambda q, a, m: a == m["answer"]), "length": (-0.25, length), "plain": length}
    reward = FunctionReward(parts, tokenizer=tokenizer)
    td = reward(batch())
    assert values(td, "rewards", "right") == [1, 0, 0, 1]
    assert values(td, "rewards", "length") == [1, 2, 0, 1] == values(td, "rewards", "plain")
    assert values(td) == [3 - 0.25 + 1, -0.5 + 2, 0, 3 - 0.25 + 1]
    assert reward.weights == {"right": 3.0, "length": -0.25, "plain": 1.0}
    assert reward.part_keys == [("next", "rewards", name) for name in ("right", "length", "plain")]
    found = [{"a": 1, "b": 2}, {"a": 1}, {"a": 1, "b": math.nan}, 3.0]  # what is not promised is a failure
    td = FunctionReward(lambda q, a, m: found[m["row"]], weights={"a": 1.0, "b": 10.0})(batch())
    assert values(td) == [21, 0, 0, 0]
    assert values(td, "rewards", "a") == [1, 0, 0, 0]
    assert values(td, "reward_failures") == [0, 2, 2, 2]
    kinds = [1, True, np.float32(1), np.int64(1), np.array([1.0]), torch.tensor(1), torch.tensor([1.0])]
    td = FunctionReward(lambda q, a, m: kinds[m["row"]], timeout=None)(batch(["a"] * len(kinds)))
    assert values(td) == [1.0] * len(kinds)
    assert values(td, "reward_failures") == [0] * len(kinds)


def test_batches_of_any_shape_and_metrics_over_finished_rows() -> None:
    for td in (lazy_stack(list(batch().unbind(0))), batch().reshape(2, 2)):
        td = FunctionReward(length)(td)
        assert td["next", "reward"].shape == (*td.batch_size, 1)
        assert td["next", "reward"].flatten().tolist() == [1.0, 2.0, 0.0, float(len(ANSWERS[3]))]
    td, rows = batch(), []
    td["next"] = TensorDict(done=torch.tensor([[True], [False], [False], [True]]), batch_size=[4])
    assert values(FunctionReward(lambda q, a, m: rows.append(m["row"]) or 1.0)(td)) == [1, 0, 0, 1]
    assert rows == [0, 3]
    td = batch(["a", "bb", "cccc", "d"])
    td["next"] = TensorDict(done=torch.tensor([[True], [True], [False], [True]]), batch_size=[4])
    td = FunctionReward({"length": length, "odd": (5.0, fails_on({1, 2}, None))})(td)
    want = {"rewards/length": 4 / 3, "rewards/odd": 2 / 3, "reward_failures": 1 / 3}
    for shaped in (td.reshape(2, 2), lazy_stack(list(td.unbind(0)))):
        assert_near({name: float(x) for name, x in reward_metrics(shaped).items()}, want, dtype=torch.float32)
    with pytest.raises(KeyError, match="expected 'reward_failures' under 'next', found done"):
        reward_metrics(TensorDict(next=TensorDict(done=torch.ones(2, 1).bool(), batch_size=[2]), batch_size=[2]))


def test_gdpo_reads_the_parts() -> None:
    reward = FunctionReward({"right": lambda q, a, m: a == m["answer"], "length": length})
    gdpo_of_parts = Advantage("gdpo", keys={"rewards": reward.part_keys}, reward_weights=[1.0, 0.25])
    td = batch(["4", "222", "22", "333"])
    td["query"] = ["a", "a", "b", "b"]
    rows = torch.tensor([[1.0, 1.0], [0.0, 3.0], [0.0, 2.0], [0.0, 3.0]])
    want = gdpo(rows, torch.tensor([0, 0, 1, 1]), reward_weights=[1.0, 0.25])
    assert_near(gdpo_of_parts(reward(td))["advantage"].squeeze(-1), want)


def fails_on(rows: set[int], error: Any) -> Any:
    def reward(question: str, answer: str, metadata: dict[str, Any]) -> Any:
        if metadata["row"] in rows:
            if isinstance(error, BaseException):
                raise error
            return error
        return 1.0

    return reward


FAILURES = [
    (KeyError("x"), "KeyError: 'x'"),
    (SystemExit(1), "SystemExit: 1"),
    (math.nan, "returned nan, expected a finite number"),
    (1e39, r"returned 1e\+39, expected a finite number of at most 3.4e\+38"),
    (10**5000, "int too large to convert to float"),
    (None, "returned None, expected a finite number"),
    ("1", "returned '1', expected a finite number"),
    (torch.zeros(2), "RuntimeError: a Tensor with 2 elements cannot be converted"),
    (np.zeros((2, 1)), "ValueError: can only convert an array of size 1"),
    ({"a": 1.0}, "returned {'a': 1.0}, expected a finite number"),
]


def test_failures_count_as_0_and_are_logged_at_a_limited_rate(caplog: Any, monkeypatch: Any) -> None:
    for error, message in FAILURES:
        caplog.clear()
        parts = {"odd": (2.0, fails_on({1, 3}, error)), "length": (1.0, length)}
        td = FunctionReward(parts, timeout=None)(batch(["a", "b", "c", "d"]))
        assert values(td) == [3, 1, 3, 1], message
        assert values(td, "rewards", "odd") == [1, 0, 1, 0], message
        assert values(td, "reward_failures") == [0, 1, 0, 1], message
        (line,) = caplog.messages
        assert "'odd' failed for 2 of 4 answers, first in row 1 (question 'question 1', answer 'b')" in line
        assert re.search(message, line), (message, line)
        assert line.endswith("Their reward is 0.")
    caplog.clear()
    now = iter([100.0, 100.0, 101.0, 105.0, 111.0, 111.0])
    monkeypatch.setattr(_rewards, "time", SimpleNamespace(monotonic=lambda: next(now)))
    log = _rewards.FailureLog()
    with caplog.at_level(logging.WARNING, logger="torchrl_llm_kl.tasks"):
        for i in range(4):
            log.add(f"line {i}")
    assert caplog.messages == ["line 0.", "line 3 (2 more lines such as this since the last one)."]


@pytest.mark.parametrize("timeout", [None, LONG])
def test_a_first_batch_in_which_all_answers_fail_raises(timeout: float | None, caplog: Any) -> None:
    rows = {0, 1, 2, 3}
    message = r"'bad' failed for all 4 answers of its first batch.*KeyError: 'target'"
    with pytest.raises(RewardError, match=message) as e:
        FunctionReward({"good": length, "bad": fails_on(rows, KeyError("target"))}, timeout=timeout)(batch())
    assert isinstance(e.value.__cause__, KeyError)
    later: set[int] = set()
    reward = FunctionReward(fails_on(later, ValueError("no")), timeout=timeout)
    reward(batch())
    later |= rows
    assert values(reward(batch())) == [0.0] * 4
    assert "the reward function failed for 4 of 4 answers" in caplog.text


def test_a_call_that_exceeds_its_time_out_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes an async call that blocks the loop."""
    release = threading.Event()
    td = FunctionReward(lambda q, a, m: m["row"] != 1 or release.wait(LONG), timeout=0.6)(batch())
    assert not release.is_set()
    assert values(td) == [1, 0, 1, 1]
    assert values(td, "reward_failures") == [0, 1, 0, 0]
    monkeypatch.setattr(_calls, "_GRACE", 0.6)

    async def blocks(x: int) -> int:
        if x == 1:
            await asyncio.sleep(0.1)  # the others end first
            release.wait(LONG)
        return x

    caller = Caller(timeout=0.6)
    results = caller([Call(blocks, (x,)) for x in range(3)])
    assert results[0] == 0
    assert isinstance(results[1], Failure)
    assert "blocked the event loop" in str(results[1].error)
    release.set()
    assert caller([Call(blocks, (5,))]) == [5]  # in a new loop


def test_workers_run_concurrently_and_without_them_calls_run_one_by_one() -> None:
    barrier, running, names = threading.Barrier(4, timeout=LONG), [], []

    def alone(*_: Any) -> float:
        running.append(1)
        time.sleep(0.01)
        running.pop()
        return float(len(running))

    together = FunctionReward(lambda *_: barrier.wait() >= 0, workers=4, timeout=LONG)  # passes if four run at a time
    assert values(together(batch())) == [1.0] * 4
    assert values(FunctionReward(alone)(batch())) == [0.0] * 4
    FunctionReward(lambda *_: names.append(threading.current_thread().name) or 1.0, timeout=None)(batch())
    assert set(names) == {threading.current_thread().name}, "without a time-out, the caller's"


class Judge:
    """A callable object with an async ``__call__``, which records the number of concurrent calls."""

    def __init__(self) -> None:
        self.at_once, self.most = 0, 0

    async def __call__(self, question: str, answer: str, metadata: dict[str, Any]) -> float:
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        await asyncio.sleep(LONG if answer == "long" else 0.1)  # long enough for all to begin beside other work
        self.at_once -= 1
        return metadata["row"]


async def judge(question: str, answer: str, metadata: dict[str, Any], scale: float = 1.0) -> float:
    await asyncio.sleep(0.01)
    return scale * metadata["row"]


@pytest.mark.parametrize("timeout", [None, LONG])
def test_async_functions(timeout: float | None) -> None:
    functions = {"def": judge, "partial": functools.partial(judge, scale=1.0), "lambda": lambda *args: judge(*args)}
    reward = FunctionReward({**functions, "object": Judge(), "length": length}, timeout=timeout)
    for _ in range(2):
        td = reward(batch(["a", "a", "a"]))
        assert values(td) == [1, 5, 9]
        for name in (*functions, "object"):
            assert values(td, "rewards", name) == [0, 1, 2], name


def test_async_calls_share_one_loop_with_a_limit_and_a_time_out() -> None:
    every, two, loops = Judge(), Judge(), set()
    FunctionReward(every)(batch(["a"] * 6))
    FunctionReward(two, workers=2)(batch(["a"] * 6))
    assert (every.most, two.most) == (6, 2)
    td = FunctionReward(Judge(), timeout=0.5)(batch(["a", "a", "long", "a"]))
    assert values(td) == [0, 1, 0, 3]
    assert values(td, "reward_failures") == [0, 0, 1, 0]

    async def notebook() -> list[float]:  # where a loop runs already
        return values(FunctionReward(judge)(batch()))

    assert asyncio.run(notebook()) == [0, 1, 2, 3]

    async def reward(*_: Any) -> float:
        loops.add(asyncio.get_running_loop())
        return 1.0

    function = FunctionReward(reward)
    for _ in range(3):
        function(batch())
    assert len(loops) == 1


test_wrong_arguments = refused(
    lambda reward, weights: FunctionReward(reward, weights=weights),
    (3, None, TypeError, r"^reward is called with \(question, answer, metadata\): 3 is not a callable object"),
    (lambda a, b: 1.0, None, TypeError, r"^reward is called with .*: too many positional arguments"),
    ({"a": (2.0, lambda q, a, m, n: 1.0)}, None, TypeError, r"the reward 'a' is called .* missing .* 'n'"),
    (StepCounter(), None, TypeError, "^reward is called .* too many positional arguments"),
    ({"a": ("b", length)}, None, TypeError, "must be a number, got 'b'"),
    ({"a": (math.nan, length)}, None, "the weight of 'a' must be"),
    ({"a": length}, {"a": 1.0}, "weights= belong to one "),
    ({}, None, "no reward is given"),
)


def test_signatures_with_defaults_invalid_numbers_and_missing_answers() -> None:
    for kwargs in ({"timeout": 0.0}, {"workers": 0}):
        with pytest.raises(ValueError, match=next(iter(kwargs))):
            FunctionReward(length, **kwargs)
    with pytest.raises(KeyError, match=r"expected texts under \('text', 'response'\), found query.*answer_key="):
        FunctionReward(length)(TensorDict(query=["a"], batch_size=[1]))
    td = FunctionReward({"later": judge, "more": lambda q, a, m, more=3.0, **_: more})(batch(["a", "b"]))
    assert (values(td, "rewards", "later"), values(td, "rewards", "more")) == ([0, 1], [3, 3])
    check_takes(max, "reward", "question", "answer", "metadata")  # Python does not tell the arguments of all functions
    modes: list[bool] = []  # gradients are off in every thread
    for workers, timeout in itertools.product((None, 2), (None, LONG)):
        Caller(timeout, workers)([Call(lambda: modes.append(torch.is_grad_enabled()))])
    assert modes == [False] * 4
    reward = FunctionReward({"judge": judge, "length": length})  # a copy works in another process
    reward(batch())
    assert values(pickle.loads(pickle.dumps(reward))(batch(["a", "a"]))) == [1, 2]
