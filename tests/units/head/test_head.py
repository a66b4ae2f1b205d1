from __future__ import annotations

import doctest
import importlib
import math
import pkgutil

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
    at,
    entropy_of,
    from_logits,
    kl_of,
    make_head,
    make_targets,
    plain,
)
from torchrl_llm_kl import head as package
from torchrl_llm_kl.head import linear_kl, linear_log_prob, linear_pair, linear_top_k

# ---------------------------------------------------------------------------------------------------------------------
# values by hand


def test_by_hand():
    """Logits (log 4, log 1) at scale 1/2 and temperature 1/2: probabilities 4/5, 1/5."""
    weight = torch.tensor([[4.0], [1.0]]).log()
    out = linear_log_prob(torch.ones(2, 1), weight, torch.tensor([0, 1]), scale=0.5, temperature=0.5, entropy=True)
    assert_close(out.log_prob, torch.tensor([math.log(0.8), math.log(0.2)]))
    assert_close(out.entropy, torch.full((2,), -0.8 * math.log(0.8) - 0.2 * math.log(0.2)))


@pytest.mark.parametrize(("direction", "expected"), [("reverse", math.log(2 / math.sqrt(3))), ("forward", 0.130812)])
def test_kl_by_hand(direction, expected):
    """(1/2, 1/2) against (3/4, 1/4)."""
    one, weight, ref_weight = torch.ones(1, 1), torch.zeros(2, 1), torch.tensor([[3.0], [1.0]]).log()
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
    want = (kl, at(log_p, targets), at(log_q, targets), entropy_of(log_p))
    for g, w in zip(got, want, strict=True):
        assert_close(g, w)
    weights = torch.randn(4, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    inputs = (*policy, *ref)
    got_grads = torch.autograd.grad((torch.stack(list(got)) * weights).sum(), inputs)
    want_grads = torch.autograd.grad((torch.stack(want) * weights).sum(), inputs)
    for g, w in zip(got_grads, want_grads, strict=True):
        assert_close(g, w)


@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "options"])
def test_gradcheck_log_prob_and_entropy(options):
    hidden, weight, bias = make_head(n=3, h=4, v=11, grad=True)
    targets = make_targets(3, 11)

    def run(h, w, b):
        return tuple(linear_log_prob(h, w, targets, bias=b, entropy=True, chunk=(2, 4), **options))

    assert torch.autograd.gradcheck(run, (hidden, weight, bias))


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_gradcheck_kl(direction):
    policy, ref = make_head(1, n=3, h=4, v=11, grad=True), make_head(2, n=3, h=2, v=11, grad=True)

    def run(h, w, b, rh, rw, rb):
        return linear_kl(h, w, rh, rw, bias=b, ref_bias=rb, direction=direction, chunk=(2, 4), **PAIR)

    assert torch.autograd.gradcheck(run, (*policy, *ref))


@pytest.mark.parametrize("only", range(6))
@pytest.mark.parametrize("output", range(4))
def test_gradient_of_each_output_to_each_input_alone(output, only):
    """An input that does not require a gradient gets none."""
    tensors = [*make_head(1), *make_head(2)]
    tensors[only].requires_grad_()
    h, w, b, rh, rw, rb = tensors
    targets = make_targets()
    value = linear_pair(h, w, rh, rw, targets, bias=b, ref_bias=rb, entropy=True, chunk=(3, 17))[output]
    (got,) = torch.autograd.grad(value.sum(), tensors[only], retain_graph=True)
    log_p, log_q = plain(h, w, b), plain(rh, rw, rb)
    true = (kl_of(log_p, log_q), at(log_p, targets), at(log_q, targets), entropy_of(log_p))[output].sum()
    true = true + 0 * tensors[only].sum()  # the policy's entropy does not depend on the reference
    assert_close(got, torch.autograd.grad(true, tensors[only])[0])
    value.sum().backward()
    assert [t.grad is not None for t in tensors] == [i == only for i in range(6)]


@pytest.mark.parametrize("k", [1, 5, 60, V])
@pytest.mark.parametrize("chunk", [(3, 17), (100, 1000)])
def test_top_k_against_sorted_log_probs(k, chunk):
    hidden, weight, bias = make_head()
    top = linear_top_k(hidden, weight, k, bias=bias, chunk=chunk, **OPTIONS)
    log_p, order = plain(hidden, weight, bias, **OPTIONS).sort(-1, descending=True)
    assert torch.equal(top.indices, order[:, :k])
    assert_close(top.log_probs, log_p[:, :k])
    assert_close(top.tail_log_prob, log_p[:, k:].logsumexp(-1))
    assert top.log_prob is None


