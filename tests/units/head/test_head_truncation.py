"""Truncated sampling: values and gradients beside transformers' own warpers over whole rows."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.testing import assert_close
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from head_reference import (
    OPTIONS,
    PAIR,
    N,
    Sizes,
    V,
    assert_same,
    at,
    entropy_of,
    kl_of,
    make_head,
    make_targets,
    plain,
)
from torchrl_llm_kl.head import Kept, Truncation, linear_log_prob, linear_pair
from torchrl_llm_kl.head._support import floor_of

TRUNCATIONS = [
    Truncation(top_k=1),
    Truncation(top_k=5),
    Truncation(top_k=V),
    Truncation(top_k=10 * V),
    Truncation(top_p=0.8),
    Truncation(top_p=1e-9),
    Truncation(top_p=1 - 1e-7),
    Truncation(min_p=0.1),
    Truncation(min_p=1.0),
    Truncation(40, 0.9, 0.02),
    Truncation(7, 0.5),
]


def warped(log_p, truncation):
    """All log-probs after transformers' warpers, in its order; ``-inf`` where a token is left out."""
    top_k, top_p, min_p = truncation
    scores = log_p
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    if min_p:
        scores = MinPLogitsWarper(min_p)(None, scores)
    return scores.log_softmax(-1)


def drawn(log_p, truncation, seed=0):
    """Tokens that the truncated sampler draws."""
    rng = torch.Generator().manual_seed(seed)
    return warped(log_p, truncation).exp().multinomial(1, generator=rng).squeeze(1)


def recorded(log_p):
    """The tokens of finite log-prob, as a sampler records them."""
    rows = [row.isfinite().nonzero().squeeze(1) for row in log_p]
    return Kept(torch.cat(rows), torch.tensor([0, *(len(row) for row in rows)]).cumsum(0))


# ---------------------------------------------------------------------------------------------------------------------
# by hand


def test_by_hand():
    """Probabilities 1/2, 1/4, 1/8, 1/8: the top two of them are 2/3 and 1/3."""
    weight = torch.tensor([[4.0], [2.0], [1.0], [1.0]]).log().requires_grad_()
    one, targets = torch.ones(3, 1), torch.tensor([0, 1, 2])
    for truncation in (Truncation(top_k=2), Truncation(top_p=0.7), Truncation(min_p=0.4)):
        out = linear_log_prob(one, weight, targets, truncation=truncation, entropy=True)
        assert_close(out.log_prob, torch.tensor([math.log(2 / 3), math.log(1 / 3), -math.inf]))
        assert_close(out.entropy, torch.full((3,), math.log(3) - 2 / 3 * math.log(2)))
        (gradient,) = torch.autograd.grad(out.log_prob[0], weight)
        assert_close(gradient, torch.tensor([[1 / 3], [-1 / 3], [0.0], [0.0]]))  # nothing flows to the others
    # Ties stay together, as in transformers' top-k: a third equal token would be as probable as the second.
    weight = torch.tensor([[4.0], [2.0], [2.0], [1.0]]).log()
    out = linear_log_prob(torch.ones(1, 1), weight, torch.tensor([2]), truncation=Truncation(top_k=2))
    assert_close(out.log_prob.exp(), torch.tensor([0.25]))


