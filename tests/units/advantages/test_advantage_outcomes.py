"""Advantages of outcomes and of trajectories: by hand, in groups with shuffled rows, and properties of all of them."""

import itertools
import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from tensordict import TensorDict, lazy_stack
from torch import Tensor
from torch.testing import assert_close

from refused import refused
from torchrl_llm_kl import advantages
from torchrl_llm_kl.advantages import Advantage, gdpo, gigpo, grpo, length_penalty, maxrl, opmd, opo, pass_at_k, rec
from torchrl_llm_kl.advantages._group import Groups

F64 = {"dtype": torch.float64}
# Group 7: rewards 1, 2, 6 (mean 3, variance 7 or 14/3); group -3: 4, 0 (mean 2, variance 8 or 4); 11: equal rewards.
# 50: a group of one, whose advantage is 0 (defect 44).
G = torch.tensor([7, -3, 7, 50, -3, 7, 11, 11, 11])
R = torch.tensor([1.0, 4.0, 2.0, 5.0, 0.0, 6.0, 0.1, 0.1, 0.1], **F64)
LENGTH = torch.tensor([1, 3, 2, 9, 1, 5, 2, 0, 8])
ROLE = torch.tensor([0, 4, 0, 1, 4, 1, 4, 4, 4])
CENTRED = [-2.0, 2.0, -1.0, 0.0, -2.0, 3.0, 0.0, 0.0, 0.0]
BEST = [0.0, 4.0, 0.0, 0.0, 0.0, 4.0, 0.0, 0.0, 0.0]
ROOT_2, ROOT_3, ROOT_7, ROOT_8, ROOT_14_3 = map(math.sqrt, (2.0, 3.0, 7.0, 8.0, 14 / 3))
STD = statistics.stdev(R.tolist())
PAIRS, OF_PAIRS = torch.tensor([0.0, 2.0, 0.0, 4.0], **F64), torch.tensor([0, 0, 1, 1])
SIX = torch.tensor([0, 1, 0, 0, 1, 5])
SEVERAL = torch.tensor([[1.0, 300.0], [4.0, 7.0], [2.0, 100.0], [3.0, 200.0], [6.0, 7.0], [9.0, 9.0]], **F64)


def f64(*values: float) -> Tensor:
    return torch.tensor(values, **F64)


def assert_values(got: Tensor, want: list[float], tolerance: float = 1e-12) -> None:
    assert got.dtype == torch.float64
    assert_close(got, torch.tensor(want, **F64), rtol=tolerance, atol=tolerance)


def one_group(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.long)


def scaled(values: list[float], of_7: float, of_3: float) -> list[float]:
    """The given values of group 7 and of group -3, each divided by its scale."""
    return [x / {7: of_7, -3: of_3}.get(int(g), 1.0) for x, g in zip(values, G, strict=True)]


def lifted(by: float) -> list[float]:
    """Every row except the group of one."""
    return [x + by * (i != 3) for i, x in enumerate(CENTRED)]


def over(total: list[float], epsilon: float = 0.0) -> list[float]:
    """Divided by the batch's standard deviation."""
    return [x / (statistics.stdev(total) + epsilon) for x in total]


def penalised(log_prob: list[float], reward: Any = (1.0, 1.0, 1.0), group: Any = (0, 0, 0), **hyper: float) -> Tensor:
    given = torch.tensor(reward, **F64), torch.tensor(group)
    return grpo(*given, mean_log_prob=torch.tensor(log_prob, **F64), rank_penalty=0.6, **hyper)


