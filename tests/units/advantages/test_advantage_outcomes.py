"""Advantages of outcomes: by hand, in groups of several sizes with shuffled rows, and properties of all of them."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings, strategies as st
from tensordict import TensorDict
from torch import Tensor
from torch.testing import assert_close

from torchrl_llm_kl.advantages import (
    Advantage,
    advantage_spec,
    asymre,
    best_of_group,
    dr_grpo,
    gdpo,
    get_advantage,
    grpo,
    informative_groups,
    opmd,
    opo,
    overlong_penalty,
    pass_at_k,
    rec,
    reinforce,
    remax,
    rloo,
)
from torchrl_llm_kl.advantages._group import Groups

F64 = {"dtype": torch.float64}
# Group 7: rewards 1, 2, 6 (mean 3, variance 7 or 14/3); group -3: 4, 0 (mean 2, variance 8 or 4); 50: alone; 11: equal.
GROUP = torch.tensor([7, -3, 7, 50, -3, 7, 11, 11, 11])
REWARD = torch.tensor([1.0, 4.0, 2.0, 5.0, 0.0, 6.0, 0.1, 0.1, 0.1], **F64)
CENTRED = [-2.0, 2.0, -1.0, 0.0, -2.0, 3.0, 0.0, 0.0, 0.0]
ROOT_7, ROOT_8 = math.sqrt(7.0), math.sqrt(8.0)


def assert_values(got: Tensor, want: list[float]) -> None:
    assert got.dtype == torch.float64
    assert_close(got, torch.tensor(want, **F64))


def one_group(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.long)


def test_grpo_divides_by_the_unbiased_deviation_and_epsilon() -> None:
    sigma = {7: ROOT_7 + 0.5, -3: ROOT_8 + 0.5, 50: 1.0, 11: 1.0}
    want = [x / sigma[int(g)] for x, g in zip(CENTRED, GROUP, strict=True)]
    assert_values(grpo(REWARD, GROUP, epsilon=0.5), want)
    assert grpo(REWARD, GROUP)[0].item() == pytest.approx(-2 / (ROOT_7 + 1e-6), rel=1e-12)  # a millionth by default
    batch = statistics.stdev(REWARD.tolist()) + 0.25
    assert_values(grpo(REWARD, GROUP, epsilon=0.25, std="batch"), [x / batch for x in CENTRED])


def test_grpo_leaves_groups_below_the_threshold_out() -> None:
    kept = grpo(REWARD, GROUP, epsilon=0.0, std_threshold=ROOT_7 + 0.01)
    assert_values(kept, [0, 2 / ROOT_8, 0, 0, -2 / ROOT_8, 0, 0, 0, 0])
    # A deviation of just the threshold counts as below it: 0, 2, 4 has 2.
    three = torch.tensor([0.0, 2.0, 4.0], **F64)
    assert_values(grpo(three, one_group(3), epsilon=0.0, std_threshold=2.0), [0, 0, 0])
    assert_values(grpo(three, one_group(3), epsilon=0.0, std_threshold=1.99), [-1, 0, 1])
    # The batch's deviation does not matter.
    pairs, group = torch.tensor([0.0, 2.0, 0.0, 4.0], **F64), torch.tensor([0, 0, 1, 1])
    found = grpo(pairs, group, epsilon=0.0, std_threshold=math.sqrt(2.0) + 1e-12, std="batch")
    sigma = statistics.stdev(pairs.tolist())
    assert_values(found, [0, 0, -2 / sigma, 2 / sigma])
    assert_values(grpo(pairs, group, epsilon=0.0, std_threshold=1.4)[:2], [-1 / math.sqrt(2), 1 / math.sqrt(2)])


def test_grpo_rank_penalty_takes_most_from_the_most_likely() -> None:
    """Three successes: rewards 1, 0.6, 0.8 after the penalty; mean 0.8, deviation 0.2."""
    log_prob = torch.tensor([-3.0, -1.0, -2.0], **F64)
    got = grpo(torch.ones(3, **F64), one_group(3), mean_log_prob=log_prob, rank_penalty=0.6, epsilon=0.0)
    assert_values(got, [1.0, -1.0, 0.0])


def test_grpo_rank_penalty_is_of_the_group_and_ties_share_the_lower_rank() -> None:
    """Ranks 1, 1, 0 of three and 1, 0 of two; rewards 0.8, 0.8, 1 and 0.7 * 2, 0."""
    reward, log_prob = torch.tensor([[1.0, 2.0, 1.0, 1.0, 0.0], [-1.0, -5.0, -1.0, -2.0, -9.0]], **F64)
    group = torch.tensor([4, 5, 4, 4, 5])
    got = grpo(reward, group, mean_log_prob=log_prob, rank_penalty=0.6, epsilon=1.0)
    half, third = 0.7 / (0.7 * math.sqrt(2.0) + 1), 1 / 15 / (0.2 / math.sqrt(3.0) + 1)
    assert_values(got, [-third, half, -third, 2 * third, -half])


def test_ranks_count_the_smaller_ones_of_the_group_and_equal_ones_have_the_lowest() -> None:
    groups = Groups(torch.tensor([1, 0, 1, 1, 0, 1]))
    assert groups.rank(torch.tensor([5.0, 9.0, 2.0, 5.0, 1.0, 7.0])).tolist() == [1, 1, 0, 1, 0, 3]
    assert Groups(torch.tensor([0, 0, 0, 1, 1])).rank(torch.tensor([5.0, 5.0, 6.0, 2.0, 2.0])).tolist() == [
        0,
        0,
        2,
        0,
        0,
    ]


def test_dr_grpo() -> None:
    assert_values(dr_grpo(REWARD, GROUP), CENTRED)


def test_rloo() -> None:
    assert_values(rloo(REWARD, GROUP), [-3.0, 4.0, -1.5, 0.0, -4.0, 4.5, 0.0, 0.0, 0.0])


def test_reinforce_is_a_copy_of_the_reward() -> None:
    got = reinforce(REWARD)
    assert_values(got, REWARD.tolist())
    got += 1
    assert REWARD[0] == 1


def test_remax() -> None:
    assert_values(remax(REWARD[:3], torch.tensor([0.5, 5.0, -1.0], **F64)), [0.5, -1.0, 3.0])


def test_opmd_with_the_mean_and_with_the_soft_maximum() -> None:
    assert_values(opmd(REWARD, GROUP), CENTRED)  # the mean by default
    tau = 2.0
    a = tau * math.log((math.exp(0.5) + math.exp(1.0) + math.exp(3.0)) / 3)
    b = tau * math.log((math.exp(2.0) + 1) / 2)
    want = [1 - a, 4 - b, 2 - a, 0, -b, 6 - a, 0, 0, 0]
    assert_values(opmd(REWARD, GROUP, opmd_baseline="logavgexp", tau=tau), want)


def test_opmd_does_not_overflow() -> None:
    """With a small tau the baseline is the greatest reward less tau * log n."""
    reward = torch.tensor([1000.0, 0.0])
    got = opmd(reward, one_group(2), opmd_baseline="logavgexp", tau=0.1)
    assert_close(got, torch.tensor([0.1 * math.log(2), -1000 + 0.1 * math.log(2)]))


def test_asymre_lifts_whole_groups_but_not_a_row_alone() -> None:
    assert_values(asymre(REWARD, GROUP, baseline_shift=-0.25), [-1.75, 2.25, -0.75, 0.0, -1.75, 3.25, 0.25, 0.25, 0.25])
    assert_close(asymre(REWARD, GROUP)[0].item(), -1.9)


def test_rec() -> None:
    assert_values(rec(REWARD, GROUP), CENTRED)
    a, b = math.sqrt(14 / 3) + 0.5, 2.5
    want = [-2 / a, 2 / b, -1 / a, 0, -2 / b, 3 / a, 0, 0, 0]
    assert_values(rec(REWARD, GROUP, std_normalize=True, epsilon=0.5), want)


def test_rec_balance_drops_one_of_two_failures() -> None:
    """Of rewards 1, 2, 6 either the 1 or the 2 goes; then 4 or 3.5 is the mean. Nothing else changes."""
    without_1 = [0.0, 2.0, -2.0, 0.0, -2.0, 2.0, 0.0, 0.0, 0.0]
    without_2 = [-2.5, 2.0, 0.0, 0.0, -2.0, 2.5, 0.0, 0.0, 0.0]
    seen = set()
    for seed in range(20):
        got = rec(REWARD, GROUP, drop="balance", generator=torch.Generator().manual_seed(seed)).tolist()
        assert got in (without_1, without_2)
        seen.add(tuple(got))
    assert len(seen) == 2


def test_rec_balance_leaves_exactly_0_on_dropped_rows() -> None:
    """Two of the failures 0, 1, 2 go; the other one and the 9 are their mean's distance apart."""
    reward = torch.tensor([0.0, 1.0, 2.0, 9.0], **F64)
    for seed in range(10):
        got = rec(reward, one_group(4), drop="balance", generator=torch.Generator().manual_seed(seed))
        (kept,) = got[:3].nonzero().squeeze(-1).tolist()
        assert got[3] == (9 - reward[kept]) / 2 == -got[kept]


