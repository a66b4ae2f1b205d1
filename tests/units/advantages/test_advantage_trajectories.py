"""Trajectories of several steps, by hand, with shuffled rows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from torchrl_llm_kl.advantages import advantage_spec, gigpo, step_wise_grpo

# task, run, step, reward, state. Runs count from 0 in each task; steps need not be consecutive.
ROWS = [
    (0, 0, 2, 4.0, 1),
    (1, 1, 0, 6.0, 1),
    (0, 1, 0, 1.0, 1),
    (0, 0, 0, 8.0, 1),
    (1, 0, 5, 0.0, 2),
    (0, 0, 1, 2.0, 3),
    (1, 0, 1, 3.0, 1),
    (2, 0, 0, 7.0, 1),
    (0, 2, 0, 1.0, 3),
]
TASK, RUN, STEP = (torch.tensor([row[i] for row in ROWS]) for i in range(3))
REWARD = torch.tensor([row[3] for row in ROWS], dtype=torch.float64)
STATE = torch.tensor([row[4] for row in ROWS])


def assert_values(got: Tensor, want: list[float]) -> None:
    assert_close(got, torch.tensor(want, dtype=torch.float64))


def test_step_wise_grpo_compares_last_rewards() -> None:
    """Task 0: 4, 1, 1 (mean 2, variance 3); task 1: 0 and 6 (mean 3, variance 18); task 2: alone."""
    a, b = math.sqrt(3.0) + 0.5, math.sqrt(18.0) + 0.5
    got = step_wise_grpo(REWARD, TASK, RUN, STEP, epsilon=0.5)
    assert_values(got, [2 / a, 3 / b, -1 / a, 2 / a, -3 / b, 2 / a, -3 / b, 0, -1 / a])
    shared = step_wise_grpo(REWARD, TASK, RUN, STEP, epsilon=0.5, enable_step_norm=True)
    assert_values(shared, [2 / a / 3, 3 / b, -1 / a, 2 / a / 3, -3 / b / 2, 2 / a / 3, -3 / b / 2, 0, -1 / a])
    # Over the batch each trajectory counts once: 4, 1, 1, 0, 6, 7 have mean 19/6 and variance (103 - 361/6) / 5.
    sigma = math.sqrt((103 - 361 / 6) / 5) + 0.25
    got = step_wise_grpo(REWARD, TASK, RUN, STEP, epsilon=0.25, std="batch")
    assert_values(got, [x / sigma for x in (2, 3, -1, 2, -3, 2, -3, 0, -1)])
    got = step_wise_grpo(REWARD, TASK, RUN, STEP, epsilon=0.0, std_threshold=2.0)
    b = math.sqrt(18.0)
    assert_values(got, [0, 3 / b, 0, 0, -3 / b, 0, -3 / b, 0, 0])


def test_gigpo_adds_steps_from_the_same_state() -> None:
    """gamma 0.5. Task 0: sums 14, 1, 1 (mean 16/3); returns 8 + 1 + 1 = 10, 2 + 2 = 4, 4; 1; 1.

    State 1 of task 0: 10, 4 and 1 (mean 5); state 3: 4 and 1 (mean 2.5). Task 1: sums 3 and 6; state 1: 3 and 6.
    Deviations of 14, 1, 1 are 13 / sqrt(3), of 10, 4, 1 sqrt(21), of 4, 1 and 3, 6 are 3 / sqrt(2).
    """
    episode = [26 / 3, 1.5, -13 / 3, 26 / 3, -1.5, 26 / 3, -1.5, 0, -13 / 3]
    anchored = [-1.0, 1.5, -4.0, 5.0, 0.0, 1.5, -1.5, 0.0, -1.5]
    got = gigpo(REWARD, TASK, RUN, STEP, STATE, omega=0.25, gamma=0.5)
    assert_values(got, [e + 0.25 * s for e, s in zip(episode, anchored, strict=True)])
    a, b = 13 / math.sqrt(3) + 0.5, 3 / math.sqrt(2) + 0.5
    c = math.sqrt(21.0) + 0.5
    episode = [26 / 3 / a, 1.5 / b, -13 / 3 / a, 26 / 3 / a, -1.5 / b, 26 / 3 / a, -1.5 / b, 0, -13 / 3 / a]
    anchored = [-1.0 / c, 1.5 / b, -4.0 / c, 5.0 / c, 0.0, 1.5 / b, -1.5 / b, 0.0, -1.5 / b]
    got = gigpo(REWARD, TASK, RUN, STEP, STATE, omega=2.0, gamma=0.5, fnorm="std", epsilon=0.5)
    assert_values(got, [e + 2.0 * s for e, s in zip(episode, anchored, strict=True)])
    apart = torch.arange(len(ROWS))  # no state occurs twice: the episode alone
    assert_close(gigpo(REWARD, TASK, RUN, STEP, apart), gigpo(REWARD, TASK, RUN, STEP, STATE, omega=0.0))


CALLS = {
    "step_wise_grpo": lambda r, g, i, t, s: step_wise_grpo(r, g, i, t),
    "gigpo": lambda r, g, i, t, s: gigpo(r, g, i, t, s, gamma=0.9),
}


@pytest.mark.parametrize("name", CALLS)
def test_order_and_other_tasks_do_not_matter(name: str) -> None:
    table = (REWARD, TASK, RUN, STEP, STATE)
    whole = CALLS[name](*table)
    order = torch.randperm(len(ROWS), generator=torch.Generator().manual_seed(1))
    assert_close(CALLS[name](*(x[order] for x in table)), whole[order])
    for task in range(3):
        own = task == TASK
        assert_close(CALLS[name](*(x[own] for x in table)), whole[own])


@pytest.mark.parametrize("name", CALLS)
def test_equal_trajectories_give_exactly_0(name: str) -> None:
    run = torch.arange(3).repeat_interleave(2)
    step = torch.arange(2).repeat(3)
    reward = torch.tensor([0.1, 0.7] * 3)
    got = CALLS[name](reward, torch.zeros_like(run), run, step, step)
    assert torch.equal(got, torch.zeros(6))
    assert CALLS[name](*(x[:0] for x in (reward, run, run, step, step))).shape == (0,)


@pytest.mark.parametrize("name", CALLS)
def test_a_step_twice_is_an_error(name: str) -> None:
    step = STEP.clone()
    step[5] = 2  # as row 0
    with pytest.raises(ValueError, match="rows 0 and 5 are both step 2 of trajectory 0: expected each step once"):
        CALLS[name](REWARD, TASK, RUN, step, STATE)
    zeros = torch.zeros(3, dtype=torch.long)
    with pytest.raises(ValueError, match="rows 0 and 1 are both step 4 of trajectory 0"):  # neighbours
        CALLS[name](torch.zeros(3), zeros, zeros, torch.tensor([4, 4, 5]), zeros)


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        ({"fnorm": "mean"}, "fnorm must be one of 'none', 'std', got 'mean'"),
        ({"gamma": 2.0}, "gamma must be at least 0 and at most 1"),
        ({"epsilon": -1.0}, "epsilon must be at least 0"),
    ],
)
def test_gigpo_out_of_range(hyper: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gigpo(REWARD, TASK, RUN, STEP, STATE, **hyper)


def test_trinitys_names_of_entries_are_no_hyper_parameters() -> None:
    with pytest.warns(UserWarning, match="env_state_hash_key has no effect here.*keys={'state'"):
        assert advantage_spec(gigpo).hyperparameters.translate({"env_state_hash_key": "hash"}) == {}