THREE = torch.tensor([0.0, 2.0, 4.0], **F64)
SOFTLY: dict[str, Any] = {"opmd_baseline": "logavgexp"}
SOFT = [2 * math.log((math.exp(0.5) + math.exp(1.0) + math.exp(3.0)) / 3), 2 * math.log((math.exp(2.0) + 1) / 2)]
NORMALISED: dict[str, Any] = {"std_normalize": True, "epsilon": 0.5}
(S, T), A, H = SOFT, 2 / ROOT_8, 1 / ROOT_2
HALF, THIRD = 0.7 / (0.7 * ROOT_2 + 1), 1 / 15 / (0.2 / ROOT_3 + 1)
LESS = 0.1 * math.log(2)
#: opo of group 7: (1 + 2 * 2 + 5 * 6) / 8, of -3: (3 * 4 + 1 * 0) / 4 = 3. gdpo: deviations 1 and 100 in group 0.
BASE, P, Q, PAIR = 35 / 8, 1 / 1.25, 100 / 100.25, 1 / (ROOT_2 + 0.25)
BY_HAND: dict[str, tuple[Callable[[], Tensor], list[float]]] = {
    "grpo": (lambda: grpo(R, G, epsilon=0.5), scaled(CENTRED, ROOT_7 + 0.5, ROOT_8 + 0.5)),
    "grpo, a millionth by default": (lambda: grpo(R, G), scaled(CENTRED, ROOT_7 + 1e-6, ROOT_8 + 1e-6)),
    "grpo of the batch": (lambda: grpo(R, G, epsilon=0.25, std="batch"), [x / (STD + 0.25) for x in CENTRED]),
    "grpo above a threshold": (lambda: grpo(R, G, epsilon=0.0, std_threshold=2.66), [0, A, 0, 0, -A, 0, 0, 0, 0]),
    "grpo at it": (lambda: grpo(THREE, one_group(3), epsilon=0.0, std_threshold=2.0), [0, 0, 0]),
    "grpo just above it": (lambda: grpo(THREE, one_group(3), epsilon=0.0, std_threshold=1.99), [-1, 0, 1]),
    "grpo, the batch's deviation is not compared": (
        lambda: grpo(PAIRS, OF_PAIRS, epsilon=0.0, std_threshold=ROOT_2 + 1e-12, std="batch"),
        [0, 0, *(x / statistics.stdev(PAIRS.tolist()) for x in (-2, 2))],
    ),
    # Three successes: rewards 1, 0.6, 0.8 after the penalty, which takes most from the most likely.
    "rank penalty": (lambda: penalised([-3.0, -1.0, -2.0], epsilon=0.0), [1.0, -1.0, 0.0]),
    # Ranks 1, 1, 0 of three and 1, 0 of two; rewards 0.8, 0.8, 1 and 0.7 * 2, 0.
    "rank penalty of groups with ties": (
        lambda: penalised([-1.0, -5.0, -1.0, -2.0, -9.0], (1.0, 2.0, 1.0, 1.0, 0.0), (4, 5, 4, 4, 5), epsilon=1.0),
        [-THIRD, HALF, -THIRD, 2 * THIRD, -HALF],
    ),
    "dr_grpo": (lambda: advantages.dr_grpo(R, G), CENTRED),
    "reinforce": (lambda: advantages.reinforce(R), R.tolist()),
    "rloo": (lambda: advantages.rloo(R, G), [-3.0, 4.0, -1.5, 0.0, -4.0, 4.5, 0.0, 0.0, 0.0]),
    "remax": (lambda: advantages.remax(R[:3], torch.tensor([0.5, 5.0, -1.0], **F64)), [0.5, -1.0, 3.0]),
    "opmd, the mean": (lambda: opmd(R, G), CENTRED),
    "opmd, the soft maximum": (lambda: opmd(R, G, **SOFTLY, tau=2.0), [1 - S, 4 - T, 2 - S, 0, -T, 6 - S, 0, 0, 0]),
    # With a small tau the baseline is the greatest reward less tau * log n.
    "opmd does not overflow": (lambda: opmd(f64(1e3, 0.0), one_group(2), **SOFTLY, tau=0.1), [LESS, LESS - 1e3]),
    "asymre": (lambda: advantages.asymre(R, G, baseline_shift=-0.25), lifted(0.25)),
    "asymre by default": (lambda: advantages.asymre(R, G), lifted(0.1)),
    "rec": (lambda: rec(R, G), CENTRED),
    "rec, normalised": (lambda: rec(R, G, **NORMALISED), scaled(CENTRED, ROOT_14_3 + 0.5, 2.5)),
    # No more rewards lie below the mean than at or above it: one at the mean of 1, one near it.
    "rec drops none": (lambda: rec(torch.tensor([0, 0, 3, 1], **F64), one_group(4), drop="balance"), [-1, -1, 2, 0]),
    "rec drops none near": (lambda: rec(f64(0, 0, 1.5, 0.9), one_group(4), drop="balance"), [-0.6, -0.6, 0.9, 0.3]),
    "maxrl": (lambda: maxrl(R, G), scaled(CENTRED, 3.0, 2.0)),
    "maxrl, no mean above 0": (lambda: maxrl(torch.tensor([-1.0, 1.0, -3.0, 0.0], **F64), OF_PAIRS), [0, 0, 0, 0]),
    # Group 7: 1 and 2 of role 0, 6 alone in role 1.
    "hierarchical_grpo": (lambda: advantages.hierarchical_grpo(R, G, ROLE), [-0.5, 2, 0.5, 0, -2, 0, 0, 0, 0]),
    "opo": (lambda: opo(R, G, LENGTH), [1 - BASE, 1.0, 2 - BASE, 0.0, -3.0, 6 - BASE, 0.0, 0.0, 0.0]),
    "opo, no tokens": (lambda: opo(R, G, 0 * LENGTH), [0, 4, 1, 0, 0, 5, 0, 0, 0]),  # relative to the least reward
    "pass_at_k": (lambda: pass_at_k(R, G), BEST),
    "pass_at_k, normalised": (lambda: pass_at_k(R, G, **NORMALISED), scaled(BEST, ROOT_7 + 0.5, ROOT_8 + 0.5)),
    "pass_at_k of two best": (lambda: pass_at_k(R[[5, 5, 0]], one_group(3)), [0, 0, 0]),
    # Each reward separately; group 1 has equal second rewards; group 5 has one row.
    "gdpo, weighted": (lambda: gdpo(SEVERAL, SIX, reward_weights=[1, 0.5], epsilon=0), over([-0.5, -H, -0.5, 1, H, 0])),
    "gdpo": (lambda: gdpo(SEVERAL, SIX, epsilon=0.25), over([Q - P, -PAIR, -Q, P, PAIR, 0.0], 0.25)),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name: str) -> None:
    (call, want), reward = BY_HAND[name], R.clone()
    got = call()
    assert_values(got, want, 1e-7 if "ties" in name else 1e-12)  # thirds of float32 precision
    got += 1
    assert torch.equal(R, reward), "a result is no view of the rewards"


