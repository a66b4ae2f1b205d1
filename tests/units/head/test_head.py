"""Log-probs, entropies and top tokens of a head in tiles, compared with plain torch in float64; and errors."""

import math
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import head_reference as reference
import torchrl_llm_kl.head as layer
from closeness import assert_near
from head_reference import INF, OPTIONS, H, N, V, assert_same, at, from_logits, make_head, make_targets, plain
from refused import refused
from torchrl_llm_kl import _private
from torchrl_llm_kl.head import Truncation, _functions, linear_log_prob, linear_outcomes, linear_pair, linear_top_k


def test_by_hand():
    """Logits (log 4, log 1) at scale 1/2 and temperature 1/2: probabilities 4/5, 1/5."""
    one, weight = torch.ones(1, 1), torch.tensor([[4.0], [1.0]]).log()
    out = linear_log_prob(torch.ones(2, 1), weight, torch.tensor([0, 1]), scale=0.5, temperature=0.5, entropy=True)
    assert_close(out.log_prob, torch.tensor([math.log(0.8), math.log(0.2)]))
    assert_close(out.entropy, torch.full((2,), -0.8 * math.log(0.8) - 0.2 * math.log(0.2)))
    # Probabilities (3/4, 1/4): d log p_0 / d logits = (1/4, -1/4); d H / d logits = -p (log p + H).
    weight = torch.tensor([[3.0], [1.0]]).log().requires_grad_()
    out = linear_log_prob(one, weight, torch.tensor([0]), entropy=True)
    slopes = [torch.autograd.grad(value, weight, retain_graph=True)[0].flatten().tolist() for value in out]
    assert_near(slopes, [[0.25, -0.25], [-3 / 16 * math.log(3), 3 / 16 * math.log(3)]], dtype=torch.float32)
    top = linear_top_k(one, torch.tensor([[1.0], [5.0], [2.0], [8.0]]).log(), 2, chunk=(1, 1))
    assert top.indices.tolist() == [[3, 1]]
    assert_close(top.log_probs.exp(), torch.tensor([[0.5, 0.3125]]))
    assert_close(top.tail_log_prob.exp(), torch.tensor([0.1875]))


@pytest.mark.parametrize("k", [1, 5, 60, V])
def test_top_k_against_sorted_log_probs(k):
    hidden, weight, bias = make_head()
    targets, every = make_targets(), plain(hidden, weight, bias, **OPTIONS)
    log_p, order = every.sort(-1, descending=True)
    for chunk in ((3, 17), (100, 1000), None):
        for given, log_prob in ((None, None), (targets, at(every, targets))):
            top = linear_top_k(hidden, weight, k, given, bias=bias, chunk=chunk, **OPTIONS)
            assert torch.equal(top.indices, order[:, :k])
            want = (log_p[:, :k], log_p[:, k:].logsumexp(-1), log_prob)
            assert_close((top.log_probs, top.tail_log_prob, top.log_prob), want)


# ---------------------------------------------------------------------- precision: no more error than plain torch
def worst(got, truth):
    return (got.double() - truth).abs().max().item()


def typical(got, truth):
    """Root mean square error: the worst element depends on chance."""
    return (got.double() - truth).square().mean().sqrt().item()


HALF = torch.bfloat16, torch.float16
NAMES = ("kl", "log_prob", "ref_log_prob", "entropy", "d hidden", "d weight", "d ref_hidden", "d ref_weight")


@pytest.mark.parametrize(
    ("dtype", "product_dtype", "rounded_parts"),
    [(torch.float32, None, 1.0), *((x, *how) for x in HALF for how in ((None, 2**0.5), (torch.float32, 1.0)))],
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
        return with_gradients(reference.pair_of(plain(*inputs[:2]), plain(*inputs[2:]), targets), inputs)

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
    for got, rough, true in zip(fine, coarse, (at(truth, targets), reference.entropy_of(truth)), strict=True):
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


def test_autocast_multiplies_as_the_model_does_but_product_dtype_wins():
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

    def value_and_gradients(product_dtype):
        out = linear_log_prob(hidden, weight, targets, product_dtype=product_dtype).log_prob
        return (out, *torch.autograd.grad(out.sum(), (hidden, weight)))

    for product_dtype in (torch.float32, torch.float16):
        want = value_and_gradients(product_dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = value_and_gradients(product_dtype)
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True)), product_dtype


