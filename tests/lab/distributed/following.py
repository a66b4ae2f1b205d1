"""What each rank does: a reference follows a sharded policy, and a coefficient holds a target."""

import math

import torch
import torch.distributed as dist

from distributed.cases import PACK, RATE, STEPS, VOCAB, build, mine, parameters_of, step, wrapped
from refused import refusal
from torchrl_llm_kl import LogProbScorer, Ragged, ReferenceUpdater
from torchrl_llm_kl.estimators import DualKLCoefficient, PIKLCoefficient


def refuse(wrap):
    """The message for a sharded policy that a whole reference cannot follow."""
    return refusal(ReferenceUpdater, build(), wrapped(wrap, build())[1].actor_network, decay=0.75, error=ValueError)


def change_one_shard():
    """Weights of rank 1 change without a trace that autograd would see; this rank's cached scores against fresh ones."""
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
    """What an update of numbers raises, and the state after it."""
    coefficient, rank = KINDS[kind](), dist.get_rank()
    said = refusal(coefficient.update, kls[rank], n[rank], error=ValueError)
    return said, {name: float(buffer) for name, buffer in coefficient.state_dict().items()}


def of_a_group(kind):
    """The average after an update of the first two ranks alone: 0.2 and 0.4, weights 1 and 3."""
    group = dist.new_group([0, 1])
    coefficient = KINDS[kind]()
    if dist.get_rank() > 1:
        return math.nan
    coefficient.update([0.2, 0.4][dist.get_rank()], [1, 3][dist.get_rank()], process_group=group)
    return float(coefficient.average)
