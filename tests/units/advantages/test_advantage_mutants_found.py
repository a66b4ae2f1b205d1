"""Cases that only `make mutants` found."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from torchrl_llm_kl.advantages import rec, step_wise_grpo
from torchrl_llm_kl.advantages._group import Groups
from torchrl_llm_kl.advantages._token import whitened


def test_equal_numbers_have_the_lowest_of_their_places() -> None:
    groups = Groups(torch.tensor([0, 0, 0, 1, 1]))
    assert groups.rank(torch.tensor([5.0, 5.0, 6.0, 2.0, 2.0])).tolist() == [0, 0, 2, 0, 0]


@pytest.mark.parametrize("reward", [[0.0, 0.0, 3.0, 1.0], [0.0, 0.0, 1.5, 0.9]])  # one at the mean of 1; one near it
def test_rec_drops_none_where_no_more_are_below_the_mean_than_not(reward: list[float]) -> None:
    rewards, group = torch.tensor(reward), torch.zeros(4, dtype=torch.long)
    assert_close(rec(rewards, group, drop="balance"), rewards - rewards.mean())


def test_whitening_by_hand_where_little_varies() -> None:
    """Variance 2e-8 of two tokens, and 1e-8 added."""
    mask = torch.tensor([[True, True, False]])
    result = whitened(torch.tensor([[0.0, 2e-4, 0.0]], dtype=torch.float64), mask)
    assert_close(result, torch.tensor([[-1.0, 1.0, 0.0]], dtype=torch.float64) / math.sqrt(3))


def test_whitening_equal_numbers_leaves_nothing_to_round() -> None:
    for tokens in range(1, 50):
        value = torch.full((1, tokens + 1), 0.1)
        value[0, -1] = 0.0
        assert (whitened(value, torch.arange(tokens + 1).unsqueeze(0) < tokens) == 0).all()


def test_whitening_nothing() -> None:
    assert whitened(torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool)).shape == (0, 3)
    assert (whitened(torch.zeros(1, 3), torch.zeros(1, 3, dtype=torch.bool)) == 0).all()
    assert whitened(torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool)) == 0


def test_neighbours_that_are_the_same_step_are_named() -> None:
    zeros = torch.zeros(3, dtype=torch.long)
    with pytest.raises(ValueError, match="rows 0 and 1 are both step 4 of trajectory 0"):
        step_wise_grpo(torch.zeros(3), zeros, zeros, torch.tensor([4, 4, 5]))