# ---------------------------------------------------------------------- extremes
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
    ref = from_logits(EXTREME["large with an offset"])
    log_p, log_q = plain(hidden, weight), plain(*ref)
    for target, chunk in ((0, (1, 7)), (29, (1, 64)), (30, (1, 7)), (39, (1, 64)), (39, (1, 7))):
        targets = torch.tensor([target])
        got = linear_pair(hidden, weight, *ref, targets, entropy=True, chunk=chunk)
        # The hidden state is 1: the weight's gradient is the logits', without cancellation.
        found = (got.log_prob, got.entropy, got.kl)
        want = at(log_p, targets), reference.entropy_of(log_p), reference.kl_of(log_p, log_q)
        assert_same(found, want, [weight], (1.0, 2.0, 3.0))


@pytest.mark.parametrize("ruled_out", [slice(0, 30), slice(60, None), slice(0, None, 2)], ids=str)
def test_bias_of_minus_infinity_is_a_smaller_vocabulary(ruled_out):
    """Even if the bias excludes the whole first or last tile."""
    policy, ref = make_head(1, grad=True), make_head(2, grad=True)
    allowed = torch.ones(V, dtype=torch.bool)
    allowed[ruled_out] = False
    for bias in (policy[2], ref[2]):
        bias.data[ruled_out] = -INF
    targets = allowed.nonzero().squeeze(1)[:N]
    small = ([head[0], head[1][allowed], head[2][allowed]] for head in (policy, ref))
    want = reference.pair(*small, torch.cumsum(allowed, 0)[targets] - 1, entropy=True)
    for chunk in ((3, 5), (100, 200)):
        assert_same(reference.pair(policy, ref, targets, entropy=True, chunk=chunk), want, (*policy, *ref))
        top = linear_top_k(*policy[:2], int(allowed.sum()), bias=policy[2], chunk=chunk)
        assert allowed[top.indices].all()
        assert torch.equal(top.tail_log_prob, torch.full((N,), -INF, dtype=torch.float64))


def test_target_of_probability_zero():
    hidden, weight, bias = make_head(dtype=torch.float32)
    bias[5] = -INF
    log_p, log_q = plain(hidden, weight, bias), plain(hidden, weight)
    heads = hidden, weight, hidden, weight
    for chunk in ((2, 1), (2, 3), (100, 200)):
        out = linear_log_prob(hidden, weight, torch.full((N,), 5), bias=bias, chunk=chunk)
        assert torch.equal(out.log_prob, torch.full((N,), -INF))
        # Ruled out by the first distribution of the KL alone: no contribution. By the second alone: infinite.
        assert_close(reference.linear_kl(*heads, bias=bias, chunk=chunk), reference.kl_of(log_p, log_q))
        assert reference.linear_kl(*heads, ref_bias=bias, chunk=chunk).isposinf().all()
        assert reference.linear_kl(*heads, direction="forward", bias=bias, chunk=chunk).isposinf().all()
    # A token ruled out by one and of probability zero by the other: exp(-200) is 0 in float32, in whichever tile.
    heads = *from_logits([[-200.0, 0.0, 0.0, -200.0]]), *from_logits([[-INF, 0.0, 0.0, -INF]])
    for chunk in ((1, 1), (1, 2), (1, 4)):
        assert_close(reference.linear_kl(*heads, chunk=chunk), torch.zeros(1))


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
    hidden, weight, bias = heads = make_head(n=0, grad=True)
    targets, ids = make_targets(0), torch.zeros(0, 2, 4, dtype=torch.long)
    out = linear_log_prob(hidden, weight, targets, bias=bias, entropy=True)
    outcomes = linear_outcomes(hidden, weight, targets, ids).outcomes
    divergences = [reference.pair(heads[:2], heads[:2], direction=each).kl for each in reference.DIRECTIONS]
    assert [x.shape for x in (*out, *divergences)] == [(0,)] * 5
    assert outcomes.shape == (0, 2, 5)
    assert linear_top_k(hidden, weight, 3).log_probs.shape == (0, 3)
    for value in (out.log_prob + out.entropy, outcomes, divergences[0], divergences[2]):
        found = torch.autograd.grad(value.sum(), (weight, bias, hidden), materialize_grads=True)
        assert_close(found, (torch.zeros_like(weight), torch.zeros_like(bias), torch.zeros(0, reference.H).double()))


