"""Divergences from logits that exist already."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.testing import assert_close

from head_reference import INF, Sizes, assert_same, jensen_shannon_of, kl_of
from torchrl_llm_kl.head import logits_kl

DIRECTIONS = ["reverse", "forward", "jensen_shannon"]


def make_logits(seed=0, n=7, v=101, dtype=torch.float64):
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(n, v, generator=rng, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(2)]


def truth(logits, ref_logits, direction, temperature=1.0):
    log_p, log_q = ((t.double() / temperature).log_softmax(-1) for t in (logits, ref_logits))
    of = {
        "reverse": lambda: kl_of(log_p, log_q),
        "forward": lambda: kl_of(log_q, log_p),
        "jensen_shannon": lambda: jensen_shannon_of(log_p, log_q, 0.3),
    }
    return of[direction]()


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1, 9),
    v=st.integers(1, 23),
    chunk=st.one_of(st.none(), st.integers(1, 10), st.tuples(st.integers(1, 10), st.integers(1, 25))),
    direction=st.sampled_from(DIRECTIONS),
    seed=st.integers(0, 2**31),
)
def test_values_and_gradients_for_any_shape_and_tile(n, v, chunk, direction, seed):
    both = make_logits(seed, n, v)
    got = logits_kl(*both, direction=direction, beta=0.3, temperature=1.7, chunk=chunk)
    want = truth(*both, direction, temperature=1.7)
    assert_close(got, want)
    upstream = torch.linspace(-1, 2, n, dtype=torch.float64)
    assert_close(torch.autograd.grad(got, both, upstream), torch.autograd.grad(want, both, upstream))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_dtypes(direction):
    """No rounding beyond that of the given logits; each gradient has the dtype of its logits."""
    half, full, double = torch.bfloat16, torch.float32, torch.float64
    for dtypes, expected in (((half, half), full), ((torch.float16, full), full), ((full, double), double)):
        both = [t.detach().to(dtype).requires_grad_() for t, dtype in zip(make_logits(), dtypes, strict=True)]
        got = logits_kl(*both, direction=direction, beta=0.3, chunk=(3, 40))
        want = truth(*both, direction)
        assert got.dtype == expected
        assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
        gradients = (torch.autograd.grad(value.sum(), both) for value in (got, want))
        for mine, theirs, dtype in zip(*gradients, dtypes, strict=True):
            assert mine.dtype == dtype
            assert_close(mine, theirs, rtol=1e-2 if dtype.itemsize == 2 else 1e-5, atol=1e-5)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_gradient_to_one_alone_and_logits_that_are_not_contiguous(direction):
    for only in (0, 1):
        both = [t.detach() for t in make_logits()]
        both[only].requires_grad_()
        assert_same([logits_kl(*both, direction=direction, beta=0.3)], [truth(*both, direction)], [both[only]])
    strided = [t.detach().T.contiguous().T.requires_grad_() for t in make_logits()]
    got = logits_kl(*strided, direction=direction, beta=0.3, chunk=(2, 30))
    assert_same([got], [truth(*strided, direction)], strided)


def test_minus_infinity_in_the_logits():
    logits, ref_logits = (t.detach() for t in make_logits())
    logits[:, :40], ref_logits[:, :40] = -INF, -INF
    ref_logits[3, 50] = -INF
    got = logits_kl(logits, ref_logits, chunk=(2, 30))
    want = kl_of(logits.log_softmax(-1)[:, 40:], ref_logits.log_softmax(-1)[:, 40:])
    assert_close(got, want)
    assert got.isposinf().tolist() == [False] * 3 + [True] + [False] * 3


def test_arguments_are_not_mutated_and_memory_is_that_of_a_few_tiles():
    both = make_logits(n=60, v=211, dtype=torch.bfloat16)
    before = [t.detach().clone() for t in both]
    with Sizes() as forward:
        value = logits_kl(*both, chunk=(7, 13))
    assert forward.largest == 7 * 211  # a view of the logits' rows; tiles are smaller
    with Sizes() as backward:
        value.sum().backward()
    assert backward.largest == 60 * 211  # the gradients themselves
    assert all(torch.equal(a, b) for a, b in zip(both, before, strict=True))


TWO = ((2, 5), (2, 5))


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        (((2, 5), (2, 6)), {}, r"\(2, 5\).*\(2, 6\).*\[N, V\]"),
        (((1, 2, 5), (1, 2, 5)), {}, r"\(1, 2, 5\).*Flatten"),
        (((2, 0), (2, 0)), {}, "V at least 1"),
        (TWO, {"temperature": math.inf}, "temperature must be positive, got inf; expected a finite"),
        (TWO, {"direction": "up"}, "direction must be one of 'reverse', 'forward', 'jensen_shannon', got 'up'"),
        (TWO, {"chunk": 0}, "chunk is 0; expected at least 1 position"),
        (TWO, {"chunk": (3, 0)}, r"chunk is \(3, 0\); expected"),
    ],
)
def test_errors(shapes, options, message):
    with pytest.raises(ValueError, match=message):
        logits_kl(*(torch.zeros(shape) for shape in shapes), **options)