@pytest.mark.parametrize("reward", [[0.0, 0.0, 3.0, 1.0], [0.0, 0.0, 1.5, 0.9]])  # one at the mean of 1; one near it
def test_rec_drops_none_where_no_more_are_below_the_mean_than_not(reward: list[float]) -> None:
    rewards = torch.tensor(reward)
    assert_close(rec(rewards, one_group(4), drop="balance"), rewards - rewards.mean())


def test_rec_balance_is_repeated_by_its_generator_and_normalises_the_kept_rows() -> None:
    reward = torch.tensor([0.0] * 6 + [3.0, 3.0, 1.0], **F64)
    group = torch.tensor([0] * 8 + [1])

    def draw(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return rec(reward, group, drop="balance", std_normalize=True, epsilon=0.5, generator=generator)

    got = draw(3)
    assert_close(got, draw(3), rtol=0, atol=0)
    assert (got == 0).sum() == 5
    assert_close(got.sort().values, torch.tensor([-0.75, -0.75, 0, 0, 0, 0, 0, 0.75, 0.75], **F64))


def test_opo_weighs_rewards_by_length() -> None:
    """Group 7: (1 + 2 * 2 + 5 * 6) / 8; group -3: (3 * 4 + 1 * 0) / 4 = 3."""
    length = torch.tensor([1, 3, 2, 9, 1, 5, 2, 0, 8])
    b = 35 / 8
    assert_values(opo(REWARD, GROUP, length), [1 - b, 1.0, 2 - b, 0.0, -3.0, 6 - b, 0.0, 0.0, 0.0])
    # Without any token there is no weight.
    assert opo(REWARD, GROUP, torch.zeros_like(length)).isfinite().all()


def test_opo_is_the_baseline_of_least_variance_if_squared_norms_are_lengths() -> None:
    """The weighted mean of squared advantages has its minimum there: nothing near it is smaller."""
    length, reward = torch.tensor([[4.0, 1.0, 2.0, 7.0], [1.0, 0.0, 3.0, -2.0]], **F64)
    got = opo(reward, one_group(4), length)
    least = (length * got.square()).sum()
    for shift in (-1e-3, 1e-3):
        assert (length * (got + shift).square()).sum() > least


def test_pass_at_k_is_what_the_single_best_adds() -> None:
    assert_values(pass_at_k(REWARD, GROUP), [0, 4, 0, 0, 0, 4, 0, 0, 0])
    a, b = 4 / (ROOT_7 + 0.5), 4 / (ROOT_8 + 0.5)
    assert_values(pass_at_k(REWARD, GROUP, std_normalize=True, epsilon=0.5), [0, b, 0, 0, 0, a, 0, 0, 0])
    # Two best answers add nothing, and neither do the others.
    assert_values(pass_at_k(REWARD[[5, 5, 0]], one_group(3)), [0, 0, 0])


@pytest.mark.parametrize("k", [2, 3])
def test_pass_at_k_has_the_gradient_of_the_expected_best(k: int) -> None:
    """All groups of k of four answers, by their probability: E sum A grad log p = grad E max."""
    logits = torch.tensor([0.3, -0.5, 0.1, 0.9], dtype=torch.float64, requires_grad=True)
    reward = torch.tensor([1.0, 2.5, 0.0, 1.7], **F64)
    log_p = logits.log_softmax(0)
    best, surrogate = torch.zeros(()), torch.zeros(())
    for draw in itertools.product(range(4), repeat=k):
        row = torch.tensor(draw)
        p = log_p[row].sum().exp()
        best = best + p * reward[row].max()
        a = pass_at_k(reward[row], one_group(k))
        surrogate = surrogate + p.detach() * (a * log_p[row]).sum()
    (want,) = torch.autograd.grad(best, logits, retain_graph=True)
    (got,) = torch.autograd.grad(surrogate, logits)
    assert_close(got, want)
    assert want.abs().max() > 0.1


def test_gdpo_normalises_each_reward_by_itself() -> None:
    """Deviations 1 and 100 of the rewards of group 0; equal second rewards in group 1; 5 is alone."""
    rewards = torch.tensor([[1.0, 300.0], [4.0, 7.0], [2.0, 100.0], [3.0, 200.0], [6.0, 7.0], [9.0, 9.0]], **F64)
    group = torch.tensor([0, 1, 0, 0, 1, 5])
    first, second, pair = [-1.0, 0.0, 1.0], [1.0, -1.0, 0.0], 1 / math.sqrt(2.0)
    total = [first[0] + 0.5 * second[0], -pair, first[1] + 0.5 * second[1], first[2] + 0.5 * second[2], pair, 0.0]
    sigma = statistics.stdev(total)
    assert_values(gdpo(rewards, group, reward_weights=[1.0, 0.5], epsilon=0.0), [x / sigma for x in total])
    a, b, pair = 1 / 1.25, 100 / 100.25, 1 / (math.sqrt(2.0) + 0.25)
    total = [-a + b, -pair, -b, a, pair, 0.0]
    sigma = statistics.stdev(total) + 0.25
    assert_values(gdpo(rewards, group, epsilon=0.25), [x / sigma for x in total])


def test_gdpo_keeps_different_rewards_apart() -> None:
    """The paper's example: (0, 1) and (0, 2) of two rewards against (0, 0); their sums normalised once are the same."""
    rewards = torch.tensor([[0.0, 0.0], [0.0, 1.0], [0.0, 0.0], [1.0, 1.0]], **F64)
    group = torch.tensor([0, 0, 1, 1])
    got = gdpo(rewards, group, epsilon=0.0)
    assert got[3] == pytest.approx(2 * got[1].item())
    summed = grpo(rewards.sum(1), group, epsilon=0.0)
    assert summed[3] == pytest.approx(summed[1].item())


GROUPED: dict[str, Callable[..., Tensor]] = {
    "grpo": grpo,
    "grpo-batch": lambda r, g: grpo(r, g, std="batch"),
    "grpo-0": lambda r, g: grpo(r, g, epsilon=0.0),
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "opmd": opmd,
    "opmd-soft": lambda r, g: opmd(r, g, opmd_baseline="logavgexp", tau=0.7),
    "asymre": lambda r, g: asymre(r, g, baseline_shift=0.0),
    "rec": rec,
    "rec-std": lambda r, g: rec(r, g, std_normalize=True, epsilon=0.0),
    "rec-drop": lambda r, g: rec(r, g, drop="balance"),
    "opo": lambda r, g: opo(r, g, torch.full_like(g, 3)),
    "pass_at_k": pass_at_k,
    "pass_at_k-std": lambda r, g: pass_at_k(r, g, std_normalize=True, epsilon=0.0),
    "gdpo": lambda r, g: gdpo(torch.stack([r, -2 * r], 1), g, reward_weights=[3.0, 1.0]),
}


each = pytest.mark.parametrize("name", GROUPED)
# All but one that draws at random and two that read the whole batch depend on their group alone.
LOCAL = sorted(set(GROUPED) - {"rec-drop", "grpo-batch", "gdpo"})
TABLES = st.lists(st.tuples(st.integers(-3, 3), st.integers(-40, 40)), min_size=1, max_size=14)


@each
def test_equal_rewards_give_exactly_0_and_no_rows_no_advantages(name: str) -> None:
    for value, size in itertools.product([0.1, 1 / 3, -7.7, 1e6 + 0.1], [1, 3, 7, 100]):
        assert torch.equal(GROUPED[name](torch.full((size,), value), one_group(size)), torch.zeros(size)), (value, size)
    assert GROUPED[name](torch.zeros(0), one_group(0)).shape == (0,)


def columns(table: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    group, reward = zip(*table, strict=True)
    return torch.tensor(reward, **F64) / 8, torch.tensor(group)


@pytest.mark.parametrize("name", LOCAL)
@settings(max_examples=20, deadline=None)
@given(table=TABLES, seed=st.integers(0, 2**20))
def test_neither_order_nor_other_groups_matter(name: str, table: list[tuple[int, int]], seed: int) -> None:
    reward, group = columns(table)
    whole = GROUPED[name](reward, group)
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(seed))
    assert_close(GROUPED[name](reward[order], group[order]), whole[order])
    alone = group == group[0]
    assert_close(GROUPED[name](reward[alone], group[alone]), whole[alone])
    # Names of groups are only names.
    assert_close(GROUPED[name](reward, 1000 - 7 * group), whole)


@pytest.mark.parametrize("name", [*LOCAL, "grpo-batch", "gdpo"])
@settings(max_examples=20, deadline=None)
@given(table=TABLES)
def test_a_constant_on_all_rewards_changes_nothing(name: str, table: list[tuple[int, int]]) -> None:
    reward, group = columns(table)
    assert_close(GROUPED[name](reward + 16, group), GROUPED[name](reward, group))


@settings(max_examples=40, deadline=None)
@given(table=TABLES)
def test_rloo_leaves_one_out(table: list[tuple[int, int]]) -> None:
    reward, group = columns(table)
    same = (group[:, None] == group) & ~torch.eye(len(table), dtype=torch.bool)
    others = (same * reward).sum(1) / same.sum(1)
    assert_close(rloo(reward, group), torch.where(same.any(1), reward - others, 0))


@pytest.mark.parametrize("name", LOCAL)
def test_nan_stays_in_its_group(name: str) -> None:
    reward = torch.tensor([float("nan"), 1.0, 3.0, 2.0])
    got = GROUPED[name](reward, torch.tensor([1, 2, 2, 1]))
    assert got[[0, 3]].isnan().all()
    assert_close(got[1:3], GROUPED[name](reward[1:3], torch.tensor([2, 2])))


@each
def test_no_graph_float32_or_wider_and_nothing_mutated(name: str) -> None:
    reward, group = REWARD.clone().requires_grad_(), GROUP.clone()
    assert not GROUPED[name](reward, group).requires_grad
    assert torch.equal(reward, REWARD)
    assert torch.equal(group, GROUP)
    assert GROUPED[name](REWARD.half(), GROUP).dtype == torch.float32
    assert GROUPED[name](torch.tensor([1, 0]), torch.tensor([0, 0])).dtype == torch.float32


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: grpo(REWARD, GROUP, std="both"), "std must be one of 'group', 'batch', got 'both'"),
        (lambda: grpo(REWARD, GROUP, epsilon=-1e-6), "epsilon must be at least 0"),
        (lambda: grpo(REWARD, GROUP, std_threshold=-0.1), "std_threshold must be at least 0, got -0.1"),
        (lambda: grpo(REWARD, GROUP, rank_penalty=0.2), "grpo with rank_penalty needs mean_log_prob"),
        (lambda: grpo(REWARD, GROUP, rank_penalty=1.5, mean_log_prob=REWARD), "rank_penalty must be .* at most 1"),
        (
            lambda: advantage_spec(grpo).hyperparameters.translate({"duplicate_experiences": True}),
            "cannot add rows to it. Keep the rows of informative_",
        ),
        (lambda: opmd(REWARD, GROUP, opmd_baseline="median"), "opmd_baseline must be one of 'mean', 'logavgexp'"),
        (lambda: opmd(REWARD, GROUP, tau=0.3), "tau=0.3 has no effect on opmd_baseline='mean'"),
        (lambda: opmd(REWARD, GROUP, tau=0.0), "tau must be greater than 0, got 0.0"),
        (lambda: rec(REWARD, GROUP, drop="all"), "drop must be one of None, 'balance', got 'all'"),
        (lambda: rec(REWARD, GROUP, epsilon=-1.0), "epsilon must be at least 0"),
        (lambda: pass_at_k(REWARD, GROUP, epsilon=-1.0), "epsilon must be at least 0"),
        (lambda: gdpo(REWARD[:, None], GROUP, epsilon=-1.0), "epsilon must be at least 0"),
        (lambda: gdpo(REWARD[:, None], GROUP, reward_weights=[1.0, 2.0]), "2 weights for 1 rewards: pass one for each"),
        (lambda: overlong_penalty(GROUP, 100, 0), "cache_len must be at least 1 and at most 100, got 0"),
        (lambda: overlong_penalty(GROUP, 100, 101), "cache_len must be at least 1 and at most 100, got 101"),
        (lambda: informative_groups(REWARD, GROUP[:5]), r"reward has shape \(9,\) but group has shape \(5,\)"),
    ],
)
def test_hyper_parameters_out_of_range(call: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_defect_44_a_group_of_one_has_advantage_0() -> None:
    for name in ("grpo", "dr_grpo", "rloo", "opmd", "asymre", "rec", "pass_at_k"):
        function = get_advantage(name)
        alone = function(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([7, 1, 1]))
        assert alone[0] == 0, name
        assert alone[1:].isfinite().all(), name
        assert (alone[1:] != 0).any(), name


# ------------------------------------------------------------------ beside advantages


def test_best_of_group_with_ties_negative_rewards_and_a_group_of_one() -> None:
    reward = torch.tensor([-3.0, 0.5, -1.0, 0.5, -7.0, -1.0, -2.0])
    assert best_of_group(reward, torch.tensor([9, 2, 9, 2, 4, 9, 2])).tolist() == [0, 1, 1, 1, 1, 1, 0]
    # As a mask for a loss.
    rewards = torch.tensor([[1.0], [2.0], [0.0], [-1.0]])
    data = TensorDict(next=TensorDict(reward=rewards, batch_size=[4]), batch_size=[4])
    Advantage("best_of_group", group_size=2, keys={"advantage": "loss_mask"})(data)
    assert data["loss_mask"].squeeze(-1).tolist() == [0, 1, 1, 0]
    assert "advantage" not in data


def test_groups_with_something_to_learn() -> None:
    reward = torch.tensor([0.1, 0.1, 0.1, 1.0, 0.0, 2.0])
    assert informative_groups(reward, torch.tensor([3, 3, 3, 1, 1, 9])).tolist() == [False] * 3 + [True] * 2 + [False]


def test_overlong_penalty_by_hand() -> None:
    """DAPO's own numbers: free up to 16384 tokens, whole at 20480."""
    lengths = torch.tensor([[0, 16384, 16385], [18432, 20480, 99999]])
    assert_close(overlong_penalty(lengths, 20480, 4096), torch.tensor([[0, 0, -1 / 4096], [-0.5, -1, -1]]))
