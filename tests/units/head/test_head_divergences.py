"""KL in both directions and the Jensen-Shannon divergence, of two heads and of logits that exist already."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.testing import assert_close

import head_reference as reference
from closeness import assert_near
from head_reference import DIRECTIONS, INF, assert_same, jensen_shannon_of, linear_kl, make_head, pair, plain
from torchrl_llm_kl.head import logits_kl


def two(n=reference.N, h=(13, 13), seed=1, **options):
    """Random heads of a policy and a reference."""
    return make_head(seed, n=n, h=h[0], **options), make_head(seed + 1, n=n, h=h[1], **options)


def divergence(policy, ref, **options):
    return pair(policy, ref, direction="jensen_shannon", beta=0.3, **options).kl


def test_gradient_by_hand():
    """p = (1, 3)/4, q = (3, 1)/4, m uniform: d/dx_i = p_i/2 (ln(2 p_i) - KL(p, m)) = -+3/32 ln 3, d/dy the reverse."""
    one = torch.ones(1, 1)
    weights = [torch.tensor([[a], [b]]).log().requires_grad_() for a, b in ((1.0, 3.0), (3.0, 1.0))]
    value = linear_kl(one, weights[0], one, weights[1], direction="jensen_shannon")
    expected = 3 / 32 * math.log(3) * torch.tensor([[-1.0], [1.0]])
    assert_close(torch.autograd.grad(value.sum(), weights), (expected, -expected))


# ---------------------------------------------------------------------- against plain torch in float64: any shape, any tile
SHAPES = {"n": st.integers(1, 9), "v": st.integers(1, 23), "seed": st.integers(0, 2**31)}
SHAPES["tile"] = st.tuples(st.integers(1, 10), st.integers(1, 25))


@pytest.mark.parametrize("direction", DIRECTIONS)
@settings(max_examples=30, deadline=None)
@given(**SHAPES, h=st.integers(1, 5), beta=st.floats(0.01, 0.99), with_bias=st.booleans(), with_targets=st.booleans())
def test_values_and_gradients_for_any_shape_and_tile(direction, n, v, tile, seed, h, beta, with_bias, with_targets):
    policy, ref = (head[: 2 + with_bias] for head in two(n, (h, h + 1), seed, v=v, grad=True))
    targets = reference.make_targets(n, v, seed)
    options = {"direction": direction, "beta": beta}
    log_p, log_q = plain(*policy, **reference.OPTIONS), plain(*ref, **reference.REF_OPTIONS)
    want = reference.pair_of(log_p, log_q, targets, **options)[: 4 if with_targets else 1]
    given_targets = {"targets": targets, "entropy": True} if with_targets else {}
    got = [x for x in pair(policy, ref, chunk=tile, **given_targets, **options, **reference.PAIR) if x is not None]
    weights = torch.randn(len(want), n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    assert_same(got, want, (*policy, *ref), weights)


def logits_of(n=7, v=101, seed=0, dtype=torch.float64):
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(n, v, generator=rng, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(2)]


def of_logits(logits, ref_logits, direction, temperature=1.0):
    both = ((t.double() / temperature).log_softmax(-1) for t in (logits, ref_logits))
    return reference.divergence_of(*both, direction)


@pytest.mark.parametrize("direction", DIRECTIONS)
@settings(max_examples=15, deadline=None)
@given(**SHAPES, form=st.sampled_from([tuple, lambda tile: tile[0], lambda tile: None]))
def test_values_and_gradients_of_logits_for_any_shape_and_tile(direction, n, v, tile, seed, form):
    both = logits_of(n, v, seed)
    got = logits_kl(*both, direction=direction, beta=0.3, temperature=1.7, chunk=form(tile))
    weights = torch.linspace(-1, 2, n, dtype=torch.float64)
    assert_same([got], [of_logits(*both, direction, temperature=1.7)], both, [weights])


@pytest.mark.parametrize("direction", ["reverse", "jensen_shannon"])
@pytest.mark.parametrize("only", range(6))
def test_gradient_of_each_output_to_each_input_alone(only, direction):
    """An input that does not require a gradient gets none."""
    policy, ref = two()
    tensors, targets = [*policy, *ref], reference.make_targets()
    tensors[only].requires_grad_()
    got = pair(policy, ref, targets, entropy=True, direction=direction, beta=0.3, chunk=(3, 17))
    want = reference.pair_of(plain(*policy), plain(*ref), targets, direction=direction)
    nothing = 0 * tensors[only].sum()  # the policy's entropy does not depend on the reference
    for value, true in zip(got, want, strict=True):
        assert_same([value], [true + nothing], [tensors[only]])
    got.kl.sum().backward()
    assert [t.grad is not None for t in tensors] == [i == only for i in range(6)]


# ---------------------------------------------------------------------- precision and extremes
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("distance", [1e-3, 1e-2])
def test_small_divergences_keep_their_digits(distance, seed):
    """For models that nearly agree, log p - log m would lose the digits that p and m share."""
    hidden, weight = make_head(seed, n=40, h=16, v=1507, dtype=torch.float32)[:2]
    ref_weight = weight + distance * make_head(seed + 10, n=1, h=16, v=1507, dtype=torch.float32)[1]
    truth = jensen_shannon_of(plain(hidden.double(), weight.double()), plain(hidden.double(), ref_weight.double()), 0.3)
    got = divergence((hidden, weight), (hidden, ref_weight), chunk=(7, 400))
    assert got.dtype == torch.float32
    naive = jensen_shannon_of(plain(hidden, weight), plain(hidden, ref_weight), 0.3)
    assert (got - truth).square().mean() < (naive - truth).square().mean() / 4


def test_equal_models_have_divergence_zero():
    policy = make_head(dtype=torch.float32, grad=True)
    value = divergence(policy, [t.detach() for t in policy])
    assert torch.equal(value, torch.zeros(reference.N))
    assert_near(torch.autograd.grad(value.sum(), policy[1])[0], torch.zeros_like(policy[1]), size=1)


@pytest.mark.parametrize("far", [100.0, 1e4, INF])
def test_disjoint_models_have_the_entropy_of_beta(far):
    """Even if a share rounds to 1, or the ratio of the probabilities overflows."""
    for beta in (1e-9, 0.3, 1 - 1e-9):
        for dtype in (torch.float32, torch.float64):
            (one, weight), (_, ref_weight) = (reference.from_logits([x], dtype) for x in ([0.0, -far], [-far, 0.0]))
            weight.requires_grad_()
            value = linear_kl(one, weight, one, ref_weight, direction="jensen_shannon", beta=beta)
            share = 1.0 - beta
            assert_close(value, torch.tensor([-beta * math.log(beta) - share * math.log(share)], dtype=dtype))
            if far < INF:
                assert torch.autograd.grad(value.sum(), weight)[0].isfinite().all(), (beta, dtype)


@pytest.mark.parametrize("chunk", [(3, 5), (100, 200)], ids=str)
def test_tokens_that_one_or_both_rule_out(chunk):
    policy, ref = two(grad=True)
    policy[2].data[:40], ref[2].data[20:60] = -INF, -INF
    got = divergence(policy, ref, chunk=chunk)
    log_p, log_q = plain(*policy), plain(*ref)
    p, q = log_p.exp(), log_q.exp()
    m = 0.3 * q + 0.7 * p
    of_m, of_q, of_p = (torch.special.entr(x).sum(-1) for x in (m, q, p))
    assert_close(got, of_m - 0.3 * of_q - 0.7 * of_p)
    # d/dx = share * p (log p - log m - KL), 0 where p is.
    for log_dist, share, bias in ((log_p, 0.7, policy[2]), (log_q, 0.3, ref[2])):
        dist = log_dist.exp()
        ratio = (log_dist - m.log()).masked_fill(dist == 0, 0.0)
        slope = share * dist * (ratio - (dist * ratio).sum(-1, keepdim=True))
        assert_close(torch.autograd.grad(got.sum(), bias, retain_graph=True)[0], slope.sum(0).detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_adds_no_error_to_that_of_the_logits(dtype):
    policy, ref = (head[:2] for head in two(dtype=dtype, grad=True))
    want = jensen_shannon_of(plain(*policy).double(), plain(*ref).double(), 0.3)
    assert_close(divergence(policy, ref, chunk=(3, 17)).double(), want, rtol=1e-5, atol=1e-6)
    fine = divergence(policy, ref, chunk=(3, 17), product_dtype=torch.float32)
    true = jensen_shannon_of(*(plain(*(t.detach().double() for t in head)) for head in (policy, ref)), 0.3)
    assert_close(fine.double(), true, rtol=1e-5, atol=1e-6)
    assert torch.autograd.grad(fine.sum(), policy[1])[0].dtype == dtype


# ---------------------------------------------------------------------- of logits
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_dtypes_of_logits(direction):
    """No rounding beyond the given logits'; each gradient has the dtype of its logits."""
    half, full, double = torch.bfloat16, torch.float32, torch.float64
    for dtypes, expected in (((half, half), full), ((torch.float16, full), full), ((full, double), double)):
        both = [t.detach().to(dtype).requires_grad_() for t, dtype in zip(logits_of(), dtypes, strict=True)]
        got = logits_kl(*both, direction=direction, beta=0.3, chunk=(3, 40))
        want = of_logits(*both, direction)
        assert got.dtype == expected
        assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
        gradients = (torch.autograd.grad(value.sum(), both) for value in (got, want))
        for mine, theirs, dtype in zip(*gradients, dtypes, strict=True):  # equal dtypes too
            assert_close(mine, theirs, rtol=1e-2 if dtype.itemsize == 2 else 1e-5, atol=1e-5)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_gradient_to_one_alone_and_logits_that_are_not_contiguous(direction):
    for only in (0, 1):
        both = [t.detach() for t in logits_of()]
        both[only].requires_grad_()
        assert_same([logits_kl(*both, direction=direction, beta=0.3)], [of_logits(*both, direction)], [both[only]])
    strided = [t.detach().T.contiguous().T.requires_grad_() for t in logits_of()]
    got = logits_kl(*strided, direction=direction, beta=0.3, chunk=(2, 30))
    assert_same([got], [of_logits(*strided, direction)], strided)


def test_logits_are_not_mutated_and_memory_is_that_of_a_few_tiles():
    both = logits_of(n=60, v=211, dtype=torch.bfloat16)
    before = [t.detach().clone() for t in both]
    # A view of the logits' rows, tiles are smaller; and the gradients themselves.
    assert reference.largest(lambda: logits_kl(*both, chunk=(7, 13))) == (7 * 211, 60 * 211)
    assert all(torch.equal(a, b) for a, b in zip(both, before, strict=True))
