"""The Jensen-Shannon divergence of two heads."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.testing import assert_close

from closeness import assert_near
from head_reference import (
    INF,
    OPTIONS,
    PAIR,
    N,
    Sizes,
    assert_same,
    at,
    entropy_of,
    from_logits,
    jensen_shannon_of,
    make_head,
    make_targets,
    plain,
)
from torchrl_llm_kl.head import linear_kl, linear_pair

JS = {"direction": "jensen_shannon", "beta": 0.3}


def test_by_hand():
    """p = (1/2, 1/2), q = (3/4, 1/4), beta 1/4: m = (.5625, .4375), .25 * 0.0758576 + .75 * 0.0078742."""
    one, weight, ref_weight = torch.ones(1, 1), torch.zeros(2, 1), torch.tensor([[3.0], [1.0]]).log()
    got = linear_kl(one, weight, one, ref_weight, direction="jensen_shannon", beta=0.25)
    assert_near(got, torch.tensor([0.0248700]), size=1)


def test_gradient_by_hand():
    """p = (1, 3)/4, q = (3, 1)/4, m uniform: d/dx_i = p_i/2 (ln(2 p_i) - KL(p, m)) = -+3/32 ln 3, d/dy the reverse."""
    one, logs = torch.ones(1, 1), torch.tensor([[1.0], [3.0]]).log()
    weight, ref_weight = logs.clone().requires_grad_(), logs.flip(0).clone().requires_grad_()
    linear_kl(one, weight, one, ref_weight, direction="jensen_shannon").sum().backward()
    slope = 3 / 32 * math.log(3)
    assert_close(weight.grad, torch.tensor([[-slope], [slope]]))
    assert_close(ref_weight.grad, torch.tensor([[slope], [-slope]]))


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 9),
    v=st.integers(1, 23),
    chunk=st.tuples(st.integers(1, 10), st.integers(1, 25)),
    beta=st.floats(0.01, 0.99),
    with_targets=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_values_and_gradients_for_any_shape_and_tile(n, v, chunk, beta, with_targets, seed):
    policy, ref = make_head(seed, n=n, h=3, v=v, grad=True), make_head(seed + 1, n=n, h=2, v=v, grad=True)
    targets = make_targets(n, v, seed)
    options = {"entropy": with_targets, "chunk": chunk, "direction": "jensen_shannon", "beta": beta, **PAIR}
    biases = {"bias": policy[2], "ref_bias": ref[2]}
    got = linear_pair(*policy[:2], *ref[:2], targets if with_targets else None, **biases, **options)
    log_p, log_q = plain(*policy, **OPTIONS), plain(*ref, temperature=1.7, scale=1.3, soft_cap=3.0)
    want = [jensen_shannon_of(log_p, log_q, beta)]
    if with_targets:
        want += [at(log_p, targets), at(log_q, targets), entropy_of(log_p)]
    weights = torch.randn(len(want), n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    assert_same([value for value in got if value is not None], want, (*policy, *ref), weights)


def test_gradcheck():
    policy, ref = make_head(1, n=3, h=3, v=7, grad=True), make_head(2, n=3, h=2, v=7, grad=True)

    def run(h, w, b, rh, rw, rb):
        return linear_kl(h, w, rh, rw, bias=b, ref_bias=rb, chunk=(2, 4), **JS, **PAIR)

    assert torch.autograd.gradcheck(run, (*policy, *ref))


def test_gradient_to_each_input_alone():
    for only in range(6):
        tensors = [*make_head(1), *make_head(2)]
        tensors[only].requires_grad_()
        h, w, b, rh, rw, rb = tensors
        value = linear_kl(h, w, rh, rw, bias=b, ref_bias=rb, chunk=(3, 17), **JS)
        assert_same([value], [jensen_shannon_of(plain(h, w, b), plain(rh, rw, rb), 0.3)], [tensors[only]])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("distance", [1e-3, 1e-2])
def test_small_divergences_keep_their_digits(distance, seed):
    """For models that nearly agree, log p - log m would lose the digits that p and m share."""
    hidden, weight = make_head(seed, n=40, h=16, v=1507, dtype=torch.float32)[:2]
    ref_weight = weight + distance * make_head(seed + 10, n=1, h=16, v=1507, dtype=torch.float32)[1]
    truth = jensen_shannon_of(plain(hidden.double(), weight.double()), plain(hidden.double(), ref_weight.double()), 0.3)
    got = linear_kl(hidden, weight, hidden, ref_weight, chunk=(7, 400), **JS)
    assert got.dtype == torch.float32
    naive = jensen_shannon_of(plain(hidden, weight), plain(hidden, ref_weight), 0.3)
    assert (got - truth).square().mean() < (naive - truth).square().mean() / 4


def test_equal_models_have_divergence_zero():
    hidden, weight, bias = make_head(dtype=torch.float32, grad=True)
    value = linear_kl(hidden, weight, hidden.detach(), weight.detach(), bias=bias, ref_bias=bias.detach(), **JS)
    assert torch.equal(value, torch.zeros(N))
    assert_near(torch.autograd.grad(value.sum(), weight)[0], torch.zeros_like(weight), size=1)


@pytest.mark.parametrize("far", [100.0, 1e4, INF])
def test_disjoint_models_have_the_entropy_of_beta(far):
    """Even if a share rounds to 1, or the ratio of the probabilities overflows."""
    for beta in (1e-9, 0.3, 1 - 1e-9):
        for dtype in (torch.float32, torch.float64):
            (one, weight), (_, ref_weight) = from_logits([[0.0, -far]], dtype), from_logits([[-far, 0.0]], dtype)
            weight.requires_grad_()
            value = linear_kl(one, weight, one, ref_weight, direction="jensen_shannon", beta=beta)
            share = 1.0 - beta
            assert_close(value, torch.tensor([-beta * math.log(beta) - share * math.log(share)], dtype=dtype))
            if far < INF:
                assert torch.autograd.grad(value.sum(), weight)[0].isfinite().all(), (beta, dtype)


@pytest.mark.parametrize("chunk", [(3, 5), (100, 200)], ids=str)
def test_tokens_that_one_or_both_rule_out(chunk):
    policy, ref = make_head(1, grad=True), make_head(2, grad=True)
    policy[2].data[:40], ref[2].data[20:60] = -INF, -INF
    got = linear_kl(*policy[:2], *ref[:2], bias=policy[2], ref_bias=ref[2], chunk=chunk, **JS)
    log_p, log_q = plain(*policy), plain(*ref)
    p, q = log_p.exp(), log_q.exp()
    m = 0.3 * q + 0.7 * p
    want = 0.3 * torch.special.entr(m).sum(-1) + 0.7 * torch.special.entr(m).sum(-1)
    want = want - 0.3 * torch.special.entr(q).sum(-1) - 0.7 * torch.special.entr(p).sum(-1)
    assert_close(got, want)
    log_m = m.log()
    # d/dx = share * p (log p - log m - KL), 0 where p is.
    for log_dist, share, bias in ((log_p, 0.7, policy[2]), (log_q, 0.3, ref[2])):
        dist = log_dist.exp()
        ratio = (log_dist - log_m).masked_fill(dist == 0, 0.0)
        slope = share * dist * (ratio - (dist * ratio).sum(-1, keepdim=True))
        assert_close(torch.autograd.grad(got.sum(), bias, retain_graph=True)[0], slope.sum(0).detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_adds_no_error_to_that_of_the_logits(dtype):
    policy, ref = make_head(1, dtype=dtype, grad=True), make_head(2, dtype=dtype)
    log_p, log_q = plain(*policy[:2]), plain(*ref[:2])
    got = linear_kl(*policy[:2], *ref[:2], chunk=(3, 17), **JS)
    assert_close(got.double(), jensen_shannon_of(log_p.double(), log_q.double(), 0.3), rtol=1e-5, atol=1e-6)
    fine = linear_kl(*policy[:2], *ref[:2], chunk=(3, 17), product_dtype=torch.float32, **JS)
    true = jensen_shannon_of(*(plain(*(t.detach().double() for t in head[:2])) for head in (policy, ref)), 0.3)
    assert_close(fine.double(), true, rtol=1e-5, atol=1e-6)
    assert torch.autograd.grad(fine.sum(), policy[1])[0].dtype == dtype


def test_memory_is_that_of_whole_rows():
    n, h, v, chunk = 200, 2, 211, (100, 13)
    policy, ref = make_head(1, n=n, h=h, v=v, grad=True), make_head(2, n=n, h=h, v=v)
    with Sizes() as forward:
        value = linear_kl(*policy[:2], *ref[:2], chunk=chunk, **JS)
    with Sizes() as backward:
        value.sum().backward()
    assert forward.largest == 64 * v
    assert backward.largest == chunk[0] * chunk[1]


def test_no_positions():
    hidden, weight, _ = make_head(n=0, grad=True)
    value = linear_kl(hidden, weight, hidden, weight, **JS)
    assert value.shape == (0,)
    value.sum().backward()
    assert_close(weight.grad, torch.zeros_like(weight))


def test_beta_out_of_range():
    hidden, weight, _ = make_head()
    for beta in (0.0, 1.0, -0.5, math.nan):
        with pytest.raises(ValueError, match=rf"beta must be inside \(0, 1\), got {beta}"):
            linear_kl(hidden, weight, hidden, weight, direction="jensen_shannon", beta=beta)


def test_gradient_of_log_probs_alone():
    """Without a gradient of the divergence, backward sweeps through each head separately."""
    policy, ref = make_head(1, grad=True), make_head(2, grad=True)
    targets = make_targets()
    out = linear_pair(*policy[:2], *ref[:2], targets, chunk=(3, 17), **JS)
    want = at(plain(*policy[:2]), targets), at(plain(*ref[:2]), targets)
    assert_same((out.log_prob, out.ref_log_prob), want, (*policy[:2], *ref[:2]), (1.0, 2.0))
