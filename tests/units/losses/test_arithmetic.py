"""Sums over tokens and sequences by hand, with holes in the mask, empty rows and NaN where the mask is False."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from by_hand import tensor
from torchrl_llm_kl._numerics import masked_mean, masked_sum
from torchrl_llm_kl.losses import aggregate, count
from torchrl_llm_kl.losses._arithmetic import clean, sequence_mean, sequence_sum

NAN = float("nan")
# Two tokens, one token, none.
MASK = torch.tensor([[True, True, False, False], [True, False, False, False], [False, False, False, False]])
VALUE = tensor([[1.0, 2.0, NAN, NAN], [6.0, NAN, NAN, NAN], [NAN, NAN, NAN, NAN]])


@pytest.mark.parametrize(
    ("mode", "max_len", "loss", "first", "second"),
    [
        ("token-mean", None, 9 / 3, 1 / 3, 1 / 3),
        ("seq-mean-token-sum", None, (3 + 6) / 2, 1 / 2, 1 / 2),
        ("seq-mean-token-mean", None, (1.5 + 6) / 2, 1 / 4, 1 / 2),
        ("seq-mean-token-sum-norm", None, 9 / (2 * 4), 1 / 8, 1 / 8),
        ("seq-mean-token-sum-norm", 1, 9 / 2, 1 / 2, 1 / 2),
    ],
)
def test_aggregations_by_hand(mode: str, max_len: int | None, loss: float, first: float, second: float) -> None:
    for shape in ((3, 4), (3, 1, 4)):
        value, mask = VALUE.clone().requires_grad_(), MASK.view(shape)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = aggregate(value.view(shape), mask, mode, max_len=max_len)
            of_whole = aggregate(value.view(shape), mask, mode, denominator=2 * count(mask, mode, max_len=max_len))
        assert_close(result.item(), loss)
        assert_close(of_whole.item(), loss / 2)
        (gradient,) = torch.autograd.grad(result, value)
        assert_close(gradient, tensor([[first, first, 0, 0], [second, 0, 0, 0], [0, 0, 0, 0]]))


def test_aggregation_none_is_0_where_the_mask_is_false() -> None:
    value = VALUE.clone().requires_grad_()
    result = aggregate(value, MASK, "none")
    assert_close(result, tensor([[1, 2, 0, 0], [6, 0, 0, 0], [0, 0, 0, 0]]))
    assert_close(torch.autograd.grad(result.sum(), value)[0], MASK.double())
    with pytest.raises(ValueError, match="'none' has no denominator, got denominator=3"):
        aggregate(value, MASK, "none", denominator=3)


def test_aggregation_of_half_precision_is_in_float32_and_has_a_gradient() -> None:
    value = torch.full((1, 4), 0.1, dtype=torch.bfloat16, requires_grad=True)
    result = aggregate(value, torch.ones(1, 4, dtype=torch.bool))
    assert result.dtype == torch.float32
    assert_close(torch.autograd.grad(result, value)[0], torch.full((1, 4), 0.25, dtype=torch.bfloat16))


def test_an_empty_mask() -> None:
    with pytest.warns(UserWarning, match="the mask is empty"):
        assert aggregate(VALUE[2:], MASK[2:]) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert aggregate(VALUE[2:], MASK[2:], denominator=0) == 0  # of a whole batch without tokens
    for denominator in (math.inf, NAN, -1.0):
        with pytest.raises(ValueError, match=f"denominator must be a count of tokens or sequences, got {denominator}"):
            aggregate(VALUE, MASK, denominator=denominator)
    with pytest.raises(TypeError, match="mask must be boolean"):
        count(MASK.float())
    with pytest.raises(ValueError, match="max_len must be at least 1 token, got 0"):
        count(MASK, "seq-mean-token-sum-norm", max_len=0)


def test_masked_arithmetic_by_hand() -> None:
    def both(function: Any) -> tuple[Tensor, Tensor]:
        value = VALUE.clone().requires_grad_()
        result = function(value, MASK)
        return result.detach(), torch.autograd.grad(result.sum(), value)[0]

    def gradient(first: float, second: float) -> Tensor:
        return tensor([[first, first, 0, 0], [second, 0, 0, 0], [0, 0, 0, 0]])

    assert_close(both(masked_sum), (tensor(9), gradient(1, 1)))
    assert_close(both(masked_mean), (tensor(3), gradient(1 / 3, 1 / 3)))
    assert_close(both(sequence_sum), (tensor([[3], [6], [0]]), gradient(1, 1)))
    assert_close(both(sequence_mean), (tensor([[1.5], [6], [0]]), gradient(1 / 2, 1)))
    assert_close(masked_mean(VALUE[1:], MASK[1:]), tensor(6))
    assert masked_mean(VALUE[2:], MASK[2:]) == 0


def test_clean_inputs() -> None:
    assert_close(clean(VALUE.half(), MASK), VALUE.nan_to_num(0).float())
    flags = torch.tensor([[True, False, True, False]])
    assert clean(flags, MASK[:1]).tolist() == [[True, False, False, False]]