@pytest.mark.parametrize("chunk", [(3, 17), (100, 1000), None])
def test_log_probs_from_the_sweep_of_the_top_k(chunk):
    hidden, weight, bias = make_head()
    targets = make_targets()
    top = linear_top_k(hidden, weight, 5, targets, bias=bias, chunk=chunk, **OPTIONS)
    assert_close(top.log_prob, at(plain(hidden, weight, bias, **OPTIONS), targets))
    assert torch.equal(top.indices, linear_top_k(hidden, weight, 5, bias=bias, chunk=chunk, **OPTIONS).indices)
    with pytest.raises(ValueError, match="targets holds token ids"):
        linear_top_k(hidden, weight, 5, targets + V, bias=bias)


# ---------------------------------------------------------------------------------------------------------------------
# precision: no more error than plain torch in the same dtype


def worst(got, truth):
    return (got.double() - truth).abs().max().item()


def typical(got, truth):
    """Root mean square error: the worst element depends on chance."""
    return (got.double() - truth).square().mean().sqrt().item()


NAMES = ("kl", "log_prob", "ref_log_prob", "entropy", "d hidden", "d weight", "d ref_hidden", "d ref_weight")


@pytest.mark.parametrize("size", [0.3, 3.0], ids=["flat", "peaked"])
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
def test_no_more_error_than_plain_torch(dtype, product_dtype, rounded_parts, size):
    """Except for gradients in half precision: each tile's part is rounded, then the sum, where torch rounds once."""
    n, h, v = 123, 64, 1507
    policy = [t * s for t, s in zip(make_head(3, n=n, h=h, v=v, dtype=dtype)[:2], (1.0, size * h**-0.5), strict=True)]
    ref = [policy[0] + 0.3 * make_head(4, n=n, h=h, v=v, dtype=dtype)[0], policy[1].clone()]
    targets = make_targets(n, v)

    def with_gradients(outputs, inputs):
        total = sum((output / (i + 1)).sum() for i, output in enumerate(outputs))
        return (*outputs, *torch.autograd.grad(total, inputs))

    def by_torch(inputs):
        log_p, log_q = plain(*inputs[:2]), plain(*inputs[2:])
        values = (kl_of(log_p, log_q), at(log_p, targets), at(log_q, targets), entropy_of(log_p))
        return with_gradients(values, inputs)

    inputs = [t.requires_grad_() for t in (*policy, *ref)]
    truth = by_torch([t.detach().double().requires_grad_() for t in inputs])
    ours = linear_pair(*inputs, targets, entropy=True, chunk=(50, 400), product_dtype=product_dtype)
    assert all(value.dtype == torch.float32 for value in ours)
    everything = zip(NAMES, with_gradients(ours, inputs), by_torch(inputs), truth, strict=True)
    for name, head, other, true in everything:
        factor = rounded_parts if name.startswith("d ") else 1.0
        assert typical(head, true) <= 1.05 * factor * typical(other, true), name


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


@pytest.mark.parametrize("product_dtype", [torch.float32, torch.float16], ids=str)
def test_product_dtype_wins_over_autocast(product_dtype):
    hidden, weight, _ = make_head(dtype=torch.float32, grad=True)

    def value_and_gradients():
        out = linear_log_prob(hidden, weight, make_targets(), product_dtype=product_dtype).log_prob
        return (out, *torch.autograd.grad(out.sum(), (hidden, weight)))

    want = value_and_gradients()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = value_and_gradients()
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


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
@pytest.mark.parametrize("chunk", [(1, 7), (1, 64)], ids=str)
def test_extreme_logits(name, chunk):
    hidden, weight = (t.requires_grad_() for t in from_logits(EXTREME[name]))
    ref_hidden, ref_weight = from_logits(EXTREME["large with an offset"])
    rows = [torch.tensor([t]) for t in (0, 29, 30, 39)]
    log_p = plain(hidden, weight)
    want_kl = kl_of(log_p, plain(ref_hidden, ref_weight))
    for targets in rows:
        got = linear_pair(hidden, weight, ref_hidden, ref_weight, targets, entropy=True, chunk=chunk)
        assert_close(got.log_prob, at(log_p, targets))
        assert_close(got.entropy, entropy_of(log_p))
        assert_close(got.kl, want_kl)
        # The hidden state is 1: the weight's gradient is that of the logits, without cancellation.
        (got_grad,) = torch.autograd.grad(got.log_prob + 2 * got.entropy + 3 * got.kl, weight)
        want_value = at(log_p, targets) + 2 * entropy_of(log_p) + 3 * want_kl
        (want_grad,) = torch.autograd.grad(want_value, weight, retain_graph=True)
        assert_close(got_grad, want_grad)


