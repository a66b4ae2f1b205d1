"""Nearly certain tokens: log-probs, entropies, divergences and gradients below the rounding error of 1, against float64."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from head_reference import DIRECTIONS, from_logits, kl_of
from torchrl_llm_kl.head import (
    Kept,
    Truncation,
    floor_of,
    linear_kept,
    linear_log_prob,
    linear_pair,
    linear_top_k,
    log_softmax,
    logits_kl,
)
from torchrl_llm_kl.head._operators import join_slices
from torchrl_llm_kl.head._sweep import forward_sweep
from torchrl_llm_kl.head._tiles import Head, Plan, Tokens

#: Nats between the largest logit and the others.
MARGINS = (0.0, 1.0, 5.0, 10.0, 17.0, 20.0, 30.0, 50.0, 80.0, 100.0)
V, CHUNK = 41, (4, 16)


def logits_of(seed: int) -> Tensor:
    """One row of float32 numbers per margin. The place of the largest logit differs from row to row."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.rand(len(MARGINS), V, generator=generator)
    places = torch.arange(len(MARGINS)) * 4
    logits[torch.arange(len(MARGINS)), places] = 3.0 + torch.tensor(MARGINS) + 0.25 * seed
    return logits


PLACES = torch.arange(len(MARGINS)) * 4


def exact_log_softmax(logits: Tensor) -> Tensor:
    """In float64, without the exponential of the largest logit in the sum."""
    place = PLACES.unsqueeze(1)
    shifted = logits - logits.gather(1, place)
    others = torch.ones_like(logits, dtype=torch.bool).scatter(1, place, False)
    return shifted - (shifted.exp() * others).sum(1, keepdim=True).log1p()


