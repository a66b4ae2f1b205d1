from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.testing import assert_close

from head_reference import (
    INF,
    OPTIONS,
    PAIR,
    H,
    N,
    Sizes,
    V,
    assert_same,
    at,
    entropy_of,
    from_logits,
    kl_of,
    make_head,
    make_targets,
    plain,
)
from torchrl_llm_kl.head import linear_kl, linear_log_prob, linear_pair, linear_top_k

# ---------------------------------------------------------------------------------------------------------------------
# values by hand


def test_by_hand():
    """Logits (log 4, log 1) at scale 1/2 and temperature 1/2: probabilities 4/5, 1/5."""
    weight = torch.tensor([[4.0], [1.0]]).log()
    out = linear_log_prob(torch.ones(2, 1), weight, torch.tensor([0, 1]), scale=0.5, temperature=0.5, entropy=True)
    assert_close(out.log_prob, torch.tensor([math.log(0.8), math.log(0.2)]))
    assert_close(out.entropy, torch.full((2,), -0.8 * math.log(0.8) - 0.2 * math.log(0.2)))


def test_kl_by_hand():
    """(1/2, 1/2) against (3/4, 1/4)."""
    one, weight, ref_weight = torch.ones(1, 1), torch.zeros(2, 1), torch.tensor([[3.0], [1.0]]).log()
    for direction, expected in (("reverse", math.log(2 / math.sqrt(3))), ("forward", 0.130812)):
        assert_close(linear_kl(one, weight, one, ref_weight, direction=direction), torch.tensor([expected]))


def test_gradient_by_hand():
    """Probabilities (3/4, 1/4): d log p_0 / d logits = (1/4, -1/4); d H / d logits = -p (log p + H)."""
    weight = torch.tensor([[3.0], [1.0]]).log().requires_grad_()
    out = linear_log_prob(torch.ones(1, 1), weight, torch.tensor([0]), entropy=True)
    (of_log_prob,) = torch.autograd.grad(out.log_prob, weight, retain_graph=True)
    (of_entropy,) = torch.autograd.grad(out.entropy, weight)
    assert_close(of_log_prob, torch.tensor([[0.25], [-0.25]]))
    slope = 0.75 * 0.25 * math.log(3)
    assert_close(of_entropy, torch.tensor([[-slope], [slope]]))


def test_top_k_by_hand():
    weight = torch.tensor([[1.0], [5.0], [2.0], [8.0]]).log()
    top = linear_top_k(torch.ones(1, 1), weight, 2, chunk=(1, 1))
    assert top.indices.tolist() == [[3, 1]]
    assert_close(top.log_probs.exp(), torch.tensor([[0.5, 0.3125]]))
    assert_close(top.tail_log_prob.exp(), torch.tensor([0.1875]))