@pytest.mark.parametrize("chunk", [(3, 5), (100, 200)], ids=str)
@pytest.mark.parametrize("ruled_out", [slice(0, 30), slice(60, None), slice(0, None, 2)], ids=str)
def test_bias_of_minus_infinity_is_a_smaller_vocabulary(ruled_out, chunk):
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
    got = linear_pair(*policy[:2], *ref[:2], targets, entropy=True, chunk=chunk, **heads)
    want = linear_pair(policy[0], policy[1][allowed], ref[0], ref[1][allowed], kept, entropy=True, **small)
    for g, w in zip(got, want, strict=True):
        assert_close(g, w)
    inputs = (*policy, *ref)
    for g, w in zip(*(torch.autograd.grad(torch.stack(list(o)).sum(), inputs) for o in (got, want)), strict=True):
        assert_close(g, w)
    top = linear_top_k(*policy[:2], int(allowed.sum()), bias=policy[2], chunk=chunk)
    assert allowed[top.indices].all()
    assert torch.equal(top.tail_log_prob, torch.full((N,), -INF, dtype=torch.float64))


@pytest.mark.parametrize("chunk", [(2, 1), (2, 3), (100, 200)], ids=str)
def test_target_of_probability_zero(chunk):
    hidden, weight, bias = make_head(dtype=torch.float32)
    bias[5] = -INF
    targets = torch.full((N,), 5)
    out = linear_log_prob(hidden, weight, targets, bias=bias, chunk=chunk)
    assert torch.equal(out.log_prob, torch.full((N,), -INF))
    # Ruled out by the first distribution of the KL alone: no contribution. By the second alone: infinite.
    log_p, log_q = plain(hidden, weight, bias), plain(hidden, weight)
    assert_close(linear_kl(hidden, weight, hidden, weight, bias=bias, chunk=chunk), kl_of(log_p, log_q))
    assert linear_kl(hidden, weight, hidden, weight, ref_bias=bias, chunk=chunk).isposinf().all()
    forward = linear_kl(hidden, weight, hidden, weight, direction="forward", bias=bias, chunk=chunk)
    assert forward.isposinf().all()


@pytest.mark.parametrize("chunk", [(1, 1), (1, 2), (1, 4)], ids=str)
def test_a_token_ruled_out_by_one_and_of_probability_zero_by_the_other(chunk):
    """exp(-200) is 0 in float32, in whichever tile."""
    (one, weight), (_, ref_weight) = from_logits([[-200.0, 0.0, 0.0, -200.0]]), from_logits([[-INF, 0.0, 0.0, -INF]])
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


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8], ids=str)
def test_targets_of_any_integer_dtype(dtype):
    hidden, weight, _ = make_head()
    targets = make_targets()
    got = linear_log_prob(hidden, weight, targets.to(dtype), chunk=(2, 30)).log_prob
    assert torch.equal(got, linear_log_prob(hidden, weight, targets, chunk=(2, 30)).log_prob)


def test_hidden_states_that_are_not_contiguous():
    hidden, weight, _ = make_head(dtype=torch.float32)
    targets = make_targets()
    want = linear_log_prob(hidden, weight, targets, entropy=True)
    h, w = hidden.T.contiguous().T.requires_grad_(), weight.T.contiguous().T.requires_grad_()
    got = linear_log_prob(h, w, targets, entropy=True, chunk=(3, 17))
    assert_close(tuple(got), tuple(want))
    got.log_prob.sum().backward()
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    at(plain(hidden, weight), targets).sum().backward()
    assert_close((h.grad, w.grad), (hidden.grad, weight.grad))