def jensen_shannon_of(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """The log-ratio to the mixture by log1p: in float64 too the mixture rounds to 1."""
    return beta * (log_q.exp() * -((1 - beta) * (log_p - log_q).expm1()).log1p()).sum(1) + (1 - beta) * (
        log_p.exp() * -(beta * (log_q - log_p).expm1()).log1p()
    ).sum(1)


def assert_exact(found: Tensor, want: Tensor, rtol: float = 2e-5, within: float = 1e-36) -> None:
    """Relative to each number, down to the smallest that float32 holds with all its digits."""
    assert found.dtype == torch.float32
    difference = (found.double() - want).abs()
    bound = rtol * want.abs() + within
    worst = int((difference / bound).argmax())
    assert bool((difference <= bound).all()), (worst, found.flatten()[worst].item(), want.flatten()[worst].item())


def gradient_of(total: Tensor, logits: Tensor) -> Tensor:
    """In float64. Gradients of a row sum to 0, so the largest logit has minus the sum of the others."""
    (found,) = torch.autograd.grad(total, logits, retain_graph=True)
    others = found.scatter(1, PLACES.unsqueeze(1), 0.0)
    return others.scatter(1, PLACES.unsqueeze(1), -others.sum(1, keepdim=True))


def heads(seed: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """A head whose logits are :func:`logits_of`, and these in float64; both need gradients."""
    logits = logits_of(seed)
    hidden, weight = from_logits(logits)
    return (hidden, weight.requires_grad_()), logits.double().requires_grad_()


@pytest.mark.parametrize("chunk", [CHUNK, (64, 64)])
def test_log_probs_entropies_and_their_gradients(chunk: tuple[int, int]) -> None:
    for targets in (PLACES, PLACES + 1):
        (hidden, weight), logits = heads(0)
        found = linear_log_prob(hidden, weight, targets, entropy=True, chunk=chunk)
        log_p = exact_log_softmax(logits)
        want = log_p.gather(1, targets.unsqueeze(1)).squeeze(1), -(log_p.exp() * log_p).sum(1)
        for ours, theirs in zip(found, want, strict=True):
            assert ours is not None
            assert_exact(ours, theirs)
            gradients = torch.autograd.grad(ours.sum(), weight, retain_graph=True)
            assert_exact(gradients[0].T, gradient_of(theirs.sum(), logits), rtol=2e-4)


def test_a_log_prob_by_hand() -> None:
    """Two tokens 20 nats apart: -log(1 + e^-20), whose gradient to the margin is the probability of the other one."""
    (hidden, weight), target = from_logits([[20.0, 0.0]]), torch.tensor([0])
    found = linear_log_prob(hidden, weight.requires_grad_(), target, entropy=True)
    assert found.log_prob.item() == pytest.approx(-2.0611536e-9, rel=1e-6)
    assert found.entropy is not None
    assert found.entropy.item() == pytest.approx(21 * 2.0611536e-9, rel=1e-6)  # x (1 - log x), with x = e^-20
    found.log_prob.backward()
    assert weight.grad is not None
    assert weight.grad.flatten().tolist() == pytest.approx([2.0611536e-9, -2.0611536e-9], rel=1e-6)


@pytest.mark.parametrize("chunk", [CHUNK, (64, 64)])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_divergences_and_their_gradients(direction: Any, chunk: tuple[int, int]) -> None:
    """Both models are nearly certain of one token. From the head and from logits."""
    (own, ref), (p, q) = zip(heads(0), heads(1), strict=True)
    log_p, log_q = exact_log_softmax(p), exact_log_softmax(q)
    want = {"reverse": lambda: kl_of(log_p, log_q), "forward": lambda: kl_of(log_q, log_p)}.get(
        direction, lambda: jensen_shannon_of(log_p, log_q, 0.3)
    )()
    wanted = [gradient_of(want.sum(), logits) for logits in (p, q)]
    found = linear_pair(*own, *ref, direction=direction, beta=0.3, chunk=chunk).kl
    assert_exact(found, want, rtol=1e-4)
    for ours, theirs in zip(torch.autograd.grad(found.sum(), (own[1], ref[1])), wanted, strict=True):
        assert_exact(ours.T, theirs, rtol=1e-3)
    both = [x.detach().float().requires_grad_() for x in (p, q)]
    found = logits_kl(both[0], both[1], direction=direction, beta=0.3, chunk=chunk)
    assert_exact(found, want, rtol=1e-4)
    for ours, theirs in zip(torch.autograd.grad(found.sum(), both), wanted, strict=True):
        assert_exact(ours, theirs, rtol=1e-3)


def test_kept_tokens_top_k_and_whole_logits() -> None:
    (hidden, weight), logits = heads(0)
    log_p = exact_log_softmax(logits)
    want = log_p.gather(1, PLACES.unsqueeze(1)).squeeze(1)
    wanted = gradient_of(want.sum(), logits)
    every = Kept.of(torch.arange(V).repeat(len(MARGINS)), torch.full((len(MARGINS),), V))
    found = linear_log_prob(hidden, weight, PLACES, kept=every).log_prob
    assert_exact(found, want)
    assert_exact(torch.autograd.grad(found.sum(), weight)[0].T, wanted, rtol=2e-4)
    top = linear_top_k(hidden, weight, 3, PLACES, chunk=CHUNK)
    assert top.log_prob is not None
    assert_exact(top.log_prob, want)
    assert_exact(top.log_probs[1:, 0], want[1:])
    whole = logits.detach().float().requires_grad_()
    found = log_softmax(whole).gather(1, PLACES.unsqueeze(1)).squeeze(1)
    assert_exact(found, want)
    assert_exact(torch.autograd.grad(found.sum(), whole)[0], wanted, rtol=2e-4)


def test_the_entropy_of_many_equal_tokens() -> None:
    """2,000 kept tokens of equal logits have the entropy log 2000."""
    ids = torch.arange(2000) * 75
    kept = Kept.of(ids, torch.tensor([2000]))
    found = linear_log_prob(torch.ones(1, 1), torch.full((151_936, 1), 2.0), ids[:1], entropy=True, kept=kept)
    assert found.entropy is not None
    assert found.entropy.item() == pytest.approx(7.600902459542082, abs=1e-6)  # log 2000
    assert found.log_prob.item() == pytest.approx(-7.600902459542082, abs=1e-6)


@pytest.mark.parametrize("low", [1.0, -3.0, 1e-30, 100.0])
def test_logits_one_ulp_apart_under_top_k(low: float) -> None:
    """The search and whole rows keep one token, although the middle of neighbouring numbers rounds to one of them."""
    a = torch.tensor(low)
    b = torch.nextafter(a, torch.tensor(torch.inf))
    for pair in ([a, b], [b, a]):
        row = torch.stack([*pair, torch.tensor(low - 1.0)])[None]
        assert (row >= floor_of(row, Truncation(top_k=1)).unsqueeze(1)).sum().item() == 1
        hidden, weight = from_logits(row)
        kept = linear_kept(hidden, weight, Truncation(top_k=1))
        assert kept is not None
        assert kept.ids.tolist() == [int(row.argmax())]


class Gathered(NamedTuple):
    """One of two slices of a vocabulary. ``sent`` has the values of both, in the first pass only its own."""

    first: int
    size: int
    vocab: int
    sent: dict[int, Tensor]

    def gather(self, values: Tensor) -> Tensor:
        self.sent[self.first] = values
        return torch.stack([self.sent[first] for first in (0, 20) if first in self.sent])


def test_slices_of_a_vocabulary_are_joined_without_rounding() -> None:
    """Tensor parallel: each slice sweeps its own tokens, and one holds the nearly certain token."""
    (hidden, weight), logits = heads(0)
    log_p = exact_log_softmax(logits)
    plan, sent = Plan(CHUNK, entropy=True), dict[int, Tensor]()
    for first, last in ((0, 20), (20, V), (0, 20)):
        part: Any = Gathered(first, last - first, V, sent)
        swept, statistics = forward_sweep(
            plan, [Head(hidden, weight[first:last], None, torch.float32)], Tokens(PLACES - first)
        )
        found, (_, log_total) = join_slices(part, plan, PLACES - first, [*swept, *statistics])
    assert found.log_prob is not None
    assert found.entropy is not None
    want = log_p.gather(1, PLACES.unsqueeze(1)).squeeze(1)
    assert_exact(found.log_prob, want)
    assert_exact(log_total, -want)
    assert_exact(found.entropy, -(log_p.exp() * log_p).sum(1))