def test_targets_of_any_integer_dtype_and_hidden_states_that_are_not_contiguous():
    hidden, weight, _ = make_head()
    targets = make_targets()
    want = linear_log_prob(hidden, weight, targets, chunk=(2, 30)).log_prob
    for dtype in (torch.int32, torch.uint8):
        assert torch.equal(linear_log_prob(hidden, weight, targets.to(dtype), chunk=(2, 30)).log_prob, want)
    h, w = (t.float().T.contiguous().T.requires_grad_() for t in (hidden, weight))
    got = linear_log_prob(h, w, targets, entropy=True, chunk=(3, 17))
    assert_same(got, (at(plain(h, w), targets), reference.entropy_of(plain(h, w))), (h, w))


def test_products_in_onednn(monkeypatch):
    """Values and gradients with bias, scale, temperature and soft cap. In float64 oneDNN is not used."""
    monkeypatch.setattr(_private, "FEWEST_PRODUCTS", 0)
    products = []
    counted = lambda *args: products.append(found := _private.onednn_linear(*args)) or found  # noqa: E731
    for module in (layer._tiles, layer._sweep):
        monkeypatch.setattr(module, "onednn_linear", counted)
    truth, targets = make_head(grad=True), make_targets()
    tiles = -(-N // 5) * -(-V // 30)
    for dtype, enabled in ((torch.float32, True), (torch.float64, False)):
        products.clear()
        inputs = [each.detach().to(dtype).requires_grad_() for each in truth]
        for options in ({}, OPTIONS):
            got = linear_log_prob(*inputs[:2], targets, bias=inputs[2], entropy=True, chunk=(5, 30), **options)
            log_p = plain(*truth, **options)
            want = at(log_p, targets), reference.entropy_of(log_p)
            assert_near(tuple(got), tuple(want), terms=H, size=50, dtype=dtype)
            grads = torch.autograd.grad(sum(x.sum() for x in got), inputs)
            wanted = torch.autograd.grad(sum(x.sum() for x in want), truth)
            assert_near(grads, wanted, terms=V, size=50, dtype=dtype)
        # Of each option the logits and the gradient of the hidden states; logits that the forward kept are not computed again.
        assert [x is not None for x in products] == [enabled] * (4 * tiles)


# ---------------------------------------------------------------------- memory, graphs
def of_pair(dtype):
    heads = (make_head(seed, n=30, h=2, v=111, dtype=dtype, grad=True) for seed in (1, 2))
    return torch.stack(reference.pair(*heads, make_targets(30, 111), entropy=True, chunk=(7, 13), **reference.PAIR))


def of_mixture():
    heads = (make_head(seed, n=200, h=2, v=211, dtype=torch.float32, grad=True) for seed in (1, 2))
    return reference.pair(*heads, direction="jensen_shannon", beta=0.3, chunk=(100, 13)).kl


def of_top_k():
    hidden, weight, _ = make_head(n=60, h=2, v=211, dtype=torch.float32)
    return linear_top_k(hidden, weight, 5, chunk=(7, 13)).log_probs.requires_grad_()


def of_outcomes(k):
    hidden, weight, _ = make_head(n=256, h=8, v=4096, dtype=torch.float32, grad=True)
    ids = torch.arange(k).expand(256, k)
    return linear_outcomes(hidden, weight, make_targets(256, 4096), ids, chunk=(32, 256)).outcomes


def of_truncation(kept):
    hidden, weight, _ = make_head(n=600, h=4, v=3000, dtype=torch.float32, grad=True)
    targets, truncation, chunk = make_targets(600, 3000), Truncation(50, 0.9), (64, 512)
    found = layer.linear_kept(hidden, weight, truncation, targets, chunk=chunk) if kept else None
    options = {"kept": found} if kept else {"truncation": truncation}
    return linear_log_prob(hidden, weight, targets, chunk=chunk, **options).log_prob


FEW_TILES = 8 * 7 * 13


@pytest.mark.parametrize(
    ("run", "forward", "backward"),
    [
        (lambda: of_pair(torch.float32), FEW_TILES, FEW_TILES),
        (lambda: of_pair(torch.bfloat16), FEW_TILES, FEW_TILES),
        (of_top_k, FEW_TILES, FEW_TILES),
        (of_mixture, 64 * 211, 100 * 13),
        (lambda: of_outcomes(1), 4096 * 8, 4096 * 8),
        (lambda: of_outcomes(64), 4096 * 8, 4096 * 8),
        (lambda: of_truncation(True), 64 * 3001, 64 * 512),
        (lambda: of_truncation(False), 64 * 3001, 64 * 3001),
    ],
)
def test_memory_is_that_of_a_few_tiles(run, forward, backward):
    """Never positions x vocabulary. Truncation and mixtures take whole rows of 64 positions."""
    for found, allowed in zip(reference.largest(run), (forward, backward), strict=True):
        assert 0 < found <= allowed
        assert run is not of_mixture or found == allowed


def test_no_graph_without_gradient_nothing_is_mutated_and_second_derivatives_are_refused():
    head, targets = make_head(grad=True), make_targets()
    before = [t.detach().clone() for t in head]
    with torch.no_grad():
        out = reference.pair(head, head, targets, entropy=True, chunk=(3, 17))
    assert all(t.grad_fn is None and not t.requires_grad for t in out)
    frozen = [t.detach() for t in head[:2]]
    assert not linear_log_prob(*frozen, targets).log_prob.requires_grad
    assert not linear_top_k(*head[:2], 4, bias=head[2], chunk=(3, 17)).log_probs.requires_grad
    with torch.inference_mode():
        inside = linear_log_prob(*head[:2], targets, bias=head[2], entropy=True)
    assert_close(inside.log_prob, at(plain(*head), targets).detach())
    assert all(map(torch.equal, head, before))
    factor = torch.ones(N, dtype=torch.float64, requires_grad=True)
    value = (linear_log_prob(*head[:2], targets).log_prob * factor).sum()
    (gradient,) = torch.autograd.grad(value, head[0], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


# ---------------------------------------------------------------------- errors
HIDDEN, WEIGHT, BIAS = (t.float() for t in make_head())
TARGETS = make_targets()
HEAD, IDS = (HIDDEN, WEIGHT, TARGETS), torch.zeros(N, 2, dtype=torch.long)
TWO = (HIDDEN, WEIGHT, HIDDEN, WEIGHT)
MIXTURE = {"direction": "jensen_shannon"}
RECORD = layer.Kept(torch.tensor([3, V]), torch.tensor([0, 2, *[2] * (N - 1)]))


test_error_messages = refused(
    lambda function, arguments, options: function(*arguments, **options),
    (linear_log_prob, (HIDDEN, WEIGHT[:, 1:], TARGETS), {}, r"\(7, 13\).*\(101, 12\).*\[N, H\]"),
    (linear_log_prob, HEAD, {"bias": BIAS[1:]}, r"bias have shapes .*\(101, 13\), \(100,\)"),
    (linear_log_prob, (HIDDEN, WEIGHT, TARGETS[1:]), {}, r"targets.*\(6,\).*\(7,\)"),
    (linear_log_prob, (HIDDEN, WEIGHT, TARGETS.float()), {}, TypeError, "targets has dtype torch.float32.*integer"),
    (linear_log_prob, (HIDDEN, WEIGHT.double(), TARGETS), {}, TypeError, "float32.*float64.*product_dtype"),
    (linear_log_prob, HEAD, {"temperature": 1e-40}, "temperature must be a finite number of at least 1e-06"),
    (linear_log_prob, HEAD, {"product_dtype": torch.int8}, TypeError, "floating dtype, got torch.int8"),
    (linear_log_prob, HEAD, {"soft_cap": 0.0}, "soft_cap.*None.*got 0.0"),
    (linear_log_prob, HEAD, {"chunk": (0, 5)}, r"chunk is \(0, 5\)"),
    (linear_log_prob, HEAD, {"kept": layer.Kept(IDS[0], TARGETS[:3])}, r"offsets has shape \(3,\): expected \(8,\)"),
    (linear_log_prob, HEAD, {"kept": RECORD}, "ids from 3 to 101: expected 0 to 100"),
    (linear_log_prob, HEAD, {"truncation": Truncation(2), "kept": RECORD}, "pass one of them"),
    (linear_top_k, (HIDDEN, WEIGHT, V + 1), {}, "k is 102: expected 1 to 101"),
    (linear_outcomes, (*HEAD, IDS[1:]), {}, rf"ids has shape \({N - 1}, 2\): expected \({N}, \.\.\., k\)"),
    (reference.linear_kl, (HIDDEN, WEIGHT, HIDDEN, WEIGHT[1:]), {}, "7 positions and 101 tokens, .* 7 and 100"),
    (reference.linear_kl, TWO, {"direction": "up"}, "'reverse'.*got 'up'"),
    (reference.linear_kl, TWO, {"ref_soft_cap": -2.0}, "ref_soft_cap.*-2.0"),
    (reference.linear_kl, TWO, {**MIXTURE, "beta": 1.0}, r"inside \(0, 1\), got 1.0"),
    (linear_pair, TWO, {"direction": "forward", "truncation": Truncation(3)}, "only the policy is truncated"),
    (layer.logits_kl, (torch.zeros(2, 5), torch.zeros(2, 1)), {}, r"\(2, 5\).*\(2, 1\).*\[N, V\]"),
)


def test_ids_outside_the_vocabulary_are_nan():
    outside, ids = TARGETS.clone(), IDS.clone()
    outside[:2], ids[0, 1] = torch.tensor([-1, V]), V
    out = linear_outcomes(HIDDEN, WEIGHT, outside, ids)
    assert out.log_prob.isnan().tolist() == [True, True] + [False] * (N - 2)
    assert out.outcomes[0].isnan().tolist() == [False, True, False]


# ------------------------------------------------------------------ log-probs of ids and of all other tokens together
ORDER = torch.Generator().manual_seed(3)


def make_ids(k, *lists):
    """``k`` different ids of each list."""
    rows = [torch.randperm(V, generator=ORDER)[:k] for _ in range(torch.Size([N, *lists]).numel())]
    return torch.stack(rows).reshape(N, *lists, k)


def plain_outcomes(log_p, ids):
    """From all log-probs: those at the ids, and the log of the sum of all other probabilities."""
    log_p = log_p.reshape(log_p.shape[0], *[1] * (ids.ndim - 2), -1).expand(*ids.shape[:-1], -1)
    listed = torch.zeros_like(log_p, dtype=torch.bool).scatter(-1, ids, True)
    others = log_p.masked_fill(listed, -INF).logsumexp(-1, keepdim=True)
    return torch.cat([log_p.gather(-1, ids), others], -1)


@pytest.mark.parametrize(("k", "lists"), [(1, ()), (5, ()), (100, ()), (4, (2,)), (3, (2, 3))])
def test_values_and_gradients_of_outcomes(k, lists):
    tensors, targets, ids = make_head(grad=True), make_targets(), make_ids(k, *lists)
    log_p = plain(*tensors, **OPTIONS)
    want = at(log_p, targets), reference.entropy_of(log_p), plain_outcomes(log_p, ids)
    for chunk in ((3, 17), (7, 40), None):
        got = linear_outcomes(*tensors[:2], targets, ids, bias=tensors[2], entropy=True, chunk=chunk, **OPTIONS)
        assert got.outcomes.shape == (N, *lists, k + 1)
        upstream = [torch.randn(x.shape, generator=ORDER, dtype=torch.float64) for x in want]
        for one, expected, weights in zip(got, want, upstream, strict=True):
            assert_same([one], [expected], tensors, [weights])
        assert_same(got, want, tensors, upstream)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("chunk", [(1, 1), (1, 2), None])
def test_a_tail_whose_probability_underflows(dtype, chunk):
    """The other tokens have exp(-200) and exp(-200) / 3, which are 0 in float32. The log of their sum is exact."""
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
    """Outcomes of probability 0: no token left, a padding id, or tokens with a bias of -inf. Their gradients are dropped."""
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


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "soft_cap": 3.0, "scale": 1.5}, {"bias": True}])
def test_one_tile_without_gradient_equals_a_sweep_to_the_bit(options: dict[str, Any], monkeypatch) -> None:
    """Otherwise the ratio of the first step to its own old log-probs would not be exactly 1."""
    rng = torch.Generator().manual_seed(0)
    hidden, weight = 0.3 * torch.randn(9, 8, generator=rng), torch.randn(50, 8, generator=rng)
    targets = torch.randint(50, (9,), generator=rng)
    options = options | ({"bias": 0.3 * torch.randn(50, generator=rng)} if "bias" in options else {})
    sweeps, sweep = [], _functions.sweep
    monkeypatch.setattr(_functions, "sweep", lambda *args: sweeps.append(1) or sweep(*args))
    found = linear_log_prob(hidden, weight, targets, **options).log_prob
    assert not sweeps
    assert torch.equal(found, linear_log_prob(hidden, weight.requires_grad_(), targets, **options).log_prob)
    # A certain token has more digits, a forbidden one is -inf, and an id outside the vocabulary is NaN.
    certain = torch.full((50,), 0.0).index_fill(0, targets[:1], 40.0)
    small = hidden * 1e-6
    assert -1e-14 < linear_log_prob(small, weight.detach(), targets, bias=certain).log_prob[0] < 0
    assert linear_log_prob(hidden, weight.detach(), targets.clone().fill_(50)).log_prob.isnan().all()
    assert len(sweeps) == 3
