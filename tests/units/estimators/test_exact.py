"""Full-vocabulary divergences, compared with hand calculation and with the whole logits. tests/units/head tests numerics."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from head_reference import DIRECTIONS, assert_same, divergence_of
from refused import refused
from torchrl_llm_kl.estimators import exact_kl, exact_kl_from_logits

BETA = 0.3
each_direction = pytest.mark.parametrize("direction", DIRECTIONS)


def log_of(*probabilities):
    return torch.tensor([probabilities], dtype=torch.float64).log()


def brute_force(logits, ref_logits, direction="reverse", temperature=1.0):
    return divergence_of(*((x / temperature).log_softmax(-1) for x in (logits, ref_logits)), direction, BETA)


def draw(dtype=torch.float64, batch=(2,), T=7, H=11, ref_H=5, V=37, with_bias=True):
    rng = torch.Generator().manual_seed(0)
    shapes = [(*batch, T, H), (*batch, T, ref_H), (V, H), (V, ref_H), (V,), (V,)]
    tensors = [torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]
    return tensors if with_bias else [*tensors[:4], None, None]


def call(tensors, **options):
    *required, bias, ref_bias = tensors
    return exact_kl(*required, bias=bias, ref_bias=ref_bias, **options)


def logits_of(tensors):
    hidden, ref_hidden, weight, ref_weight, bias, ref_bias = tensors
    return F.linear(hidden, weight, bias), F.linear(ref_hidden, ref_weight, ref_bias)


@pytest.mark.parametrize(
    ("q", "direction", "beta", "expected"),
    [
        ((0.75, 0.25), "reverse", 0.5, 0.1438410),  # .5 ln(.5/.75) + .5 ln(.5/.25)
        ((0.75, 0.25), "forward", 0.5, 0.1308120),  # .75 ln(.75/.5) + .25 ln(.25/.5)
        ((0.75, 0.25), "jensen_shannon", 0.25, 0.0248700),  # m = (.5625, .4375): .25 * 0.0758576 + .75 * 0.0078742
        # A token that only the reference rules out.
        ((1.0, 0.0), "reverse", 0.5, math.inf),
        ((1.0, 0.0), "forward", 0.5, math.log(2)),
    ],
)
def test_two_tokens_by_hand(q, direction, beta, expected):
    """With p = (1/2, 1/2), and with logits twice as large at temperature 2."""
    for scale in (1.0, 2.0):
        both = scale * log_of(0.5, 0.5), scale * log_of(*q)
        got = exact_kl_from_logits(*both, direction=direction, beta=beta, temperature=scale)
        assert got.item() == pytest.approx(expected, abs=2e-7)


@each_direction
@pytest.mark.parametrize(("chunk_size", "with_bias"), [(1, True), (3, False), (14, True), (1000, False)])
def test_values_and_gradients_are_those_of_the_whole_logits(direction, with_bias, chunk_size):
    tensors = draw(with_bias=with_bias)
    leaves = [t.detach().requires_grad_() for t in logits_of(tensors)]
    options = {"direction": direction, "beta": BETA, "temperature": 0.7, "chunk_size": chunk_size}
    upstream = [torch.linspace(-1, 2, 14, dtype=torch.float64).view(2, 7)]  # positions must not be exchanged
    want = [brute_force(*logits, direction, temperature=0.7) for logits in (logits_of(tensors), leaves)]
    assert_same([call(tensors, **options)], want[:1], [t for t in tensors if t is not None], upstream)
    assert_same([exact_kl_from_logits(*leaves, **options)], want[1:], leaves, upstream)


def test_any_number_of_batch_dimensions_and_no_positions():
    for batch in ((), (3,), (2, 3)):
        tensors = draw(batch=batch)
        assert_close(call(tensors), brute_force(*logits_of(tensors)))
    tensors = draw(T=0)
    got = call(tensors)
    assert (got.shape, got.dtype) == ((2, 0), torch.float64)
    (gradient,) = torch.autograd.grad(got.sum(), tensors[2])
    assert_close(gradient, torch.zeros(37, 11, dtype=torch.float64))


@each_direction
@pytest.mark.parametrize("double", ["policy", "reference"])
def test_one_model_in_float64(direction, double):
    """The other product is also computed in float64. Each gradient has the dtype of its input."""
    chosen = range(0, 6, 2) if double == "policy" else range(1, 6, 2)
    narrow = draw(torch.float32)
    tensors = [t.detach().double().requires_grad_() if i in chosen else t for i, t in enumerate(narrow)]
    wide = [t.detach().double().requires_grad_() for t in tensors]
    got, want = call(tensors, direction=direction, beta=BETA, chunk_size=4), brute_force(*logits_of(wide), direction)
    assert_close(got, want)
    (got.sum() + want.sum()).backward()
    for mine, theirs in zip(tensors, wide, strict=True):
        assert mine.grad.dtype == mine.dtype
        assert_close(mine.grad.double(), theirs.grad, rtol=1e-5, atol=1e-5)


test_shapes_and_options_that_are_refused = refused(
    lambda function, shapes, options: function(*map(torch.zeros, shapes), **options),
    (exact_kl, [(2, 3, 4), (2, 3, 6), (9, 4), (8, 6)], {}, "has 6 positions and 9 tokens, the reference 6 and 8"),
    (exact_kl, [(2, 3, 4), (3, 2, 6), (9, 4), (9, 6)], {}, r"hidden has shape \(2, 3\) but ref_hidden has shape"),
    (exact_kl, [(2, 3)] * 4, {"bias": torch.zeros(1)}, r"^hidden, weight and bias have shapes .*, \(1,\): expected"),
    (exact_kl, [(2, 3)] * 4, {"direction": "backward"}, "direction must be one of 'reverse', .*, got 'backward'"),
    (exact_kl, [(2, 3)] * 4, {"beta": 1.0}, r"beta must be inside \(0, 1\), got 1.0"),
    (exact_kl, [(2, 3)] * 4, {"chunk_size": 0}, "chunk_size must be at least 1, got 0"),
    (exact_kl_from_logits, [(2, 3)] * 2, {"temperature": 0.0}, "temperature must be a finite number .*, got 0.0"),
    (exact_kl_from_logits, [(2, 5), (1, 5)], {}, r"logits has shape \(2, 5\) but ref_logits has shape \(1, 5\)"),
)
