"""Tests for mutants that survived all others (`make mutants`)."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from by_hand import evaluate, tensor
from objective_cases import CASES, inputs_of, random_batch
from torchrl_llm_kl._numerics import masked_mean, masked_sum
from torchrl_llm_kl.losses import aggregate, count, get_objective, ppo, value_error
from torchrl_llm_kl.losses._arithmetic import clean, sequence_mean, sequence_sum
from torchrl_llm_kl.losses.corrections import (
    entropy_threshold,
    importance_weights,
    off_policy_sequence_mask,
    top_entropy_mask,
)
from torchrl_llm_kl.losses.objectives._clipped import clipped_surrogate

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
@pytest.mark.parametrize("shape", [(3, 4), (3, 1, 4)])
def test_aggregations_by_hand(
    mode: str, max_len: int | None, loss: float, first: float, second: float, shape: tuple[int, ...]
) -> None:
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
    with pytest.raises(ValueError, match="denominator must be a count of tokens or sequences, got -1"):
        aggregate(VALUE, MASK, denominator=-1)
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


def test_explained_variance_by_hand() -> None:
    value, target = tensor([[1.0, 3.0, 9.0]]), tensor([[1.0, 2.0, 9.0]])
    mask = torch.tensor([[True, True, False]])
    # Errors 0 and -1: variance 1/4. Targets: 1/4.
    assert_close(value_error(value, mask, value_target=target)[0].metrics["explained_variance"].item(), 0.0)
    half = value_error(tensor([[1.5, 3.0, 0.0]]), mask, value_target=tensor([[1.0, 3.0, 0.0]]))
    assert_close(half[0].metrics["explained_variance"].item(), 1 - 0.0625 / 1)
    same = value_error(target, mask, value_target=tensor([[4.0, 5.0, 0.0]]))[0]  # off by a constant
    assert_close(same.metrics["explained_variance"].item(), 1.0)
    constant = value_error(tensor([[2.0, 2.0, 0.0]]), mask, value_target=tensor([[5.0, 5.0, 0.0]]))[0]
    assert constant.metrics["explained_variance"] == 1  # nothing to explain, and nothing left


def test_ppo_counts_clipped_tokens_by_the_sign_of_their_advantage_and_within_the_mask() -> None:
    tokens = {"ratio": [[2.0, 2.0, 0.5, 4.0, 1.0, 9.0]], "advantage": [[0.5, 3.0, -0.5, -1.0, 0.5, 7.0]]}
    mask = torch.tensor([[True, True, True, True, True, False]])
    term, _ = evaluate(ppo, **tokens, mask=mask, clip_low=0.3, clip_high=0.2, clip_ratio_c=3.0)
    found = {name: round(metric.item(), 6) for name, metric in term.metrics.items()}
    assert found == {
        "clip_fraction": 0.6,
        "clip_fraction_low": 0.2,
        "clip_fraction_high": 0.4,
        "clip_fraction_dual": 0.2,
    }


def test_a_ratio_at_the_dual_bound_is_not_counted_as_beyond_it() -> None:
    one = torch.ones(1, 1)
    _, metrics = clipped_surrogate(3 * one, -one, one == 1, clip_low=0.2, clip_high=0.3, clip_ratio_c=3.0)
    assert metrics["clip_fraction_dual"] == 0


def test_ppos_sequence_masking_averages_over_masked_in_tokens() -> None:
    # Log-ratios -0.3 and -0.1: 0.2 nats on average over two tokens, 0.13 over three.
    tokens: dict[str, Any] = {"ratio": [[0.7408182, 0.9048374, 1.0]], "advantage": [[-1.0, 2.0, 1.0]]}
    mask = torch.tensor([[True, True, False]])
    hyper = {"clip_low": 0.5, "clip_high": 0.4, "enable_sequence_masking": True, "delta_sequence_masking": 0.15}
    term, gradient = evaluate(ppo, **tokens, mask=mask, **hyper)
    assert_close(gradient, torch.tensor([[0.0, -1.8096748, 0.0]], dtype=torch.float64))
    assert term.metrics["sequence_masked_fraction"] == 0.5


def test_importance_weights_at_the_limits_of_their_bounds() -> None:
    old, sampler = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-2.0, -0.5]])  # ratios e and 0.607
    mask = torch.ones(1, 2, dtype=torch.bool)
    assert_close(importance_weights(old, sampler, mask, high=0.75)[0], torch.tensor([[0.75, 0.6065307]]))
    assert_close(importance_weights(old, sampler, mask, low=0.0, high=2.5)[0], torch.tensor([[2.5, 0.6065307]]))
    assert_close(importance_weights(old, sampler, mask, low=1.0, high=1.0)[0], torch.tensor([[1.0, 1.0]]))


@pytest.mark.parametrize(("old", "sampler"), [(0.0, -800.0), (800.0, 0.0)])
def test_a_huge_masked_out_ratio_does_not_shrink_the_effective_sample_size(old: float, sampler: float) -> None:
    mask = torch.tensor([[True, True, False]])
    inputs = torch.tensor([[-1.0, -1.0, old]]), torch.tensor([[-1.0, -1.0, sampler]])
    weights, metrics = importance_weights(*inputs, mask, high=None)
    assert_close(weights, torch.tensor([[1.0, 1.0, 0.0]]))
    assert metrics["effective_sample_size"] == 1


def test_each_tokens_log_ratio_ends_at_80_nats_before_they_are_averaged() -> None:
    inputs = torch.zeros(1, 2), torch.tensor([[-200.0, 0.0]]), torch.ones(1, 2, dtype=torch.bool)
    weights, _ = importance_weights(*inputs, level="geometric", high=None)
    assert_close(weights, torch.full((1, 2), math.exp(40.0)))


def test_no_weight_is_left() -> None:
    inputs = torch.zeros(1, 2), torch.tensor([[-2.0, -2.0]]), torch.ones(1, 2, dtype=torch.bool)
    weights, metrics = importance_weights(*inputs, mode="mask", high=2.0)
    assert (weights == 0).all()
    assert metrics["effective_sample_size"] == 0
    assert metrics["masked_fraction"] == 1


def test_sequence_masking_keeps_good_tokens_and_sequences_at_the_bound() -> None:
    old, log_prob = torch.full((2, 3), -1.0), torch.tensor([[-1.25, -1.25, -1.25], [-2.0, -2.0, -2.0]])
    advantage = torch.tensor([[-1.0, -1.0, -1.0], [-1.0, 0.0, 0.5]])
    weights, metrics = off_policy_sequence_mask(
        log_prob, old, advantage, torch.ones(2, 3, dtype=torch.bool), delta=0.25
    )
    assert weights.tolist() == [[1.0, 1.0, 1.0], [0.0, 1.0, 1.0]]
    assert_close(metrics["sequence_masked_fraction"].item(), 1 / 6)


def test_entropies_rounded_below_0_are_kept_and_masked_out_ones_are_not() -> None:
    entropy, mask = torch.tensor([[-1e-7, 1.0, 5.0]]), torch.tensor([[True, True, False]])
    assert_close(entropy_threshold(entropy, mask, fraction=1.0), torch.tensor(-1e-7), rtol=0, atol=0)
    assert top_entropy_mask(entropy, mask, fraction=1.0)[0].tolist() == [[1.0, 1.0, 0.0]]


@pytest.mark.parametrize("case", CASES)
def test_metrics_are_masked(case: str) -> None:
    """Masked-out rows and columns change none."""
    name, hyper = CASES[case]
    batch = random_batch(21)

    def padded(x: Tensor) -> Tensor:
        return nn.functional.pad(x, (0, 2, 0, 2), value=False if x.dtype == torch.bool else NAN)

    for term, same in zip(
        get_objective(name)(**inputs_of(name, batch), **hyper),
        get_objective(name)(**inputs_of(name, {key: padded(x) for key, x in batch.items()}), **hyper),
        strict=True,
    ):
        assert_close(dict(same.metrics), dict(term.metrics))
