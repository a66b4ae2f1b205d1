"""A sharded reference follows a sharded policy, and a coefficient that holds a target is the same on all ranks."""

import math

import pytest

from torchrl_llm_kl.estimators import DualKLCoefficient, PIKLCoefficient

FOLLOW = COEFFICIENTS = "distributed.following"
ALIKE = ["fsdp2, kept after forward", "loss(DDP)", "fsdp2", "fsdp1, original parameters", "fsdp1, flat parameters"]
WHOLE = ["fsdp2", "loss(DDP)", "fsdp2, kept after forward"]


@pytest.mark.parametrize(
    ("wrap", "whole"),
    [
        pytest.param(wrap, whole, marks=() if wrap in quick else pytest.mark.slow)
        for whole, wraps, quick in [(False, ALIKE, ALIKE[1:4]), (True, WHOLE, WHOLE[:1])]
        for wrap in wraps
    ],
)
def test_a_reference_follows_the_policy(pool, wrap, whole):
    """The reference is sharded alike, or whole on each rank; its cached scores are of the new weights."""
    for weights, scores, after_reset in pool.run(f"{FOLLOW}:follow", wrap=wrap, whole=whole):
        assert weights < 1e-12
        assert scores < 1e-12
        assert after_reset == 0 if not whole else after_reset < 1e-12


def test_an_adapter_follows_the_policy(pool):
    for weights, scores, after_reset in pool.run(f"{FOLLOW}:follow", wrap="fsdp2", lora=True):
        assert weights < 1e-12
        assert scores < 1e-12
        assert after_reset == 0


@pytest.mark.parametrize(
    ("wrap", "match"), [("fsdp1, original parameters", "has shape"), ("fsdp1, flat parameters", "no counterpart")]
)
def test_a_whole_reference_cannot_follow_fsdp1(pool, wrap, match):
    for message in pool.run(f"{FOLLOW}:refuse", wrap=wrap):
        assert match in message


def test_a_change_on_one_rank_clears_the_cache_of_all(pool):
    assert max(pool.run(f"{FOLLOW}:change_one_shard")) < 1e-12


#: Each update's (KL, samples) of each rank, and the mean over all samples.
MEASURED = [[(0.2, 2), (0.4, 6), (math.nan, 0)], [(0.6, 5), (0.9, 1), (0.3, 4)], [(1.0, 1), (0.5, 1), (0.6, 2)]]
MEANS = [0.35, 0.51, 0.675]


@pytest.mark.parametrize(("kind", "tensors"), [("pi", True), ("pi", False), ("dual", True)])
def test_all_ranks_hold_what_one_process_does(pool, kind, tensors):
    kinds = {"pi": (PIKLCoefficient, {"smoothing": 0.5}), "dual": (DualKLCoefficient, {})}
    one = kinds[kind][0](0.2, 0.5, warmup=1, **kinds[kind][1])
    for mean in MEANS:
        one.update(mean, 10)
    want = {name: float(buffer) for name, buffer in one.state_dict().items()}
    states = pool.run(f"{COEFFICIENTS}:updated", ranks=3, kind=kind, measured=MEASURED, tensors=tensors)
    assert states[0] == states[1] == states[2], "to the last bit"
    assert states[0] == pytest.approx(want, rel=1e-6)


def test_a_kl_that_is_already_that_of_all_ranks(pool):
    apart = [[(0.3, 1), (0.9, 1)]]
    states = pool.run(f"{COEFFICIENTS}:updated", kind="dual", measured=apart, all_ranks=False)
    assert [state["average"] for state in states] == pytest.approx([0.3, 0.9])
    same = pool.run(f"{COEFFICIENTS}:updated", kind="dual", measured=[[(0.6, 64), (0.6, 64)]])
    assert same[0]["average"] == same[1]["average"] == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("kls", "n", "own", "others"),
    [
        ([0.5, math.nan], [1, 1], "current_kl is nan", "current_kl of another rank is not finite"),
        ([0.5, 0.5], [1, -1], "n is -1", "current_kl of another rank is not finite, or its n is negative"),
    ],
)
def test_a_bad_number_on_one_rank_raises_on_all(pool, kls, n, own, others):
    (first, untouched), (second, state) = pool.run(f"{COEFFICIENTS}:refused", kind="pi", kls=kls, n=n)
    assert others in first
    assert own in second
    assert untouched == state
    assert state["mass"] == 0


def test_a_bad_tensor_on_one_rank_changes_none(pool):
    states = pool.run(f"{COEFFICIENTS}:updated", kind="pi", measured=[[(0.5, 1), (math.inf, 1)]])
    assert [state["mass"] for state in states] == [0, 0]


def test_a_group_of_ranks(pool):
    found = pool.run(f"{COEFFICIENTS}:of_a_group", ranks=3, kind="pi")
    assert found[:2] == pytest.approx([0.35, 0.35])
