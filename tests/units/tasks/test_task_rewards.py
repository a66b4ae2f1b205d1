"""Rewards from functions: values and weights by hand, failures that count as 0, and time-outs."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import pickle
import re
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase, lazy_stack
from torchrl.envs.transforms import StepCounter

from closeness import assert_near
from torchrl_llm_kl import FunctionReward, RewardError, make_algorithm
from torchrl_llm_kl.tasks import _calls, _rewards, reward_metrics
from torchrl_llm_kl.tasks._calls import Call, Caller, Failure, check_takes
from toy_rollouts import make_model
from waits import LONG

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


def right(question: str, answer: str, metadata: dict[str, Any]) -> bool:
    return answer == metadata["answer"]


def length(question: str, answer: str, metadata: dict[str, Any]) -> int:
    return len(answer)


def test_a_function_gets_question_answer_and_metadata(tokenizer: Any) -> None:
    seen: list[Any] = []

    def reward(*args: Any) -> float:
        seen.append(args)
        return 0.5

    td = FunctionReward(reward, tokenizer=tokenizer)(batch())
    answers = ["4", "22", "", "4"]  # without end token and padding
    assert seen == [(f"question {i}", answer, {"answer": "4", "row": i}) for i, answer in enumerate(answers)]
    assert values(td) == [0.5] * 4
    assert td["next", "reward"].dtype == torch.float32
    assert td["next", "reward"].shape == td["next", "reward_failures"].shape == (4, 1)
    assert "rewards" not in td["next"]

    def pops(question: str, answer: str, metadata: dict[str, Any]) -> float:
        return float(metadata.pop("row"))

    td = batch()  # what a function does to its metadata stays there
    assert values(FunctionReward({"a": pops, "b": pops})(td)) == [0.0, 2.0, 4.0, 6.0]
    assert td["metadata"][1] == {"answer": "4", "row": 1}


def test_named_parts_and_weights(tokenizer: Any) -> None:
    reward = FunctionReward({"right": (3.0, right), "length": (-0.25, length), "plain": length}, tokenizer=tokenizer)
    td = reward(batch())
    assert values(td, "rewards", "right") == [1, 0, 0, 1]
    assert values(td, "rewards", "length") == [1, 2, 0, 1] == values(td, "rewards", "plain")
    assert values(td) == [3 - 0.25 + 1, -0.5 + 2, 0, 3 - 0.25 + 1]
    assert reward.weights == {"right": 3.0, "length": -0.25, "plain": 1.0}
    assert reward.part_keys == [("next", "rewards", name) for name in ("right", "length", "plain")]

    def parts(question: str, answer: str, metadata: dict[str, Any]) -> Any:  # what is not promised is a failure
        return [{"a": 1, "b": 2}, {"a": 1}, {"a": 1, "b": math.nan}, 3.0][metadata["row"]]

    td = FunctionReward(parts, weights={"a": 1.0, "b": 10.0})(batch())
    assert values(td) == [21, 0, 0, 0]
    assert values(td, "rewards", "a") == [1, 0, 0, 0]
    assert values(td, "reward_failures") == [0, 2, 2, 2]


def test_numbers_of_any_kind() -> None:
    kinds = [1, True, np.float32(1), np.int64(1), np.array([1.0]), torch.tensor(1), torch.tensor([1.0])]
    td = FunctionReward(lambda q, a, m: kinds[m["row"]], timeout=None)(batch(["a"] * len(kinds)))
    assert values(td) == [1.0] * len(kinds)
    assert values(td, "reward_failures") == [0] * len(kinds)


def test_batches_of_any_shape_and_rows_that_are_not_done() -> None:
    for td in (lazy_stack(list(batch().unbind(0))), batch().reshape(2, 2)):
        td = FunctionReward(length)(td)
        assert td["next", "reward"].shape == (*td.batch_size, 1)
        assert td["next", "reward"].flatten().tolist() == [1.0, 2.0, 0.0, float(len(ANSWERS[3]))]
    td, rows = batch(), []
    td["next"] = TensorDict(done=torch.tensor([[True], [False], [False], [True]]), batch_size=[4])
    assert values(FunctionReward(lambda q, a, m: rows.append(m["row"]) or 1.0)(td)) == [1, 0, 0, 1]
    assert rows == [0, 3]


def test_metrics_are_means_over_finished_answers() -> None:
    td = batch(["a", "bb", "cccc", "d"])
    td["next"] = TensorDict(done=torch.tensor([[True], [True], [False], [True]]), batch_size=[4])
    td = FunctionReward({"length": length, "odd": (5.0, fails_on({1, 2}, None))})(td)
    want = {"rewards/length": 4 / 3, "rewards/odd": 2 / 3, "reward_failures": 1 / 3}
    for shaped in (td.reshape(2, 2), lazy_stack(list(td.unbind(0)))):
        assert_near({name: float(x) for name, x in reward_metrics(shaped).items()}, want, dtype=torch.float32)
    with pytest.raises(KeyError, match="expected 'reward_failures' under 'next', found done"):
        reward_metrics(TensorDict(next=TensorDict(done=torch.ones(2, 1).bool(), batch_size=[2]), batch_size=[2]))


def test_gdpo_reads_the_parts(tokenizer: Any) -> None:
    reward = FunctionReward({"right": right, "length": length})
    args = {"keys": {"rewards": reward.part_keys}, "reward_weights": [1.0, 0.25]}
    gdpo = make_algorithm("gdpo", make_model(tokenizer, seed=0), kl_loss="none", group_size=2, advantage_args=args)
    td = reward(batch(["4", "222", "22", "333"]))
    full = torch.tensor([[3, 4, 5], [3, 4, 6], [7, 4, 5], [7, 4, 6]])
    td["tokens"] = TensorDict(prompt=full[:, :2], full=full, batch_size=[4])
    del td["query"], td["text"]
    # Scaled in their groups, right is +-1 / sqrt(2), then 0; length -+1 / sqrt(2) twice. The sums are 3, -3, -1, 1 times
    # 0.25 / sqrt(2), and the standard deviation of 3, -3, -1, 1 is sqrt(20 / 3).
    want = [x / math.sqrt(20 / 3) for x in (3, -3, -1, 1)]
    assert gdpo.prepare(td)["advantage"].squeeze(-1).tolist() == pytest.approx(want, abs=1e-4)


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
    (-math.inf, "returned -inf, expected a finite number"),
    (1e39, r"returned 1e\+39, expected a finite number of at most 3.4e\+38"),
    (-(10**400), "returned -10{50,}, expected a finite number"),
    (10**5000, "a number of thousands of digits, expected a finite number"),
    (None, "returned None, expected a finite number"),
    ("1", "returned '1', expected a finite number"),
    (1j, "returned 1j, expected a finite number"),
    (torch.zeros(2), r"returned an array of shape \(2,\), expected one number"),
    (np.zeros((2, 1)), r"returned an array of shape \(2, 1\), expected one number"),
    ({"a": 1.0}, "returned a dict with 'a', expected a number: name its parts with weights="),
]


def test_a_failure_is_a_counted_zero_with_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
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
        assert line.endswith("they count as 0.")


@pytest.mark.parametrize("timeout", [None, LONG])
def test_only_the_first_batch_raises_where_all_its_answers_fail(
    timeout: float | None, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_the_log_is_not_flooded(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([100.0, 100.0, 101.0, 105.0, 111.0, 111.0])
    monkeypatch.setattr(_rewards, "time", SimpleNamespace(monotonic=lambda: next(now)))
    log = _rewards.FailureLog()
    with caplog.at_level(logging.WARNING, logger="torchrl_llm_kl.tasks"):
        for i in range(4):
            log.add(f"line {i}")
    assert caplog.messages == ["line 0.", "line 3 (2 more lines such as this since the last one)."]


def test_a_sync_call_that_takes_too_long_is_left_behind() -> None:
    release = threading.Event()

    def reward(question: str, answer: str, metadata: dict[str, Any]) -> float:
        return 1.0 if metadata["row"] != 1 else float(release.wait(LONG))

    td = FunctionReward(reward, timeout=0.3)(batch())
    assert not release.is_set()
    release.set()
    assert values(td) == [1, 0, 1, 1]
    assert values(td, "reward_failures") == [0, 1, 0, 0]


def test_workers_run_side_by_side_and_without_them_one_after_another() -> None:
    barrier, running, names = threading.Barrier(4, timeout=LONG), 0, []

    def together(*_: Any) -> float:
        barrier.wait()  # passes only if four run at a time
        return 1.0

    def alone(*_: Any) -> float:
        nonlocal running
        running += 1
        time.sleep(0.01)
        running -= 1
        return float(running)

    assert values(FunctionReward(together, workers=4, timeout=LONG)(batch())) == [1.0] * 4
    assert values(FunctionReward(alone)(batch())) == [0.0] * 4
    FunctionReward(lambda *_: names.append(threading.current_thread().name) or 1.0, timeout=None)(batch())
    assert set(names) == {threading.current_thread().name}, "without a time-out, the caller's"


class Judge:
    """An async callable object."""

    def __init__(self) -> None:
        self.at_once, self.most = 0, 0

    async def __call__(self, question: str, answer: str, metadata: dict[str, Any]) -> float:
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        await asyncio.sleep(LONG if answer == "long" else 0.01)
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


def test_async_calls_run_together_up_to_a_limit_and_to_a_time_out_in_one_loop() -> None:
    every, two, loops = Judge(), Judge(), set()
    FunctionReward(every)(batch(["a"] * 6))
    FunctionReward(two, workers=2)(batch(["a"] * 6))
    assert (every.most, two.most) == (6, 2)
    td = FunctionReward(Judge(), timeout=1.0)(batch(["a", "a", "long", "a"]))
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


def test_an_async_function_that_blocks_the_loop_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_calls, "_GRACE", 0.2)
    release = threading.Event()

    async def blocks(x: int) -> int:
        if x == 1:
            release.wait(LONG)
        return x

    caller = Caller(timeout=0.2)
    results = caller([Call(blocks, (x,)) for x in range(3)])
    assert results[0] == 0
    assert isinstance(results[1], Failure)
    assert "blocked the event loop" in str(results[1].error)
    release.set()
    assert caller([Call(blocks, (5,))]) == [5]  # in a new loop


def test_gradients_are_off_in_every_thread_and_a_copy_works_in_another_process() -> None:
    modes: list[bool] = []
    for workers in (None, 2):
        for timeout in (None, LONG):
            Caller(timeout, workers)([Call(lambda: modes.append(torch.is_grad_enabled()))])
    assert modes == [False] * 4
    reward = FunctionReward({"judge": judge, "length": length})
    reward(batch())
    assert values(pickle.loads(pickle.dumps(reward))(batch(["a", "a"]))) == [1, 2]


@pytest.mark.parametrize(
    ("reward", "weights", "message"),
    [
        (3, None, r"^reward must be a function of \(question, answer, metadata\), got 3"),
        ("exact", None, "^reward must be a function .*, got 'exact'"),
        ({"a": 3}, None, "the reward 'a' must be a function"),
        (lambda a, b: 1.0, None, r"^reward .* \(question, answer, metadata\), and the function given takes \(a, b\)"),
        ({"a": (2.0, lambda q, a, m, n: 1.0)}, None, r"the reward 'a' is called .* takes \(q, a, m, n\)"),
        ({"a": lambda q, a, m, *, key: 1.0}, None, r"the reward 'a' is called .* takes \(q, a, m, \*, key\)"),
        (StepCounter(), None, r"^reward is called .* takes \(tensordict"),
        ({}, None, "there is no reward"),
        ({"a": ("b", length)}, None, "the weight of 'a' must be a finite number"),
        ({"a": (math.nan, length)}, None, "the weight of 'a' must be a finite number"),
        ({"a": length}, {"a": 1.0}, "weights= belong to one "),
        (length, {}, "there is no reward"),
        ({1: length}, None, "the name of a reward must be a text, got 1"),
        (length, {"": 1.0}, "the name of a reward must be a text, got ''"),
    ],
)
def test_wrong_arguments(reward: Any, weights: Any, message: str) -> None:
    error = TypeError if "function" in message or "is called" in message else ValueError
    with pytest.raises(error, match=message):
        FunctionReward(reward, weights=weights)


def test_arguments_with_defaults_are_no_error() -> None:
    async def later(*args: Any, scale: float = 2.0) -> float:
        return scale

    reward = FunctionReward({"later": later, "more": lambda q, a, m, more=3.0, **_: more})
    td = reward(batch(["four"]))
    assert (values(td, "rewards", "later"), values(td, "rewards", "more")) == ([2], [3])
    check_takes(max, "reward", "question", "answer", "metadata")  # Python does not tell the arguments of all functions


def test_numbers_out_of_range_and_data_without_answers() -> None:
    for kwargs in ({"timeout": 0.0}, {"workers": 0}):
        with pytest.raises(ValueError, match=next(iter(kwargs))):
            FunctionReward(length, **kwargs)
    with pytest.raises(KeyError, match=r"expected texts under \('text', 'response'\), found query.*answer_key="):
        FunctionReward(length)(TensorDict(query=["a"], batch_size=[1]))