# ---------------------------------------------------------------------------------------------------------------------
# against plain torch in float64: any shape, any tile


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 9),
    h=st.integers(1, 5),
    v=st.integers(1, 23),
    chunk=st.tuples(st.integers(1, 10), st.integers(1, 25)),
    forward=st.booleans(),
    with_bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_values_and_gradients_for_any_shape_and_tile(n, h, v, chunk, forward, with_bias, seed):
    policy = make_head(seed, n=n, h=h, v=v, grad=True)[: 3 if with_bias else 2]
    ref = make_head(seed + 1, n=n, h=h + 1, v=v, grad=True)[: 3 if with_bias else 2]
    targets = make_targets(n, v, seed)
    biases = {"bias": policy[2], "ref_bias": ref[2]} if with_bias else {}
    direction = "forward" if forward else "reverse"
    got = linear_pair(*policy[:2], *ref[:2], targets, direction=direction, entropy=True, chunk=chunk, **biases, **PAIR)
    log_p, log_q = plain(*policy, **OPTIONS), plain(*ref, temperature=1.7, scale=1.3, soft_cap=3.0)
    kl = kl_of(log_q, log_p) if forward else kl_of(log_p, log_q)
    weights = torch.randn(4, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    want = (kl, at(log_p, targets), at(log_q, targets), entropy_of(log_p))
    assert_same(got, want, (*policy, *ref), weights)


def test_gradcheck_log_prob_and_entropy():
    targets = make_targets(3, 7)
    for options in ({}, OPTIONS):

        def run(h, w, b, options=options):
            return tuple(linear_log_prob(h, w, targets, bias=b, entropy=True, chunk=(2, 4), **options))

        assert torch.autograd.gradcheck(run, tuple(make_head(n=3, h=2, v=7, grad=True)))


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_gradcheck_kl(direction):
    policy, ref = make_head(1, n=3, h=3, v=7, grad=True), make_head(2, n=3, h=2, v=7, grad=True)

    def run(h, w, b, rh, rw, rb):
        return linear_kl(h, w, rh, rw, bias=b, ref_bias=rb, direction=direction, chunk=(2, 4), **PAIR)

    assert torch.autograd.gradcheck(run, (*policy, *ref))


@pytest.mark.parametrize("only", range(6))
def test_gradient_of_each_output_to_each_input_alone(only):
    """An input that does not require a gradient gets none."""
    tensors = [*make_head(1), *make_head(2)]
    tensors[only].requires_grad_()
    h, w, b, rh, rw, rb = tensors
    targets = make_targets()
    got = linear_pair(h, w, rh, rw, targets, bias=b, ref_bias=rb, entropy=True, chunk=(3, 17))
    log_p, log_q = plain(h, w, b), plain(rh, rw, rb)
    want = (kl_of(log_p, log_q), at(log_p, targets), at(log_q, targets), entropy_of(log_p))
    nothing = 0 * tensors[only].sum()  # the policy's entropy does not depend on the reference
    for value, true in zip(got, want, strict=True):
        assert_same([value], [true + nothing], [tensors[only]])
    got.kl.sum().backward()
    assert [t.grad is not None for t in tensors] == [i == only for i in range(6)]


@pytest.mark.parametrize("k", [1, 5, 60, V])
def test_top_k_against_sorted_log_probs(k):
    hidden, weight, bias = make_head()
    targets = make_targets()
    log_p, order = plain(hidden, weight, bias, **OPTIONS).sort(-1, descending=True)
    for chunk in ((3, 17), (100, 1000), None):
        top = linear_top_k(hidden, weight, k, bias=bias, chunk=chunk, **OPTIONS)
        assert torch.equal(top.indices, order[:, :k])
        assert_close(top.log_probs, log_p[:, :k])
        assert_close(top.tail_log_prob, log_p[:, k:].logsumexp(-1))
        assert top.log_prob is None
        with_targets = linear_top_k(hidden, weight, k, targets, bias=bias, chunk=chunk, **OPTIONS)
        assert_close(with_targets.log_prob, at(plain(hidden, weight, bias, **OPTIONS), targets))
        assert torch.equal(with_targets.indices, top.indices)


# ---------------------------------------------------------------------------------------------------------------------
# precision: no more error than plain torch in the same dtype


def worst(got, truth):
    return (got.double() - truth).abs().max().item()


def typical(got, truth):
    """Root mean square error: the worst element depends on chance."""
    return (got.double() - truth).square().mean().sqrt().item()


NAMES = ("kl", "log_prob", "ref_log_prob", "entropy", "d hidden", "d weight", "d ref_hidden", "d ref_weight")


@pytest.mark.parametrize(
    ("dtype", "product_dtype", "rounded_parts"),
    [
        (torch.float32, None, 1.0),
        (torch.bfloat16, None, 2**0.5),
        (torch.float16, None, 2**0.5),
        (torch.bfloat16, torch.float32, 1.0),
        (torch.float16, torch.float32, 1.0),
    ],
    ids=str,
)
def test_no_more_error_than_plain_torch(dtype, product_dtype, rounded_parts):
    """Except for gradients in half precision: each tile's part is rounded, then the sum, where torch rounds once."""
    n, h, v = 123, 64, 1507
    targets = make_targets(n, v)

    def with_gradients(outputs, inputs):
        total = sum((output / (i + 1)).sum() for i, output in enumerate(outputs))
        return (*outputs, *torch.autograd.grad(total, inputs))

    def by_torch(inputs):
        log_p, log_q = plain(*inputs[:2]), plain(*inputs[2:])
        values = (kl_of(log_p, log_q), at(log_p, targets), at(log_q, targets), entropy_of(log_p))
        return with_gradients(values, inputs)

    for size in (0.3, 3.0):  # flat, peaked
        hidden, weight = make_head(3, n=n, h=h, v=v, dtype=dtype)[:2]
        policy = (hidden, weight * (size * h**-0.5))
        ref = (hidden + 0.3 * make_head(4, n=n, h=h, v=v, dtype=dtype)[0], policy[1].clone())
        inputs = [t.requires_grad_() for t in (*policy, *ref)]
        truth = by_torch([t.detach().double().requires_grad_() for t in inputs])
        ours = linear_pair(*inputs, targets, entropy=True, chunk=(50, 400), product_dtype=product_dtype)
        assert all(value.dtype == torch.float32 for value in ours)
        everything = zip(NAMES, with_gradients(ours, inputs), by_torch(inputs), truth, strict=True)
        for name, head, other, true in everything:
            factor = rounded_parts if name.startswith("d ") else 1.0
            assert typical(head, true) <= 1.05 * factor * typical(other, true), (name, size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_float32_product_of_half_precision(dtype):
    """Only float32 rounding is left: a hundred times closer than logits in half precision."""
    hidden, weight, bias = make_head(n=50, dtype=dtype, grad=True)
    targets = make_targets(50)
    options = {"bias": bias, "entropy": True, "chunk": (16, 40), **OPTIONS}
    truth = plain(*(t.detach().double() for t in (hidden, weight, bias)), **OPTIONS)
    fine = linear_log_prob(hidden, weight, targets, product_dtype=torch.float32, **options)
    coarse = linear_log_prob(hidden, weight, targets, **options)
    for got, rough, true in zip(fine, coarse, (at(truth, targets), entropy_of(truth)), strict=True):
        assert worst(got, true) < 1e-5
        assert 100 * worst(got, true) < worst(rough, true) < 0.1
    (fine.log_prob + fine.entropy).sum().backward()
    assert [t.grad.dtype for t in (hidden, weight, bias)] == [dtype] * 3


def test_weight_gradient_is_summed_in_float32():
    """1,024 times 0.5: a sum in bfloat16 would stop growing at 128."""
    n = 1024
    hidden = torch.ones(n, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    linear_log_prob(hidden, weight, torch.zeros(n, dtype=torch.long), chunk=(1, 1)).log_prob.sum().backward()
    assert weight.grad.tolist() == [[n / 2], [-n / 2]]


def test_autocast_multiplies_as_the_model_does():
    hidden, weight, _ = make_head(dtype=torch.float32, grad=True)
    targets = make_targets()
    half = linear_log_prob(hidden.bfloat16(), weight.bfloat16(), targets, entropy=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = linear_log_prob(hidden, weight, targets, entropy=True)
        mixed = linear_log_prob(hidden.bfloat16(), weight, targets, entropy=True)
        double = linear_log_prob(hidden.double(), weight.double(), targets)
    assert double.log_prob.dtype == torch.float64
    assert torch.equal(got.log_prob, half.log_prob)
    assert torch.equal(mixed.entropy, half.entropy)
    (gradient,) = torch.autograd.grad(got.log_prob.sum(), weight)
    assert gradient.dtype == torch.float32


def test_product_dtype_wins_over_autocast():
    hidden, weight, _ = make_head(dtype=torch.float32, grad=True)

    def value_and_gradients(product_dtype):
        out = linear_log_prob(hidden, weight, make_targets(), product_dtype=product_dtype).log_prob
        return (out, *torch.autograd.grad(out.sum(), (hidden, weight)))

    for product_dtype in (torch.float32, torch.float16):
        want = value_and_gradients(product_dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = value_and_gradients(product_dtype)
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True)), product_dtype


# ---------------------------------------------------------------------------------------------------------------------
# extremes


EXTREME = {
    "equal": torch.zeros(1, 40),
    "equal and large": torch.full((1, 40), 1e4),
    "equal and very negative": torch.full((1, 40), -1e4),
    "both signs": torch.tensor([[1e4, -1e4] * 20]),
    "one dominates": torch.tensor([[0.0] * 30 + [1e4] + [0.0] * 9]),
    "one is far below": torch.tensor([[0.0] * 30 + [-1e4] + [0.0] * 9]),
    "rising": torch.arange(40.0)[None] * 300,
    "falling": -torch.arange(40.0)[None] * 300,
    "large with an offset": 1e4 + torch.arange(40.0)[None],
}


@pytest.mark.parametrize("name", EXTREME)
def test_extreme_logits(name):
    hidden, weight = (t.requires_grad_() for t in from_logits(EXTREME[name]))
    ref_hidden, ref_weight = from_logits(EXTREME["large with an offset"])
    log_p = plain(hidden, weight)
    want_kl = kl_of(log_p, plain(ref_hidden, ref_weight))
    for target, chunk in ((0, (1, 7)), (29, (1, 64)), (30, (1, 7)), (39, (1, 64)), (39, (1, 7))):
        targets = torch.tensor([target])
        got = linear_pair(hidden, weight, ref_hidden, ref_weight, targets, entropy=True, chunk=chunk)
        # The hidden state is 1: the weight's gradient is that of the logits, without cancellation.
        found = (got.log_prob, got.entropy, got.kl)
        assert_same(found, (at(log_p, targets), entropy_of(log_p), want_kl), [weight], (1.0, 2.0, 3.0))


@pytest.mark.parametrize("ruled_out", [slice(0, 30), slice(60, None), slice(0, None, 2)], ids=str)
def test_bias_of_minus_infinity_is_a_smaller_vocabulary(ruled_out):
    """Even if a whole tile, the first or the last, is ruled out."""
    policy, ref = make_head(1, grad=True), make_head(2, grad=True)
    for bias in (policy[2], ref[2]):
        bias.data[ruled_out] = -INF
    allowed = torch.ones(V, dtype=torch.bool)
    allowed[ruled_out] = False
    targets = allowed.nonzero().squeeze(1)[:N]
    kept = torch.cumsum(allowed, 0)[targets] - 1
    heads = {"bias": policy[2], "ref_bias": ref[2]}
    small = {"bias": policy[2][allowed], "ref_bias": ref[2][allowed]}
    want = linear_pair(policy[0], policy[1][allowed], ref[0], ref[1][allowed], kept, entropy=True, **small)
    for chunk in ((3, 5), (100, 200)):
        got = linear_pair(*policy[:2], *ref[:2], targets, entropy=True, chunk=chunk, **heads)
        assert_same(got, want, (*policy, *ref))
        top = linear_top_k(*policy[:2], int(allowed.sum()), bias=policy[2], chunk=chunk)
        assert allowed[top.indices].all()
        assert torch.equal(top.tail_log_prob, torch.full((N,), -INF, dtype=torch.float64))


def test_target_of_probability_zero():
    hidden, weight, bias = make_head(dtype=torch.float32)
    bias[5] = -INF
    log_p, log_q = plain(hidden, weight, bias), plain(hidden, weight)
    for chunk in ((2, 1), (2, 3), (100, 200)):
        out = linear_log_prob(hidden, weight, torch.full((N,), 5), bias=bias, chunk=chunk)
        assert torch.equal(out.log_prob, torch.full((N,), -INF))
        # Ruled out by the first distribution of the KL alone: no contribution. By the second alone: infinite.
        assert_close(linear_kl(hidden, weight, hidden, weight, bias=bias, chunk=chunk), kl_of(log_p, log_q))
        assert linear_kl(hidden, weight, hidden, weight, ref_bias=bias, chunk=chunk).isposinf().all()
        forward = linear_kl(hidden, weight, hidden, weight, direction="forward", bias=bias, chunk=chunk)
        assert forward.isposinf().all()
    # A token ruled out by one and of probability zero by the other: exp(-200) is 0 in float32, in whichever tile.
    (one, weight), (_, ref_weight) = from_logits([[-200.0, 0.0, 0.0, -200.0]]), from_logits([[-INF, 0.0, 0.0, -INF]])
    for chunk in ((1, 1), (1, 2), (1, 4)):
        assert_close(linear_kl(one, weight, one, ref_weight, chunk=chunk), torch.zeros(1))


def test_tail_of_top_k_is_exact_where_one_minus_is_zero():
    hidden, weight = from_logits([[0.0, -80.0, -80.0, -200.0]])
    top = linear_top_k(hidden, weight, 1)
    assert_close(top.tail_log_prob, torch.tensor([math.log(2) - 80.0]))
    hidden, weight = from_logits([[1e4 + 4, 1e4 + 2, 1e4, 1e4]])
    top = linear_top_k(hidden, weight, 2, chunk=(1, 2))
    total = math.log(math.exp(4) + math.exp(2) + 2)
    assert_close(top.log_probs, torch.tensor([[4 - total, 2 - total]]))
    assert_close(top.tail_log_prob, torch.tensor([math.log(2) - total]))


def test_no_positions():
    hidden, weight, bias = make_head(n=0, grad=True)
    out = linear_log_prob(hidden, weight, make_targets(0), bias=bias, entropy=True)
    assert out.log_prob.shape == out.entropy.shape == (0,)
    (out.log_prob + out.entropy).sum().backward()
    assert_close(weight.grad, torch.zeros_like(weight))
    assert_close(bias.grad, torch.zeros_like(bias))
    assert hidden.grad.shape == (0, H)
    assert linear_kl(hidden, weight, hidden, weight).shape == (0,)
    assert linear_top_k(hidden, weight, 3).log_probs.shape == (0, 3)


def test_targets_of_any_integer_dtype():
    hidden, weight, _ = make_head()
    targets = make_targets()
    want = linear_log_prob(hidden, weight, targets, chunk=(2, 30)).log_prob
    for dtype in (torch.int32, torch.uint8):
        assert torch.equal(linear_log_prob(hidden, weight, targets.to(dtype), chunk=(2, 30)).log_prob, want)


def test_hidden_states_that_are_not_contiguous():
    hidden, weight, _ = make_head(dtype=torch.float32)
    targets = make_targets()
    h, w = hidden.T.contiguous().T.requires_grad_(), weight.T.contiguous().T.requires_grad_()
    got = linear_log_prob(h, w, targets, entropy=True, chunk=(3, 17))
    assert_same(got, (at(plain(h, w), targets), entropy_of(plain(h, w))), (h, w))


# ---------------------------------------------------------------------------------------------------------------------
# memory, graphs


def test_memory_is_that_of_a_few_tiles():
    n, h, v, chunk = 60, 2, 211, (7, 13)
    targets = make_targets(n, v)
    allowed = max(8 * chunk[0] * chunk[1], v * h)
    assert allowed < n * v / 10
    for dtype in (torch.float32, torch.bfloat16):
        policy, ref = make_head(1, n=n, h=h, v=v, dtype=dtype, grad=True), make_head(2, n=n, h=h, v=v, dtype=dtype)
        biases = {"bias": policy[2], "ref_bias": ref[2]}
        with Sizes() as forward:
            out = linear_pair(*policy[:2], *ref[:2], targets, entropy=True, chunk=chunk, **biases, **PAIR)
        with Sizes() as backward:
            torch.stack(list(out)).sum().backward()
        with Sizes() as top:
            linear_top_k(*policy[:2], 5, chunk=chunk)
        assert 0 < max(forward.largest, backward.largest, top.largest) <= allowed, dtype
        with Sizes() as control:
            plain(*policy)
        assert control.largest == n * v


def test_no_graph_without_gradient():
    hidden, weight, bias = make_head(grad=True)
    with torch.no_grad():
        out = linear_pair(hidden, weight, hidden, weight, make_targets(), bias=bias, entropy=True)
    assert all(t.grad_fn is None and not t.requires_grad for t in out)
    frozen = [t.detach() for t in (hidden, weight)]
    assert not linear_log_prob(*frozen, make_targets()).log_prob.requires_grad
    assert not linear_top_k(hidden, weight, 3).log_probs.requires_grad
    with torch.inference_mode():
        inside = linear_log_prob(hidden, weight, make_targets(), bias=bias, entropy=True)
    assert_close(inside.log_prob, at(plain(hidden, weight, bias), make_targets()).detach())


def test_arguments_are_not_mutated():
    tensors = [*make_head(1), *make_head(2)]
    before = [t.clone() for t in tensors]
    linear_pair(*tensors[:2], *tensors[3:5], make_targets(), bias=tensors[2], ref_bias=tensors[5], chunk=(3, 17))
    linear_top_k(*tensors[:2], 4, bias=tensors[2], chunk=(3, 17))
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_second_derivative_is_refused():
    hidden, weight, _ = make_head(grad=True)
    factor = torch.ones(N, dtype=torch.float64, requires_grad=True)
    value = (linear_log_prob(hidden, weight, make_targets()).log_prob * factor).sum()
    (gradient,) = torch.autograd.grad(value, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("direction", ["reverse", "forward", "jensen_shannon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_cuda_without_synchronisation(dtype, direction):
    policy, ref = make_head(1, dtype=dtype), make_head(2, dtype=dtype)
    options = {"entropy": True, "direction": direction, "beta": 0.3}
    want = linear_pair(*policy[:2], *ref[:2], make_targets(), bias=policy[2], ref_bias=ref[2], **options)
    want_top = linear_top_k(*policy[:2], 5)
    on_device = [t.cuda().requires_grad_() for t in (*policy, *ref)]
    targets = make_targets().cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        h, w, b, rh, rw, rb = on_device
        got = linear_pair(h, w, rh, rw, targets, bias=b, ref_bias=rb, chunk=(3, 17), **options)
        torch.stack(list(got)).sum().backward()
        top = linear_top_k(h, w, 5, chunk=(3, 17))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    for g, w_ in zip(got, want, strict=True):
        assert_close(g.cpu(), w_, **tolerance)
    assert_close(top.log_probs.cpu(), want_top.log_probs, **tolerance)


# ---------------------------------------------------------------------------------------------------------------------
# errors

HIDDEN, WEIGHT, BIAS = (t.float() for t in make_head())
TARGETS = make_targets()


ERRORS = [
    # of what linear_log_prob, linear_top_k or linear_kl is given
    ((HIDDEN[None], WEIGHT, TARGETS), {}, r"\(1, 7, 13\).*\(101, 13\).*\[N, H\]"),
    ((HIDDEN, WEIGHT[:, 1:], TARGETS), {}, r"\(7, 13\).*\(101, 12\)"),
    ((HIDDEN, WEIGHT[:0], TARGETS), {}, "V at least 1"),
    ((HIDDEN, WEIGHT, TARGETS), {"bias": BIAS[1:]}, r"bias.*\(100,\).*\(101,\)"),
    ((HIDDEN, WEIGHT, TARGETS[1:]), {}, r"targets.*\(6,\).*\(7,\)"),
    ((HIDDEN, WEIGHT, TARGETS.float()), {}, "targets has dtype torch.float32.*integer"),
    ((HIDDEN, WEIGHT, TARGETS - 200), {}, "from -.*0 to 100"),
    ((HIDDEN, WEIGHT, TARGETS * 0 + V), {}, "from 101 to 101; expected 0 to 100"),
    ((HIDDEN, WEIGHT.double(), TARGETS), {}, "float32.*float64.*product_dtype"),
    ((HIDDEN.long(), WEIGHT, TARGETS), {}, "hidden has dtype torch.int64"),
    ((HIDDEN, WEIGHT, TARGETS), {"product_dtype": torch.int8}, "product_dtype is"),
    ((HIDDEN, WEIGHT, TARGETS), {"temperature": 0.0}, "temperature.*got 0.0"),
    ((HIDDEN, WEIGHT, TARGETS), {"temperature": -1}, "temperature.*got -1"),
    ((HIDDEN, WEIGHT, TARGETS), {"temperature": math.nan}, "temperature.*got nan"),
    ((HIDDEN, WEIGHT, TARGETS), {"soft_cap": 0.0}, "soft_cap.*None.*got 0.0"),
    ((HIDDEN, WEIGHT, TARGETS), {"chunk": (0, 5)}, r"chunk is \(0, 5\)"),
    ((HIDDEN, WEIGHT, V + 1), {}, "k is 102; expected 1 to 101"),
    ((HIDDEN, WEIGHT, 0), {}, "k is 0"),
    ((HIDDEN, WEIGHT, 5, TARGETS + V), {}, "targets holds token ids"),
    ((HIDDEN, WEIGHT, HIDDEN, WEIGHT[1:]), {}, "101 tokens but ref_weight one of 100"),
    ((HIDDEN, WEIGHT, HIDDEN[1:], WEIGHT), {}, "7 positions but ref_hidden holds 6"),
    ((HIDDEN, WEIGHT, HIDDEN, WEIGHT), {"direction": "up"}, "'reverse'.*got 'up'"),
    ((HIDDEN, WEIGHT, HIDDEN, WEIGHT), {"ref_soft_cap": -2.0}, "ref_soft_cap.*-2.0"),
    ((HIDDEN, WEIGHT, HIDDEN.double(), WEIGHT.double()), {}, "float32.*float64"),
]


@pytest.mark.parametrize("number", range(len(ERRORS)))
def test_error_messages(number):
    arguments, options, message = ERRORS[number]
    function = linear_top_k if isinstance(arguments[2], int) else linear_log_prob if len(arguments) == 3 else linear_kl
    error = TypeError if any(word in message for word in ("dtype", "float64")) else ValueError
    with pytest.raises(error, match=message):
        function(*arguments, **options)