def test_a_rank_is_the_number_of_smaller_values_in_the_group() -> None:
    groups = Groups(torch.tensor([1, 0, 1, 1, 0, 1]))
    assert groups.rank(torch.tensor([5.0, 9.0, 2.0, 5.0, 1.0, 7.0])).tolist() == [1, 1, 0, 1, 0, 3]
    groups = Groups(torch.tensor([0, 0, 0, 1, 1]))
    assert groups.rank(torch.tensor([5.0, 5.0, 6.0, 2.0, 2.0])).tolist() == [0, 0, 2, 0, 0]


def test_rec_balance_drops_failures_whose_advantage_is_then_0() -> None:
    """Rewards 1, 2, 6: the 1 or the 2 is dropped, so the mean is 4 or 3.5. Nothing else changes."""
    without_1 = [0.0, 2.0, -2.0, 0.0, -2.0, 2.0, 0.0, 0.0, 0.0]
    without_2 = [-2.5, 2.0, 0.0, 0.0, -2.0, 2.5, 0.0, 0.0, 0.0]
    # Two of the failures 0, 1, 2 go; the other one and the 9 are their mean's distance apart.
    four, seen = torch.tensor([0.0, 1.0, 2.0, 9.0], **F64), set()
    for seed in range(20):
        rng = torch.Generator().manual_seed(seed)
        got = rec(R, G, drop="balance", generator=rng).tolist()
        assert got in (without_1, without_2)
        seen.add(tuple(got))
        got = rec(four, one_group(4), drop="balance", generator=rng)
        (kept,) = got[:3].nonzero().squeeze(-1).tolist()
        assert got[3] == (9 - four[kept]) / 2 == -got[kept]
    assert len(seen) == 2


