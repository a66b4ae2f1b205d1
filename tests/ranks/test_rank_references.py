"""A sharded reference follows a sharded policy, and a coefficient that holds a target is the same on all ranks."""

import math

import pytest

from torchrl_llm_kl.estimators import DualKLCoefficient, PIKLCoefficient

CASES = "distributed.following"
ALIKE = ["fsdp2, kept after forward", "loss(DDP)", "fsdp2", "fsdp1, original parameters", "fsdp1, flat parameters"]
WHOLE = ["fsdp2", "loss(DDP)", "fsdp2, kept after forward"]


@pytest.mark.parametrize(
    ("wrap", "options"),
    [
        pytest.param(wrap, options, marks=() if wrap in quick else pytest.mark.slow)
        for options, wraps, quick in [
            ({}, ALIKE, ALIKE[1:4]),
            ({"whole": True}, WHOLE, WHOLE[:1]),
            ({"lora": True}, ["fsdp2"], ["fsdp2"]),
        ]
        for wrap in wraps
    ],
)
def test_a_reference_follows_the_policy(pool, wrap, options):
    """Sharded alike, or whole on each rank, or an adapter; cached scores of the reference are of the new weights."""
    for weights, scores, after_reset in pool.run(f"{CASES}:follow", wrap=wrap, **options):
        assert max(weights, scores) < 1e-12
        assert after_reset < 1e-12 if "whole" in options else after_reset == 0


@pytest.mark.parametrize(
    ("wrap", "match"), [("fsdp1, original parameters", "has shape"), ("fsdp1, flat parameters", "no counterpart")]
)
def test_a_whole_reference_cannot_follow_fsdp1(pool, wrap, match):
    for message in pool.run(f"{CASES}:refuse", wrap=wrap):
        assert match in message


def test_a_change_on_one_rank_clears_the_cache_of_all(pool):
    assert max(pool.run(f"{CASES}:change_one_shard")) < 1e-12


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
    states = pool.run(f"{CASES}:updated", ranks=3, kind=kind, measured=MEASURED, tensors=tensors)
    assert states[0] == states[1] == states[2], "to the last bit"
    assert states[0] == pytest.approx(want, rel=1e-6)


def test_a_kl_that_is_already_that_of_all_ranks_and_one_of_a_group(pool):
    apart = [[(0.3, 1), (0.9, 1)]]
    states = pool.run(f"{CASES}:updated", kind="dual", measured=apart, all_ranks=False)
    assert [state["average"] for state in states] == pytest.approx([0.3, 0.9])
    same = pool.run(f"{CASES}:updated", kind="dual", measured=[[(0.6, 64), (0.6, 64)]])
    assert same[0]["average"] == same[1]["average"] == pytest.approx(0.6)
    assert pool.run(f"{CASES}:of_a_group", ranks=3, kind="pi")[:2] == pytest.approx([0.35, 0.35])


@pytest.mark.parametrize(
    ("kls", "n", "own", "others"),
    [
        ([0.5, math.nan], [1, 1], "current_kl is nan", "current_kl of another rank is not finite"),
        ([0.5, 0.5], [1, -1], "n is -1", "current_kl of another rank is not finite, or its n is negative"),
    ],
)
def test_a_bad_number_on_one_rank_raises_on_all(pool, kls, n, own, others):
    (first, untouched), (second, state) = pool.run(f"{CASES}:refused", kind="pi", kls=kls, n=n)
    assert others in first
    assert own in second
    assert untouched == state
    assert state["mass"] == 0
    states = pool.run(f"{CASES}:updated", kind="pi", measured=[[(0.5, 1), (math.inf, 1)]])
    assert [state["mass"] for state in states] == [0, 0], "a bad tensor changes none"