# ---------------------------------------------------------------------------------------------------------------------
# beside transformers


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
def test_values_and_gradients(truncation):
    inputs = hidden, weight, bias = make_head(grad=True)
    weights = torch.randn(2, N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = warped(plain(hidden, weight, bias, **OPTIONS), truncation)
    targets = drawn(plain(hidden, weight, bias, **OPTIONS).detach(), truncation)
    wanted = (at(expected, targets), entropy_of(expected))
    for given_as in ({"truncation": truncation}, {"kept": recorded(expected.detach())}):
        for chunk in ((2, 7), (4, 1000)):
            options = {"bias": bias, "entropy": True, "chunk": chunk, **OPTIONS, **given_as}
            assert_same(linear_log_prob(hidden, weight, targets, **options), wanted, inputs, weights)


def test_kl_to_a_whole_reference():
    """The sampler's KL: finite, and its gradient reaches both heads."""
    truncation = Truncation(20, 0.9)
    policy, ref = make_head(0, grad=True), make_head(1, grad=True)
    log_q = plain(*ref, temperature=OPTIONS["temperature"], scale=PAIR["ref_scale"], soft_cap=PAIR["ref_soft_cap"])
    log_p = warped(plain(*policy, **OPTIONS), truncation)
    targets = drawn(plain(*policy, **OPTIONS).detach(), truncation)
    options = {"bias": policy[2], "ref_bias": ref[2], "entropy": True, "chunk": (2, 7), **PAIR}
    for given_as in ({"truncation": truncation}, {"kept": recorded(log_p.detach())}):
        found = linear_pair(policy[0], policy[1], ref[0], ref[1], targets, **options, **given_as)
        assert_same(found[:1], [kl_of(log_p, log_q)], [*policy, *ref])
        assert_same(found[1:], (at(log_p, targets), at(log_q, targets), entropy_of(log_p)))


@settings(max_examples=60, deadline=None)
@given(
    logits=st.lists(st.lists(st.floats(-30, 10, width=32), min_size=6, max_size=6), min_size=1, max_size=4),
    truncation=st.builds(Truncation, st.integers(0, 8), st.floats(0.01, 1), st.floats(0, 1)),
)
def test_the_same_tokens_as_transformers(logits, truncation):
    """But for ties within rounding, which a sort breaks by chance."""
    scores = torch.tensor(logits, dtype=torch.float64)
    gaps = scores.sort(-1).values.diff(dim=-1)
    scores = scores[(gaps > 1e-6).all(-1)]
    if len(scores):
        kept = scores >= floor_of(scores, truncation).unsqueeze(-1)
        want = warped(scores, truncation).isfinite()
        borders = scores.softmax(-1).sort(-1, descending=True).values.cumsum(-1) - truncation.top_p
        if truncation.top_k == 0 and borders.abs().min() > 1e-9:
            assert torch.equal(kept, want)
        assert kept.any(-1).all()


def test_mean_ratio_is_one():
    """Of tokens drawn at top-p 0.8 the whole distribution is the wrong one: its mean ratio is the mass that is kept."""
    generator = torch.Generator().manual_seed(0)
    weight = (3 * torch.randn(200, 1, generator=generator)).double()
    hidden, truncation = torch.ones(50_000, 1, dtype=torch.float64), Truncation(top_p=0.8)
    log_p = plain(hidden[:1], weight)
    sampler = warped(log_p, truncation)
    targets = sampler.exp().multinomial(len(hidden), replacement=True, generator=generator).squeeze(0)
    found = linear_log_prob(hidden, weight, targets, truncation=truncation).log_prob
    assert abs(float((found - sampler[0, targets]).exp().mean()) - 1) < 1e-9
    whole = linear_log_prob(hidden, weight, targets).log_prob
    mass = log_p[sampler.isfinite()].exp().sum()
    assert float((whole - found).exp().mean()) == pytest.approx(float(mass), abs=1e-9)
    assert 0.8 <= float(mass) < 0.9


def test_backward_with_other_rounding():
    """Tiles of other shapes round their logits otherwise: a token at the edge must not change sides."""
    hidden, weight, _ = make_head(n=64, h=256, v=1000, dtype=torch.float32, grad=True)
    targets = drawn(plain(hidden, weight).detach(), Truncation(top_k=30))
    out = linear_log_prob(hidden, weight, targets, truncation=Truncation(top_k=30), chunk=(16, 37)).log_prob
    found = torch.autograd.grad(out.sum(), (hidden, weight))
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    expected = at(warped(plain(*exact), Truncation(top_k=30)), targets)
    for gradient, wanted in zip(found, torch.autograd.grad(expected.sum(), exact), strict=True):
        assert_close(gradient.double(), wanted, atol=1e-4, rtol=1e-5)


def test_no_whole_matrix_of_logits():
    hidden, weight, _ = make_head(n=600, h=4, v=3000, dtype=torch.float32, grad=True)
    with Sizes() as sizes:
        out = linear_log_prob(hidden, weight, make_targets(600, 3000), truncation=Truncation(50, 0.9), chunk=(64, 512))
        out.log_prob.masked_fill(out.log_prob.isneginf(), 0.0).sum().backward()
    assert sizes.largest <= 64 * 3001


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"truncation": Truncation(top_p=0.0)}, r"top_p=0.0.*expected top_k of at least 0, top_p in \(0, 1\]"),
        ({"truncation": Truncation(top_k=-1)}, "top_k=-1"),
        ({"truncation": Truncation(min_p=1.5)}, "min_p=1.5"),
        ({"kept": Kept(torch.zeros(1).long(), torch.zeros(3).long())}, r"offsets has shape \(3,\); expected \(8,\)"),
    ],
)
def test_bad_truncations(options, message):
    hidden, weight, _ = make_head()
    with pytest.raises(ValueError, match=message):
        linear_log_prob(hidden, weight, make_targets(), **options)
    with pytest.raises(ValueError, match="infinite where the policy is truncated"):
        linear_pair(hidden, weight, hidden, weight, direction="forward", truncation=Truncation(top_k=3))