def test_rec_balance_is_repeated_by_its_generator_and_normalises_the_kept_rows() -> None:
    reward, group = torch.tensor([0.0] * 6 + [3.0, 3.0, 1.0], **F64), torch.tensor([0] * 8 + [1])
    hyper: dict[str, Any] = {"drop": "balance", "std_normalize": True, "epsilon": 0.5}
    got, again = (rec(reward, group, **hyper, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(got, again)
    assert_values(got.sort().values, [-0.75, -0.75, 0, 0, 0, 0, 0, 0.75, 0.75])


@pytest.mark.parametrize(("name", "size"), [("maxrl", 2), ("maxrl", 4), ("pass_at_k", 2), ("pass_at_k", 3)])
def test_the_gradient_averaged_over_all_possible_groups(name: str, size: int) -> None:
    """``E sum A grad log p`` is the gradient of ``-size * sum_k (1 - p)^k / k``, k < size, or of the expected maximum."""
    reward = f64(1.0, 1.0, 0.0) if name == "maxrl" else f64(1.0, 2.5, 0.0, 1.7)
    logits = f64(0.3, -0.5, 0.9, 0.1)[: len(reward)].requires_grad_()
    log_p, best, surrogate = logits.log_softmax(0), torch.zeros(()), torch.zeros(())
    for draw in itertools.product(range(len(reward)), repeat=size):
        row = torch.tensor(draw)
        p, advantage = log_p[row].sum().exp(), advantages.get_advantage(name)(reward[row], one_group(size))
        best = best + p * reward[row].max()
        surrogate = surrogate + p.detach() * (advantage * log_p[row]).sum()
    truncated_logarithm = -size * sum(log_p[2].exp() ** k / k for k in range(1, size))
    (want,) = torch.autograd.grad(truncated_logarithm if name == "maxrl" else best, logits, retain_graph=True)
    assert_close(torch.autograd.grad(surrogate, logits)[0], want)
    assert want.abs().max() > 0.1


def test_rae_subtracts_the_moving_average_of_earlier_rewards() -> None:
    """Role 3: 0.5, then (0.5 + 2) / 2, then (1.25 + 4) / 2; role 8: -2, then (-2 + 0) / 2."""
    reward, role = torch.tensor([2.0, 0.0, 4.0], **F64), torch.tensor([3, 8, 3])
    got, after = advantages.rae(reward, role, torch.tensor([0.5, -2.0, 0.5], **F64), decay=0.5)
    assert_values(got, [1.5, 2.0, 2.75])
    assert_values(after, [2.625, -1.0, 2.625])
    # Only the latest reward counts.
    got, after = advantages.rae(reward, role, torch.tensor([0.5, -2.0, 0.5], **F64), decay=0.0)
    assert_values(torch.cat([got, after]), [1.5, 2.0, 2.0, 4.0, 0.0, 4.0])
    spoilt = advantages.rae(torch.tensor([math.nan, 0.0, 4.0]), role, torch.zeros(3))[0]
    assert spoilt[[0, 2]].isnan().all()
    assert spoilt[1] == 0


@pytest.mark.parametrize("names", [torch.tensor([3, 8, 3]), ["a", "b", "a"]], ids=["integers", "strings"])
def test_the_averages_of_rae_go_from_batch_to_batch_and_into_a_checkpoint(names: Any) -> None:
    data = TensorDict(reward=torch.tensor([[2.0], [0.0], [4.0]]), batch_size=[3])
    if isinstance(names, list):
        data = lazy_stack([row.clone().set_non_tensor("role", name) for row, name in zip(data, names, strict=True)])
    else:
        data["role"] = names
    first = Advantage("rae", decay=0.5)
    assert first(data.clone())["advantage"].flatten().tolist() == [2.0, 0.0, 3.0]
    second = Advantage("rae", decay=0.5)
    second.load_state_dict(first.state_dict())
    for transform in (first, second):
        assert transform(data.clone())["advantage"].flatten().tolist() == [-0.5, 0.0, 1.75]
    assert not list(Advantage("grpo").state_dict())


@pytest.mark.parametrize("how", [{"group_size": 4}, {"group_key": "query"}], ids=["size", "key"])
def test_roles_of_a_group_may_have_other_prompts(how: dict[str, Any], recwarn: pytest.WarningsRecorder) -> None:
    tokens = TensorDict(full=torch.tensor([[1, 5], [1, 5], [2, 5], [2, 5]]), batch_size=[4])
    tokens["prompt"] = tokens["full"][:, :1]
    data = TensorDict(tokens=tokens, role=torch.tensor([0, 0, 1, 1]), query=torch.zeros(4).long(), batch_size=[4])
    data["reward"] = torch.tensor([[1.0], [0.0], [5.0], [7.0]])
    got = Advantage("hierarchical_grpo", **how)(data)["advantage"]
    assert got.flatten().tolist() == [0.5, -0.5, -1.0, 1.0]
    assert not recwarn.list


# ------------------------------------------------------------------ trajectories
# task, run, step, reward, state. Runs count from 0 in each task; steps need not be consecutive.
ROWS = [(0, 0, 2, 4.0, 1), (1, 1, 0, 6.0, 1), (0, 1, 0, 1.0, 1), (0, 0, 0, 8.0, 1), (1, 0, 5, 0.0, 2)]
ROWS += [(0, 0, 1, 2.0, 3), (1, 0, 1, 3.0, 1), (2, 0, 0, 7.0, 1), (0, 2, 0, 1.0, 3)]
TASK, RUN, STEP, _, STATE = (torch.tensor(column) for column in zip(*ROWS, strict=True))
STEPS = (torch.tensor([row[3] for row in ROWS], **F64), TASK, RUN, STEP)


def by_task(of: dict[str, float], **hyper: Any) -> None:
    """Values of runs, which are named by task and run, such as ``"00"``."""
    assert_values(advantages.step_wise_grpo(*STEPS, **hyper), [of.get(f"{t}{r}", 0.0) for t, r, *_ in ROWS])


def test_step_wise_grpo_compares_the_last_rewards_of_runs() -> None:
    """Task 0: 4, 1, 1 (mean 2, variance 3); task 1: 0 and 6 (mean 3, variance 18); task 2 has one run."""
    a, b = ROOT_3 + 0.5, math.sqrt(18.0) + 0.5
    by_task({"00": 2 / a, "01": -1 / a, "02": -1 / a, "10": -3 / b, "11": 3 / b}, epsilon=0.5)
    shared = {"00": 2 / a / 3, "01": -1 / a, "02": -1 / a, "10": -3 / b / 2, "11": 3 / b}
    by_task(shared, epsilon=0.5, enable_step_norm=True)
    # Over the batch each trajectory counts once: 4, 1, 1, 0, 6, 7 have mean 19/6 and variance (103 - 361/6) / 5.
    sigma = math.sqrt((103 - 361 / 6) / 5) + 0.25
    centred = {"00": 2 / sigma, "01": -1 / sigma, "02": -1 / sigma, "10": -3 / sigma, "11": 3 / sigma}
    by_task(centred, epsilon=0.25, std="batch")
    by_task({"10": -3 / math.sqrt(18.0), "11": 3 / math.sqrt(18.0)}, epsilon=0.0, std_threshold=2.0)


def test_gigpo_also_compares_steps_from_the_same_state() -> None:
    """gamma 0.5. Task 0: sums 14, 1, 1 (mean 16/3); returns 8 + 1 + 1 = 10, 2 + 2 = 4, 4; 1; 1.

    State 1 of task 0: 10, 4 and 1 (mean 5); state 3: 4 and 1 (mean 2.5). Task 1: sums 3 and 6; state 1: 3 and 6.
    Deviations of 14, 1, 1 are 13 / sqrt(3), of 10, 4, 1 sqrt(21), of 4, 1 and 3, 6 are 3 / sqrt(2).
    """
    sigmas = 13 / ROOT_3 + 0.5, 3 / ROOT_2 + 0.5, math.sqrt(21.0) + 0.5
    for omega, hyper, (a, b, c) in ((0.25, {}, (1, 1, 1)), (2.0, {"fnorm": "std", "epsilon": 0.5}, sigmas)):
        episode = [26 / 3 / a, 1.5 / b, -13 / 3 / a, 26 / 3 / a, -1.5 / b, 26 / 3 / a, -1.5 / b, 0, -13 / 3 / a]
        anchored = [-1.0 / c, 1.5 / b, -4.0 / c, 5.0 / c, 0.0, 1.5 / b, -1.5 / b, 0.0, -1.5 / b]
        got = gigpo(*STEPS, STATE, omega=omega, gamma=0.5, **hyper)
        assert_values(got, [e + omega * s for e, s in zip(episode, anchored, strict=True)])
    apart = torch.arange(len(ROWS))  # no state occurs twice, so only the episode's part remains
    assert_close(gigpo(*STEPS, apart), gigpo(*STEPS, STATE, omega=0.0))


STEP_WISE = advantages.step_wise_grpo
CALLS = {"step_wise_grpo": lambda *rows: STEP_WISE(*rows[:4]), "gigpo": lambda *rows: gigpo(*rows, gamma=0.9)}


@pytest.mark.parametrize("name", CALLS)
def test_properties_of_trajectory_advantages(name: str) -> None:
    table = (*STEPS, STATE)
    whole = CALLS[name](*table)
    order = torch.randperm(len(ROWS), generator=torch.Generator().manual_seed(1))
    assert_close(CALLS[name](*(x[order] for x in table)), whole[order])
    for task in range(3):
        own = task == TASK
        assert_close(CALLS[name](*(x[own] for x in table)), whole[own])
    run, step = torch.arange(3).repeat_interleave(2), torch.arange(2).repeat(3)
    equal = torch.tensor([0.1, 0.7] * 3), torch.zeros_like(run), run, step, step
    assert torch.equal(CALLS[name](*equal), torch.zeros(6))
    assert CALLS[name](*(x[:0] for x in equal)).shape == (0,)
    twice, zeros = STEP.index_fill(0, torch.tensor(5), 2), one_group(3)
    for rows in ((*STEPS[:3], twice, STATE), (torch.zeros(3), zeros, zeros, torch.tensor([4, 4, 5]), zeros)):
        with pytest.raises(ValueError, match="Two rows are the same step of a trajectory"):
            CALLS[name](*rows)


# ------------------------------------------------------------------ properties
GROUPED: dict[str, Callable[..., Tensor]] = {
    "grpo": grpo,
    "grpo-batch": lambda r, g: grpo(r, g, std="batch"),
    "grpo-0": lambda r, g: grpo(r, g, epsilon=0.0),
    "dr_grpo": advantages.dr_grpo,
    "rloo": advantages.rloo,
    "opmd": opmd,
    "opmd-soft": lambda r, g: opmd(r, g, opmd_baseline="logavgexp", tau=0.7),
    "asymre": lambda r, g: advantages.asymre(r, g, baseline_shift=0.0),
    "rec": rec,
    "rec-std": lambda r, g: rec(r, g, std_normalize=True, epsilon=0.0),
    "rec-drop": lambda r, g: rec(r, g, drop="balance"),
    "opo": lambda r, g: opo(r, g, torch.full_like(g, 3)),
    "pass_at_k": pass_at_k,
    "pass_at_k-std": lambda r, g: pass_at_k(r, g, std_normalize=True, epsilon=0.0),
    "gdpo": lambda r, g: gdpo(torch.stack([r, -2 * r], 1), g, reward_weights=[3.0, 1.0]),
}
# All depend only on their own group, except one that draws at random and two that read the whole batch.
LOCAL = sorted(set(GROUPED) - {"rec-drop", "grpo-batch", "gdpo"})
TABLES = st.lists(st.tuples(st.integers(-3, 3), st.integers(-40, 40)), min_size=1, max_size=14)


@pytest.mark.parametrize("name", [*GROUPED, "maxrl"])
def test_equal_rewards_empty_batches_dtypes_and_graphs(name: str) -> None:
    """Equal rewards give exactly 0; results are float32 or wider, without a graph; inputs stay as they were."""
    function = GROUPED.get(name, maxrl)
    for value, size in itertools.product([0.1, 1 / 3, -7.7, 1e6 + 0.1], [1, 3, 7, 100]):
        assert torch.equal(function(torch.full((size,), value), one_group(size)), torch.zeros(size)), (value, size)
    assert function(torch.zeros(0), one_group(0)).shape == (0,)
    reward, group = R.clone().requires_grad_(), G.clone()
    assert not function(reward, group).requires_grad
    assert torch.equal(reward, R)
    assert torch.equal(group, G)
    assert function(R.half(), G).dtype == torch.float32
    assert function(torch.tensor([1, 0]), torch.tensor([0, 0])).dtype == torch.float32


def columns(table: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    group, reward = zip(*table, strict=True)
    return torch.tensor(reward, **F64) / 8, torch.tensor(group)


@pytest.mark.parametrize("name", [*LOCAL, "grpo-batch", "gdpo"])
@settings(max_examples=20, deadline=None)
@given(table=TABLES, seed=st.integers(0, 2**20))
def test_shifts_order_and_other_groups_do_not_matter(name: str, table: Any, seed: int) -> None:
    reward, group = columns(table)
    whole = GROUPED[name](reward, group)
    assert_close(GROUPED[name](reward + 16, group), whole)
    if name not in LOCAL:
        return
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(seed))
    assert_close(GROUPED[name](reward[order], group[order]), whole[order])
    alone = group == group[0]
    assert_close(GROUPED[name](reward[alone], group[alone]), whole[alone])
    assert_close(GROUPED[name](reward, 1000 - 7 * group), whole)  # group ids are only labels
    spoilt = torch.where(alone, torch.nan, reward)  # nor does NaN in another group
    assert GROUPED[name](spoilt, group)[alone].isnan().all() or alone.sum() == 1
    assert_close(GROUPED[name](spoilt, group)[~alone], whole[~alone])


test_hyper_parameters_out_of_range = refused(
    lambda call: call(),
    (lambda: grpo(R, G, std_threshold=-0.1), "std_threshold must be at least 0, got -0.1"),
    (lambda: grpo(R, G, rank_penalty=0.2), "grpo with rank_penalty needs mean_log_prob"),
    (lambda: opmd(R, G, tau=0.3), "tau=0.3 has no effect with opmd_baseline='mean'"),
    (lambda: gdpo(R[:, None], G, reward_weights=[1.0, 2.0]), "argument 2 is shorter"),
    (lambda: length_penalty(R, G, R[:, None]), "argument 2 is shorter"),
    (lambda: advantages.truncation_penalty(R, R > 1, factor=-0.5), "factor must be at least 0 and at most 1"),
    (lambda: advantages.soft_value(R, G, beta=0.0), "beta must be greater than 0"),
    (lambda: advantages.overlong_penalty(G, 100, 101), "cache_len must be at least 1 and at most 100, got 101"),
    (lambda: advantages.informative_groups(R, G[:5]), r"reward has shape \(9,\) but group has shape \(5,\)"),
)


# ------------------------------------------------------------------ masks and penalties
def test_best_of_group_with_ties_negative_rewards_and_a_group_of_one() -> None:
    reward = torch.tensor([-3.0, 0.5, -1.0, 0.5, -7.0, -1.0, -2.0])
    assert advantages.best_of_group(reward, torch.tensor([9, 2, 9, 2, 4, 9, 2])).tolist() == [0, 1, 1, 1, 1, 1, 0]
    # Used as a mask in a loss.
    data = TensorDict(reward=torch.tensor([[1.0], [2.0], [0.0], [-1.0]]), batch_size=[4])
    Advantage("best_of_group", group_size=2, keys={"advantage": "loss_mask"})(data)
    assert data["loss_mask"].squeeze(-1).tolist() == [0, 1, 1, 0]
    assert "advantage" not in data


def test_groups_with_something_to_learn_and_penalties_by_hand() -> None:
    """DAPO's own numbers: no penalty up to 16384 tokens, the full one at 20480."""
    reward = torch.tensor([0.1, 0.1, 0.1, 1.0, 0.0, 2.0])
    informative = advantages.informative_groups(reward, torch.tensor([3, 3, 3, 1, 1, 9]))
    assert informative.tolist() == [False] * 3 + [True] * 2 + [False]
    lengths = torch.tensor([[0, 16384, 16385], [18432, 20480, 99999]])
    assert_close(advantages.overlong_penalty(lengths, 20480, 4096), torch.tensor([[0, 0, -1 / 4096], [-0.5, -1, -1]]))
    # Group 0 has the mean 2, maxima 40 and 5; group 1 has no reward, and so no penalty; no count of one kind at all.
    reward, group = torch.tensor([1.0, 0.0, 3.0, 0.0], **F64), torch.tensor([0, 1, 0, 1])
    counts = torch.tensor([[10, 5, 0], [30, 1, 0], [40, 1, 0], [1, 1, 0]])
    got = length_penalty(reward, group, counts, weights=[0.5, 0.25, 9.0])
    assert_values(got, [-2 * (0.125 + 0.25), 0.0, -2 * (0.5 + 0.05), 0.0], 1e-7)  # counts are float32
    assert_values(length_penalty(reward, group, counts), [-2 * (0.0625 + 0.1), 0.0, -2 * (0.25 + 0.02), 0.0], 1e-7)
    assert_values(advantages.truncation_penalty(reward, reward == 3, factor=0.25), [0, 0, -2.25, 0])
    assert_close(advantages.soft_value(R, G, beta=2.0)[:2], torch.tensor(SOFT, **F64))
    assert advantages.soft_value(torch.tensor([1e4, 0.0]), torch.zeros(2).long(), beta=0.1).isfinite().all()
