"""Ranks train with the gradient of the whole batch. ``check_ranks`` explains how a wrong script differs."""

import time
from types import MappingProxyType

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from closeness import assert_near
from policy_batches import assert_same, batch, gradients, total
from refused import refusal
from torchrl_llm_kl import AdaptiveKLCoefficient
from torchrl_llm_kl.losses import EntropyBonus, KLToReference, PolicyLoss, ValueLoss
from torchrl_llm_kl.scoring import TokenCritic
from toy_models import tiny_model

SHARES = ([0, 1, 2, 4], [3, 5])  # of six sequences: 5 + 3 + 1 + 2 and 5 + 4 response tokens
PARTS = ([[0], [1, 2, 3]], [[1], [0]])  # of a share


def make_loss(critic=False, seed=0):
    if not critic:
        return PolicyLoss(tiny_model(seed=seed), "ppo", terms=[KLToReference(AdaptiveKLCoefficient(0.2, 0.5, 100))])
    torch.manual_seed(seed)
    loss = ValueLoss(TokenCritic(tiny_model(seed=seed).model))
    nn.init.normal_(loss.critic_network.head.weight, std=0.1)
    return loss


def share(rank):
    data = batch()
    data["value_target"] = torch.linspace(-1, 2, 54).reshape(6, 9)
    return data[torch.tensor(SHARES[rank])]


def train(loss, data, rank, *, scale=1.0, whole=False):
    """Add up the gradients of a step's micro-batches, and return the micro-batches."""
    parts = [data] if whole else [data[torch.tensor(rows)] for rows in PARTS[rank]]
    for part in parts:
        (total(loss(part)) * scale).backward()
    return parts


def combine(loss, *, average=True):
    for p in loss.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= 2 if average else 1


def right(rank, critic, average):
    loss = make_loss(critic)
    parts = train(loss, loss.count(share(rank), ranks_average=average), rank)
    combine(loss, average=average)
    before = [p.grad.clone() for p in loss.parameters() if p.grad is not None]
    state = torch.get_rng_state()
    loss.check_ranks(*parts)
    loss.check_ranks()
    assert all(map(torch.equal, before, [p.grad for p in loss.parameters() if p.grad is not None]))
    assert torch.equal(state, torch.get_rng_state())


def wrapped(rank, critic):
    """A right script, as in the advice: DDP wraps the loss, and the last micro-batch synchronises."""
    loss = make_loss(critic)
    ddp, data = DistributedDataParallel(loss), loss.count(share(rank))
    parts = [data[torch.tensor(rows)] for rows in PARTS[rank]]
    with ddp.no_sync():
        total(ddp(parts[0])).backward()
    total(ddp(parts[1])).backward()
    loss.check_ranks(*parts)
    loss.zero_grad()
    total(ddp(data)).backward()  # and the next step still synchronises
    loss.check_ranks(data)


def unwrapped(rank, critic):
    ddp = DistributedDataParallel(make_loss(critic))
    loss = ddp.module
    loss.check_ranks(*train(loss, loss.count(share(rank)), rank))


def a_step(
    rank, critic=False, *, seeds=(0, 0), counted=MappingProxyType({}), average=True, twice=False, forget=0, **options
):
    """Train on two micro-batches, add up the gradients and check. Each setting is a mistake."""
    loss, data = make_loss(critic, seed=seeds[rank]), share(rank)
    data = data if counted is None else loss.count(data, **counted)
    if twice:
        total(loss(data[:1])).backward()
    parts = train(loss, data, rank, **options)
    combine(loss, average=average)
    loss.check_ranks(*parts[: len(parts) - forget])


def unlike(rank, what):
    """Ranks with another coefficient, or with other frozen parameters."""
    loss = make_loss()
    if what == "coefficient":
        loss.terms[0].coeff.update(0.55 - 0.1 * rank, n=4)
    elif rank:
        loss.actor_network.lm_head.weight.requires_grad_(False)
    train(loss, loss.count(share(rank)), rank)
    if what == "coefficient":
        combine(loss)
    loss.check_ranks()


def answer(case, options):
    """Run a case on this rank, and return its error as text. Empty if it raises none."""
    return refusal(globals()[case], dist.get_rank(), error=Exception, **options)


@pytest.fixture
def both(pool):
    """Run a case on two ranks, and return the answer of both."""

    def run(case, **options):
        first, second = pool.run("test_check_ranks:answer", case=case.__name__, options=options)
        assert first == second, "each rank must raise, or the other waits for ever"
        return first

    return run


@pytest.mark.parametrize(
    ("case", "options"),
    [
        (right, {"critic": False, "average": True}),
        (right, {"critic": True, "average": False}),
        *((wrapped, {"critic": critic}) for critic in (False, True)),
    ],
)
def test_a_right_step_passes_and_nothing_changes(both, case, options):
    """Gradients combined by hand, and DDP around the loss, as in the advice."""
    assert both(case, **options) == ""


