"""A coefficient that holds a target is the same on all ranks: that of one process with all samples."""

from __future__ import annotations

import math

import pytest

from torchrl_llm_kl.estimators import DualKLCoefficient, PIKLCoefficient

WHERE = "distributed.coefficients"
#: Each update's (KL, samples) of each rank, and the mean over all samples.
MEASURED = [[(0.2, 2), (0.4, 6), (math.nan, 0)], [(0.6, 5), (0.9, 1), (0.3, 4)], [(1.0, 1), (0.5, 1), (0.6, 2)]]
MEANS = [0.35, 0.51, 0.675]


@pytest.mark.parametrize("tensors", [True, False])
@pytest.mark.parametrize("kind", ["pi", "dual"])
def test_all_ranks_hold_what_one_process_does(pool, kind, tensors):
    one = {
        "pi": PIKLCoefficient(0.2, 0.5, smoothing=0.5, warmup=1),
        "dual": DualKLCoefficient(0.2, 0.5, warmup=1),
    }[kind]
    for mean in MEANS:
        one.update(mean, 10)
    want = {name: float(buffer) for name, buffer in one.state_dict().items()}
    states = pool.run(f"{WHERE}:updated", ranks=3, kind=kind, measured=MEASURED, tensors=tensors)
    assert states[0] == states[1] == states[2], "to the last bit"
    assert states[0] == pytest.approx(want, rel=1e-6)


def test_a_kl_that_is_already_that_of_all_ranks(pool):
    apart = [[(0.3, 1), (0.9, 1)]]
    states = pool.run(f"{WHERE}:updated", kind="dual", measured=apart, all_ranks=False)
    assert [state["average"] for state in states] == pytest.approx([0.3, 0.9])
    same = pool.run(f"{WHERE}:updated", kind="dual", measured=[[(0.6, 64), (0.6, 64)]])
    assert same[0]["average"] == same[1]["average"] == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("kls", "n", "own", "others"),
    [
        ([0.5, math.nan], [1, 1], "current_kl is nan", "current_kl of another rank is not finite"),
        ([0.5, 0.5], [1, -1], "n is -1", "current_kl of another rank is not finite, or its n is negative"),
    ],
)
def test_a_bad_number_on_one_rank_raises_on_all(pool, kls, n, own, others):
    (first, untouched), (second, state) = pool.run(f"{WHERE}:refused", kind="pi", kls=kls, n=n)
    assert others in first
    assert own in second
    assert untouched == state
    assert state["mass"] == 0


def test_a_bad_tensor_on_one_rank_changes_none(pool):
    states = pool.run(f"{WHERE}:updated", kind="pi", measured=[[(0.5, 1), (math.inf, 1)]])
    assert [state["mass"] for state in states] == [0, 0]


def test_a_group_of_ranks(pool):
    found = pool.run(f"{WHERE}:of_a_group", ranks=3, kind="pi")
    assert found[:2] == pytest.approx([0.35, 0.35])
