"""A sharded reference follows a sharded policy, and a coefficient that holds a target is the same on all ranks."""

import math

import pytest
import torch
import torch.distributed as dist

from distributed.cases import PACK, RATE, STEPS, VOCAB, build, mine, parameters_of, step, wrapped
from refused import refusal
from torchrl_llm_kl import LogProbScorer, Ragged, ReferenceUpdater
from torchrl_llm_kl.estimators import DualKLCoefficient, PIKLCoefficient


# ---------------------------------------------------------------------- each rank
def refuse(wrap):
    """The message for a sharded policy that a whole reference cannot follow."""
    return refusal(ReferenceUpdater, build(), wrapped(wrap, build())[1].actor_network, decay=0.75, error=ValueError)


def change_one_shard():
    """Change weights of rank 1 without autograd noticing, and compare this rank's cached scores with fresh ones."""
    model = wrapped("fsdp2", build())[1].actor_network
    scorer, rows = LogProbScorer(model, tokens_per_batch=PACK), [list(range(3, 20))]
    before = scorer.score(rows, remember=True).values
    if dist.get_rank() == 1:
        for parameter in model.parameters():
            parameter.to_local().data.mul_(1.5)
    cached, fresh = (scorer.score(rows, remember=remember).values for remember in (True, False))
    assert (fresh - before).abs().max() > 0.01
    return float((cached - fresh).abs().max())


def follow(wrap, *, whole=False, lora=False):
    """Three steps; a reference is averaged, averaged, and reset.

    Returns the largest difference of its weights from averages of the whole parameters, of its cached scores from fresh ones,
    and the largest KL after the reset.
    """
    policy, reference = build(lora=lora), build(lora=lora)
    run, loss = wrapped(wrap, policy)
    trained, frozen = loss.actor_network, reference if whole else wrapped(wrap, reference)[1].actor_network
    optimizer = torch.optim.SGD([p for p in run.parameters() if p.requires_grad], lr=RATE)
    updater = ReferenceUpdater(frozen, trained, decay=0.75, reset_every=3)
    scorers = [LogProbScorer(model, tokens_per_batch=PACK) for model in (trained, frozen)]
    rng = torch.Generator().manual_seed(dist.get_rank())
    rows = Ragged.from_list([torch.randint(3, VOCAB, (n,), generator=rng) for n in (12, 30)])
    weights, scores = 0.0, 0.0
    want = {name: value.clone() for name, value in parameters_of(frozen).items()}
    for number in range(STEPS):
        step(run, loss, mine())
        optimizer.step(), optimizer.zero_grad()
        updater.step()
        now = parameters_of(trained)
        want = now if number == 2 else {name: 0.75 * want[name] + 0.25 * value for name, value in now.items()}
        got = parameters_of(frozen)
        assert any(not torch.equal(got[name], value) for name, value in now.items()) or number == 2
        weights = max(weights, *(float((got[name] - want[name]).abs().max()) for name in want))
        cached, fresh = (scorers[1].score(rows, remember=remember).values for remember in (True, False))
        scores = max(scores, float((cached - fresh).abs().max()))
    kl = scorers[0].evaluate(rows, reference=scorers[1]).kl
    return weights, scores, float(kl.values.abs().max())


KINDS = {
    "pi": lambda: PIKLCoefficient(0.2, 0.5, smoothing=0.5, warmup=1),
    "dual": lambda: DualKLCoefficient(0.2, 0.5, warmup=1),
}


def updated(kind, measured, *, tensors=True, all_ranks=None):
    """The state after updates with each rank's (KL, number of samples)."""
    coefficient = KINDS[kind]()
    for each in measured:
        numbers = [torch.tensor(x) if tensors else x for x in each[dist.get_rank()]]
        coefficient.update(*numbers, all_ranks=all_ranks)
    return {name: float(buffer) for name, buffer in coefficient.state_dict().items()}


def refused(kind, kls, n):
    """The error that an update of numbers raises, and the state after it."""
    coefficient, rank = KINDS[kind](), dist.get_rank()
    said = refusal(coefficient.update, kls[rank], n[rank], error=ValueError)
    return said, {name: float(buffer) for name, buffer in coefficient.state_dict().items()}


def of_a_group(kind):
    """The average after an update of only the first two ranks, with 0.2 and 0.4 and weights 1 and 3."""
    group = dist.new_group([0, 1])
    coefficient = KINDS[kind]()
    if dist.get_rank() > 1:
        return math.nan
    coefficient.update([0.2, 0.4][dist.get_rank()], [1, 3][dist.get_rank()], process_group=group)
    return float(coefficient.average)


# ---------------------------------------------------------------------- all ranks
CASES = __name__
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
    """The reference is sharded like the policy, whole on each rank, or an adapter. Cached scores use the new weights."""
    for weights, scores, after_reset in pool.run(f"{CASES}:follow", wrap=wrap, **options):
        assert max(weights, scores) < 1e-12
        assert after_reset < 1e-12 if "whole" in options else after_reset == 0


@pytest.mark.parametrize(
    ("wrap", "match"),
    [("fsdp1, original parameters", "cannot follow"), ("fsdp1, flat parameters", "of the same names")],
)
def test_a_whole_reference_cannot_follow_fsdp1(pool, wrap, match):
    for message in pool.run(f"{CASES}:refuse", wrap=wrap):
        assert match in message


def test_a_change_on_one_rank_clears_the_cache_of_all_ranks(pool):
    assert max(pool.run(f"{CASES}:change_one_shard")) < 1e-12


#: Each update's (KL, samples) of each rank, and the mean over all samples.
MEASURED = [[(0.2, 2), (0.4, 6), (math.nan, 0)], [(0.6, 5), (0.9, 1), (0.3, 4)], [(1.0, 1), (0.5, 1), (0.6, 2)]]
MEANS = [0.35, 0.51, 0.675]


@pytest.mark.parametrize(("kind", "tensors"), [("pi", True), ("pi", False), ("dual", True)])
def test_coefficients_of_all_ranks_equal_one_process(pool, kind, tensors):
    one = KINDS[kind]()
    for mean in MEANS:
        one.update(mean, 10)
    want = {name: float(buffer) for name, buffer in one.state_dict().items()}
    states = pool.run(f"{CASES}:updated", ranks=3, kind=kind, measured=MEASURED, tensors=tensors)
    assert states[0] == states[1] == states[2], "to the last bit"
    assert states[0] == pytest.approx(want, rel=1e-6)


def test_a_kl_is_averaged_over_all_ranks_a_group_or_none(pool):
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