NOT_BOTH, ALIKE = "one of them only): actor_network.lm_head.weight", "update adaptive ones, alike on all"
NOT_WHOLE = ["the gradient does not belong to the 2 parts", "call loss.count(batch) before the batch is split"]
AVERAGED, ADDED = {"ranks_average": True}, {"ranks_average": False}
WRONG = [
    (unwrapped, {"critic": False}, ["RuntimeError: the gradients of ranks 0 and 1", "DistributedDataParallel(Pol"]),
    (unwrapped, {"critic": True}, ["the gradients of ranks 0 and 1 of 2 differ in"]),
    (a_step, {"critic": True, "seeds": (0, 1)}, ["the parameters of ranks 0 and 1 of 2 differ", "the same weights"]),
    # Accelerate's division by its accumulation steps, after the counts.
    (a_step, {"scale": 1 / 2}, ["is 0.5 times", "divided by 2, the number of parts", "gradient_accumulation_steps=1"]),
    (a_step, {"scale": 1 / 3}, ["the gradient is 0.3333 times", "Look for what else multiplies it"]),
    (a_step, {"whole": True, "counted": AVERAGED, "average": False}, ["is 2 times", "added up", "average=False)"]),
    (a_step, {"critic": True, "whole": True, "counted": ADDED}, ["is 0.5 times", "averaged", "average=True)"]),
    # The mean of the ranks' means: 11 and 9 tokens weigh the same.
    *((a_step, {"critic": critic, "counted": None, "scale": 1 / 2}, NOT_WHOLE) for critic in (False, True)),
    (a_step, {"counted": {"all_ranks": False}}, ["divided by [0.45, 0.55] times the count", "over all ranks"]),
    (a_step, {"forget": 1}, ["divided by [1.111111] times the count", "pass all parts of the share"]),
    (a_step, {"twice": True}, ["the gradient does not belong to the 2 parts of this rank"]),
    (unlike, {"what": "coefficient"}, ["buffers of ranks 0 and 1 of 2 differ in 1 of", ALIKE]),
    (unlike, {"what": "frozen"}, ["gradients of ranks 0 and 1 of 2 differ in", NOT_BOTH]),
]


@pytest.mark.parametrize(("case", "options", "message"), WRONG)
def test_a_wrong_step_is_explained(both, case, options, message):
    error = both(case, **options)
    assert all(part in error for part in message), error


def share_of_rank(mode, average):
    """On each of two ranks, the combined gradient. Each rank trains on two micro-batches."""
    loss, rank = reduced(mode), dist.get_rank()
    train(loss, loss.count(share(rank), ranks_average=average), rank)
    combine(loss, average=average)
    return {name: p.grad.numpy() for name, p in loss.named_parameters()}


def reduced(mode):
    terms = [KLToReference(0.2), EntropyBonus(0.05)]
    longest = 8 if mode == "seq-mean-token-sum-norm" else None
    return PolicyLoss(tiny_model(seed=0), terms=terms, aggregation=mode, max_len=longest)


@pytest.mark.parametrize(("mode", "average"), [("token-mean", True), ("seq-mean-token-mean", False)])
def test_two_ranks_have_the_gradient_of_the_whole_batch(pool, mode, average):
    loss = reduced(mode)
    want = gradients(total(loss(batch())), loss)
    assert all(bool((x != 0).any()) for x in want.values())
    for found in pool.run("test_check_ranks:share_of_rank", mode=mode, average=average):
        assert_same({name: torch.from_numpy(gradient) for name, gradient in found.items()}, want)


@pytest.mark.parametrize("settings", [{}, {"static_graph": True}], ids=str)
def test_ddp_finds_the_losses_in_the_output(settings):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        loss, data = reduced("token-mean"), batch()
        expected = gradients(total(loss(data)), loss)
        wrapped_loss = DistributedDataParallel(loss, **settings)
        out = wrapped_loss(data)
        if settings:  # then DDP replaces each tensor of the output, so that it sees the backward pass begin
            assert "DDPSink" in type(out["loss_objective"].grad_fn).__name__
        out.total_loss.backward()
        for name, parameter in loss.named_parameters():
            assert_near(parameter.grad, expected[name], terms=64)
    finally:
        time.sleep(0.1)  # Gloo's thread needs Python's lock to drop its last work, and the end waits for that thread
        dist.destroy_process_group()


def test_parts_of_a_step_in_one_process():
    loss, data = make_loss(), batch()
    loss.count(data)
    with pytest.raises(RuntimeError, match=r"no parameter has a gradient: call check_ranks after backward\(\)"):
        loss.check_ranks(data)
    parts = train(loss, data, 0)
    with pytest.raises(RuntimeError, match=r"divided by \[1.428571\] times the count of all parts .*\. Expected 1\."):
        loss.check_ranks(*parts)  # four of six rows
    loss.zero_grad()
    total(loss(data)).backward()
    loss.check_ranks(data)


def test_check_ranks_needs_a_process_group(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(RuntimeError, match=r"WORLD_SIZE is 4, but torch\.distributed is not initialised"):
        make_loss().check_ranks()


def test_losses_without_comparable_gradients_are_refused():
    loss = PolicyLoss(tiny_model(seed=0), aggregation="none")
    loss(batch())["loss_objective"].sum().backward()
    with pytest.raises(ValueError, match="aggregation 'none' has no gradient that ranks could share"):
        loss.check_ranks(batch())
    loss.__dict__["_modules"]["sharded"] = type("FullyShardedDataParallel", (nn.Module,), {})()
    with pytest.raises(ValueError, match=r"these are sharded \(FullyShardedDataParallel\)"):
        loss.check_ranks()
