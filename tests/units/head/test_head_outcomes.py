"""Log-probs of ids and of all other tokens together, against plain torch: values and gradients."""

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
    H,
    N,
    V,
    assert_same,
    at,
    entropy_of,
    from_logits,
    make_head,
    make_targets,
    plain,
)
from torchrl_llm_kl.head import linear_log_prob, linear_outcomes, linear_top_k

ORDER = torch.Generator().manual_seed(3)


def make_ids(k, *lists, n=N, v=V):
    """``k`` different ids of each list."""
    count = torch.Size([n, *lists]).numel()
    return torch.stack([torch.randperm(v, generator=ORDER)[:k] for _ in range(count)]).reshape(n, *lists, k)


def plain_outcomes(log_p, ids):
    """From all log-probs: those at the ids, and the log of the sum of all other probabilities."""
    log_p = log_p.reshape(log_p.shape[0], *[1] * (ids.ndim - 2), -1).expand(*ids.shape[:-1], -1)
    listed = torch.zeros_like(log_p, dtype=torch.bool).scatter(-1, ids, True)
    others = log_p.masked_fill(listed, -INF).logsumexp(-1, keepdim=True)
    return torch.cat([log_p.gather(-1, ids), others], -1)


def test_by_hand():
    """Probabilities 1/2, 1/4, 1/8 and 1/8; the ids in any order."""
    hidden, weight = from_logits([[0.5, 0.25, 0.125, 0.125]], torch.float64)
    out = linear_outcomes(hidden, weight.log(), torch.tensor([1]), torch.tensor([[3, 0]]), chunk=(1, 2))
    assert_close(out.log_prob.exp(), torch.tensor([0.25]).double())
    assert_close(out.outcomes.exp(), torch.tensor([[0.125, 0.5, 0.375]]).double())
    assert out.entropy is None


@pytest.mark.parametrize(("k", "lists"), [(1, ()), (5, ()), (100, ()), (4, (2,)), (3, (2, 3))])
def test_values_and_gradients(k, lists):
    """Of each output alone, and of all together."""
    tensors, targets, ids = make_head(grad=True), make_targets(), make_ids(k, *lists)
    log_p = plain(*tensors, **OPTIONS)
    want = at(log_p, targets), entropy_of(log_p), plain_outcomes(log_p, ids)
    for chunk in ((3, 17), (7, 40), None):
        got = linear_outcomes(*tensors[:2], targets, ids, bias=tensors[2], entropy=True, chunk=chunk, **OPTIONS)
        assert got.outcomes.shape == (N, *lists, k + 1)
        upstream = [torch.randn(x.shape, generator=ORDER, dtype=torch.float64) for x in want]
        for one, expected, weights in zip(got, want, upstream, strict=True):
            assert_same([one], [expected], tensors, [weights])
        assert_same(got, want, tensors, upstream)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**20), v=st.integers(2, 9), data=st.data())
def test_gradcheck(seed, v, data):
    """Finite differences, for any vocabulary, list and tile."""
    rng = torch.Generator().manual_seed(seed)
    k = data.draw(st.integers(1, v - 1))
    inputs = tuple(torch.randn(n, 3, generator=rng, dtype=torch.float64).requires_grad_() for n in (2, v))
    ids = torch.stack([torch.randperm(v, generator=rng)[:k] for _ in range(2)])
    chunk = (1, data.draw(st.integers(1, v)))

    def value(h, w):
        return linear_outcomes(h, w, torch.zeros(2, dtype=torch.long), ids, chunk=chunk).outcomes

    assert torch.autograd.gradcheck(value, inputs)


@pytest.mark.parametrize("chunk", [(3, 17), None])
def test_the_other_functions_of_the_same_head(chunk):
    hidden, weight, bias = make_head(dtype=torch.float32)
    options = {"bias": bias, "chunk": chunk, **OPTIONS}
    top = linear_top_k(hidden, weight, 6, **options)
    out = linear_outcomes(hidden, weight, make_targets(), top.indices, entropy=True, **options)
    assert_near(out.outcomes, torch.cat([top.log_probs, top.tail_log_prob.unsqueeze(-1)], -1), terms=H, size=8)
    want = linear_log_prob(hidden, weight, make_targets(), entropy=True, **options)
    assert torch.equal(out.log_prob, want.log_prob)
    assert torch.equal(out.entropy, want.entropy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("chunk", [(1, 1), (1, 2), None])
def test_a_tail_whose_probability_underflows(dtype, chunk):
    """The others have exp(-200) and exp(-200) / 3 of the top: 0 in float32, as is one minus the top; their log is exact."""
    low = -200.0
    logits = torch.tensor([[0.0, low, low - math.log(3.0)]], dtype=dtype, requires_grad=True)
    hidden = torch.ones(1, 1, dtype=dtype)
    out = linear_outcomes(hidden, logits.T, torch.tensor([0]), torch.tensor([[0]]), chunk=chunk).outcomes
    others = low + torch.log(torch.tensor(4 / 3, dtype=torch.float64))
    assert_near(out[0, 1].double(), others, dtype=dtype)
    (gradient,) = torch.autograd.grad(out[0, 1], logits)
    assert_near(gradient, torch.tensor([[-1.0, 0.75, 0.25]], dtype=dtype), exponent=200)


@pytest.mark.parametrize("chunk", [(2, 3), None])
def test_outcomes_without_probability_have_no_gradient(chunk):
    """All tokens listed; a padding id; and others that a bias rules out. Whatever gradient arrives there is dropped."""
    hidden, weight, bias = make_head(v=5)
    bias[3:] = -INF
    ids = torch.tensor([[0, 1, 2, 3, 4], [0, 1, 2, -1, -1], [2, 0, -1, -1, -1]]).expand(N, 3, 5)
    tensors = [t.requires_grad_() for t in (hidden, weight)]
    out = linear_outcomes(*tensors, make_targets(v=3), ids, bias=bias, chunk=chunk).outcomes
    impossible = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 0]]).bool().expand(N, 3, 6)
    assert out.isneginf().equal(impossible)
    upstream = torch.randn(out.shape, generator=ORDER, dtype=torch.float64)
    log_p = plain(hidden, weight[:3], bias[:3])
    listed = [upstream[:, i, j] * log_p[:, token] for i in range(2) for j, token in enumerate((0, 1, 2))]
    # Of the third list token 1 is all that is left.
    listed += [upstream[:, 2, j] * log_p[:, token] for j, token in ((0, 2), (1, 0), (5, 1))]
    expected = torch.autograd.grad(sum(listed).sum(), tensors)
    got = torch.autograd.grad(out, tensors, upstream.masked_fill(impossible, INF))
    assert_close(got, expected)


def test_half_precision():
    """The head rounds its logits to bfloat16, as the model's does; everything after is float32."""
    hidden, weight, _ = make_head(dtype=torch.bfloat16)
    ids = make_ids(5)
    out = linear_outcomes(hidden, weight, make_targets(), ids, chunk=(3, 17)).outcomes
    assert out.dtype == torch.float32
    assert_near(out, plain_outcomes(plain(hidden, weight), ids), size=8)