# ---------------------------------------------------------------------------------------------------------------------
# memory, graphs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_is_that_of_a_few_tiles(dtype):
    n, h, v, chunk = 60, 2, 211, (7, 13)
    policy, ref = make_head(1, n=n, h=h, v=v, dtype=dtype, grad=True), make_head(2, n=n, h=h, v=v, dtype=dtype)
    targets = make_targets(n, v)
    allowed = max(8 * chunk[0] * chunk[1], v * h)
    assert allowed < n * v / 10
    with Sizes() as forward:
        out = linear_pair(
            *policy[:2], *ref[:2], targets, bias=policy[2], ref_bias=ref[2], entropy=True, chunk=chunk, **PAIR
        )
    with Sizes() as backward:
        torch.stack(list(out)).sum().backward()
    with Sizes() as top:
        linear_top_k(*policy[:2], 5, chunk=chunk)
    assert 0 < max(forward.largest, backward.largest, top.largest) <= allowed
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


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: linear_log_prob(HIDDEN[None], WEIGHT, TARGETS), ValueError, r"\(1, 7, 13\).*\(101, 13\).*\[N, H\]"),
        (lambda: linear_log_prob(HIDDEN, WEIGHT[:, 1:], TARGETS), ValueError, r"\(7, 13\).*\(101, 12\)"),
        (lambda: linear_log_prob(HIDDEN, WEIGHT[:0], TARGETS), ValueError, "V at least 1"),
        (lambda: linear_log_prob(HIDDEN, WEIGHT, TARGETS, bias=BIAS[1:]), ValueError, r"bias.*\(100,\).*\(101,\)"),
        (lambda: linear_log_prob(HIDDEN, WEIGHT, TARGETS[1:]), ValueError, r"targets.*\(6,\).*\(7,\)"),
        (
            lambda: linear_log_prob(HIDDEN, WEIGHT, TARGETS.float()),
            TypeError,
            "targets has dtype torch.float32.*integer",
        ),
        (lambda: linear_log_prob(HIDDEN, WEIGHT, TARGETS - 200), ValueError, "from -.*0 to 100"),
        (lambda: linear_log_prob(HIDDEN, WEIGHT, TARGETS * 0 + V), ValueError, "from 101 to 101; expected 0 to 100"),
        (lambda: linear_log_prob(HIDDEN, WEIGHT.double(), TARGETS), TypeError, "float32.*float64.*product_dtype"),
        (lambda: linear_log_prob(HIDDEN.long(), WEIGHT, TARGETS), TypeError, "hidden has dtype torch.int64"),
        (lambda: linear_log_prob(HIDDEN, WEIGHT, TARGETS, product_dtype=torch.int8), TypeError, "product_dtype is"),
        (lambda: linear_log_prob(HIDDEN, WEIGHT, TARGETS, temperature=0.0), ValueError, "temperature.*got 0.0"),
        (lambda: linear_log_prob(HIDDEN, WEIGHT, TARGETS, temperature=-1), ValueError, "temperature.*got -1"),
        (lambda: linear_log_prob(HIDDEN, WEIGHT, TARGETS, temperature=math.nan), ValueError, "temperature.*got nan"),
        (lambda: linear_log_prob(HIDDEN, WEIGHT, TARGETS, soft_cap=0.0), ValueError, "soft_cap.*None.*got 0.0"),
        (lambda: linear_log_prob(HIDDEN, WEIGHT, TARGETS, chunk=(0, 5)), ValueError, r"chunk is \(0, 5\)"),
        (lambda: linear_top_k(HIDDEN, WEIGHT, V + 1), ValueError, "k is 102; expected 1 to 101"),
        (lambda: linear_top_k(HIDDEN, WEIGHT, 0), ValueError, "k is 0"),
        (lambda: linear_kl(HIDDEN, WEIGHT, HIDDEN, WEIGHT[1:]), ValueError, "101 tokens but ref_weight one of 100"),
        (lambda: linear_kl(HIDDEN, WEIGHT, HIDDEN[1:], WEIGHT), ValueError, "7 positions but ref_hidden holds 6"),
        (lambda: linear_kl(HIDDEN, WEIGHT, HIDDEN, WEIGHT, direction="up"), ValueError, "'reverse'.*got 'up'"),
        (lambda: linear_kl(HIDDEN, WEIGHT, HIDDEN, WEIGHT, ref_soft_cap=-2.0), ValueError, "ref_soft_cap.*-2.0"),
        (lambda: linear_kl(HIDDEN, WEIGHT, HIDDEN.double(), WEIGHT.double()), TypeError, "float32.*float64"),
    ],
)
def test_error_messages(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_examples_in_docstrings():
    modules = [importlib.import_module(f"{package.__name__}.{i.name}") for i in pkgutil.iter_modules(package.__path__)]
    tests = [test for module in modules for test in doctest.DocTestFinder().find(module) if test.examples]
    functions = {name for name in package.__all__ if name.islower()}
    assert {test.name.rpartition(".")[2] for test in tests} == functions | {"Kept", "Truncation"}
    assert not any(doctest.DocTestRunner().run(test).failed for test in tests)
