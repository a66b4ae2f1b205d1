"""Properties of every advantage that compares within groups."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from test_advantage_outcomes import GROUPED
from torch.testing import assert_close

from torchrl_llm_kl.advantages import informative_groups, overlong_penalty, rloo
from torchrl_llm_kl.advantages._group import Groups

# All but one that draws at random and two that read the whole batch depend on their group alone.
LOCAL = sorted(set(GROUPED) - {"rec-drop", "grpo-batch", "gdpo"})
TABLES = st.lists(st.tuples(st.integers(-3, 3), st.integers(-40, 40)), min_size=1, max_size=14)


def tensors(table: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    group, reward = zip(*table, strict=True)
    return torch.tensor(reward, dtype=torch.float64) / 8, torch.tensor(group)


@pytest.mark.parametrize("name", LOCAL)
@settings(max_examples=30, deadline=None)
@given(table=TABLES, seed=st.integers(0, 2**20))
def test_neither_order_nor_other_groups_matter(name: str, table: list[tuple[int, int]], seed: int) -> None:
    reward, group = tensors(table)
    whole = GROUPED[name](reward, group)
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(seed))
    assert_close(GROUPED[name](reward[order], group[order]), whole[order])
    alone = group == group[0]
    assert_close(GROUPED[name](reward[alone], group[alone]), whole[alone])
    # Names of groups are only names.
    assert_close(GROUPED[name](reward, 1000 - 7 * group), whole)


@pytest.mark.parametrize("name", [*LOCAL, "grpo-batch", "gdpo"])
@settings(max_examples=30, deadline=None)
@given(table=TABLES)
def test_a_constant_on_all_rewards_changes_nothing(name: str, table: list[tuple[int, int]]) -> None:
    reward, group = tensors(table)
    assert_close(GROUPED[name](reward + 16, group), GROUPED[name](reward, group))


@settings(max_examples=40, deadline=None)
@given(table=TABLES)
def test_rloo_leaves_one_out(table: list[tuple[int, int]]) -> None:
    reward, group = tensors(table)
    same = (group[:, None] == group) & ~torch.eye(len(table), dtype=torch.bool)
    others = (same * reward).sum(1) / same.sum(1)
    assert_close(rloo(reward, group), torch.where(same.any(1), reward - others, 0))


@pytest.mark.parametrize("name", LOCAL)
def test_nan_stays_in_its_group(name: str) -> None:
    reward = torch.tensor([float("nan"), 1.0, 3.0, 2.0])
    got = GROUPED[name](reward, torch.tensor([1, 2, 2, 1]))
    assert got[[0, 3]].isnan().all()
    assert_close(got[1:3], GROUPED[name](reward[1:3], torch.tensor([2, 2])))


def test_ranks_count_the_smaller_ones_of_the_group() -> None:
    groups = Groups(torch.tensor([1, 0, 1, 1, 0, 1]))
    x = torch.tensor([5.0, 9.0, 2.0, 5.0, 1.0, 7.0])
    assert groups.rank(x).tolist() == [1, 1, 0, 1, 0, 3]


def test_groups_with_something_to_learn() -> None:
    reward = torch.tensor([0.1, 0.1, 0.1, 1.0, 0.0, 2.0])
    assert informative_groups(reward, torch.tensor([3, 3, 3, 1, 1, 9])).tolist() == [False] * 3 + [True] * 2 + [False]
    with pytest.raises(ValueError, match=r"reward has shape \(6,\) but group has shape \(5,\)"):
        informative_groups(reward, torch.zeros(5, dtype=torch.long))


def test_overlong_penalty_by_hand() -> None:
    """DAPO's own numbers: free up to 16384 tokens, whole at 20480."""
    lengths = torch.tensor([[0, 16384, 16385], [18432, 20480, 99999]])
    want = torch.tensor([[0, 0, -1 / 4096], [-0.5, -1, -1]])
    assert_close(overlong_penalty(lengths, 20480, 4096), want)


@pytest.mark.parametrize("cache_len", [0, 101])
def test_overlong_penalty_needs_room_to_grow(cache_len: int) -> None:
    with pytest.raises(ValueError, match=f"cache_len must be at least 1 and at most 100, got {cache_len}"):
        overlong_penalty(torch.tensor([1]), 100, cache_len)
