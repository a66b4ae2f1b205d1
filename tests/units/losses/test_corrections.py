"""Weights by hand, with other numbers for each bound; their effect on loss terms."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.testing import assert_close

from torchrl_llm_kl.losses import LossTerm, aggregate, count, ppo
from torchrl_llm_kl.losses.corrections import (
    apply_correction,
    entropy_threshold,
    importance_weights,
    off_policy_sequence_mask,
    top_entropy_mask,
)

NAN, INF = float("nan"), float("inf")


def f64(rows: Any) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


# Ratios 4, 1/8, 1 and 2, 3/2; the masked-out token would be e**800.
RATIO = f64([[4.0, 0.125, 1.0], [2.0, 1.5, 1.0]])
MASK = torch.tensor([[True, True, True], [True, True, False]])
SAMPLER = f64([[-2.0, -0.5, -1.0], [-3.0, -1.5, -800.0]])
OLD = SAMPLER + RATIO.log() + f64([[0.0, 0.0, 0.0], [0.0, 0.0, 800.0]])


@pytest.mark.parametrize(
    ("hyper", "weights", "metrics"),
    [
        (
            {},
            [[2.0, 0.125, 1.0], [2.0, 1.5, 0.0]],
            # (6.625 / 5)**2 / (11.265625 / 5)
            {"weight_mean": 1.725, "weight_max": 4.0, "truncated_fraction": 0.2, "effective_sample_size": 0.7791956},
        ),
        (
            {"low": 0.25, "high": 3.0},
            [[3.0, 0.25, 1.0], [2.0, 1.5, 0.0]],
            {"weight_mean": 1.725, "weight_max": 4.0, "truncated_fraction": 0.4},
        ),
        (
            {"mode": "mask", "low": 0.5, "high": 2.0},
            [[0.0, 0.0, 1.0], [2.0, 1.5, 0.0]],
            # (4.5 / 5)**2 / (7.25 / 5)
            {"weight_mean": 1.725, "weight_max": 4.0, "masked_fraction": 0.4, "effective_sample_size": 0.5586207},
        ),
        ({"mode": "mask", "high": 3.0}, [[0.0, 0.125, 1.0], [2.0, 1.5, 0.0]], {"masked_fraction": 0.2}),
        ({"mode": "mask", "low": 0.5, "high": None}, [[4.0, 0.0, 1.0], [2.0, 1.5, 0.0]], {"masked_fraction": 0.2}),
        ({"low": 0.0, "high": 0.75}, [[0.75, 0.125, 0.75], [0.75, 0.75, 0.0]], {"truncated_fraction": 0.8}),
        ({"low": 1.5, "high": 1.5}, [[1.5, 1.5, 1.5], [1.5, 1.5, 0.0]], {"effective_sample_size": 1.0}),
        ({"high": None}, [[4.0, 0.125, 1.0], [2.0, 1.5, 0.0]], {"truncated_fraction": 0.0}),
        # Products 1/2 and 3; (2.5 / 2)**2 / (4.25 / 2)
        (
            {"level": "sequence"},
            [[0.5, 0.5, 0.5], [2.0, 2.0, 0.0]],
            {"weight_mean": 1.75, "weight_max": 3.0, "truncated_fraction": 0.5, "effective_sample_size": 0.7352941},
        ),
        (
            {"level": "sequence", "mode": "mask", "high": 2.5},
            [[0.5, 0.5, 0.5], [0.0, 0.0, 0.0]],
            {"masked_fraction": 0.5, "effective_sample_size": 0.5},
        ),
        # The cube root of 1/2 and the square root of 3.
        (
            {"level": "geometric", "low": 0.7, "high": 1.5},
            [[0.7937005] * 3, [1.5, 1.5, 0.0]],
            {"weight_mean": 1.2628757, "weight_max": 1.7320508, "truncated_fraction": 0.5},
        ),
        (
            {"level": "geometric", "mode": "mask", "low": 0.8, "high": 1.8},
            [[0.0] * 3, [1.7320508, 1.7320508, 0.0]],
            {"masked_fraction": 0.5},
        ),
    ],
)
@pytest.mark.parametrize("as_tensors", [False, True])
def test_importance_weights_by_hand(
    hyper: dict[str, Any], weights: list[list[float]], metrics: dict[str, float], as_tensors: bool
) -> None:
    if as_tensors:
        hyper = {key: f64(value) if isinstance(value, float) else value for key, value in hyper.items()}
    found, seen = importance_weights(OLD.clone().requires_grad_(), SAMPLER, MASK, **hyper)
    assert_close(found, f64(weights), rtol=1e-6, atol=1e-7)
    assert not found.requires_grad
    for name, expected in metrics.items():
        assert math.isclose(seen[name].item(), expected, rel_tol=1e-6), name
        assert seen[name].ndim == 0
    fraction = "masked_fraction" if hyper.get("mode") == "mask" else "truncated_fraction"
    assert set(seen) == {"weight_mean", "weight_max", fraction, "effective_sample_size"}


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("high", [2.0, None])
def test_weights_are_finite_whatever_the_log_probs(level: str, mode: str, high: float | None) -> None:
    old = torch.tensor([[0.0, -1e4, -INF, 0.0, -1.0, -INF], [NAN, INF, 0.0, 0.0, 0.0, 0.0]])
    sampler = torch.tensor([[-1e4, 0.0, 0.0, -INF, NAN, -INF], [NAN, 0.0, 0.0, -1.0, 0.0, 0.0]])
    mask = torch.tensor([[True] * 6, [False] * 6])
    weights, metrics = importance_weights(old, sampler, mask, level=level, mode=mode, high=high)
    assert weights.isfinite().all()
    assert (weights[1] == 0).all()
    assert all(metric.isfinite() for metric in metrics.values())


def test_a_token_that_the_sampler_did_not_score_is_not_corrected() -> None:
    weights, _ = importance_weights(f64([[-1.0, -1.0]]), f64([[NAN, -1.5]]), torch.ones(1, 2, dtype=torch.bool))
    assert_close(weights, f64([[1.0, math.exp(0.5)]]))


def test_half_precision_and_equal_policies() -> None:
    same = torch.randn(3, 4, dtype=torch.bfloat16)
    weights, metrics = importance_weights(same, same, torch.ones(3, 4, dtype=torch.bool), level="sequence")
    assert weights.dtype == torch.float32
    assert (weights == 1).all()
    assert metrics["effective_sample_size"] == 1


def test_corrections_of_a_batch_without_tokens() -> None:
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    for weights, metrics in (
        importance_weights(OLD, SAMPLER, nothing),
        importance_weights(OLD, SAMPLER, nothing, level="sequence"),
        off_policy_sequence_mask(OLD, SAMPLER, OLD, nothing, delta=0.1),
        top_entropy_mask(-OLD, nothing),
        top_entropy_mask(torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool)),
        importance_weights(torch.zeros(0, 3), torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool)),
    ):
        assert (weights == 0).all()
        assert all(metric == 0 for metric in metrics.values())


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        ({"level": "sentence"}, "level must be one of 'token', 'sequence', 'geometric', got 'sentence'"),
        ({"mode": "clip"}, "mode must be one of 'truncate', 'mask', got 'clip'"),
        ({"low": 3.0}, r"low must be at most high, got low=3\.0 and high=2\.0"),
        ({"low": -0.1}, r"low must be at least 0, got -0\.1"),
        ({"high": 0.0}, r"high must be greater than 0, got 0\.0"),
        ({"high": NAN}, "high must be greater than 0, got nan"),
    ],
)
def test_bounds_of_weights(hyper: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        importance_weights(OLD, SAMPLER, MASK, **hyper)


def test_shapes_and_kinds() -> None:
    with pytest.raises(ValueError, match=r"mask has shape \(2, 3\) but sampler_log_prob has shape \(2, 1\)"):
        importance_weights(OLD, SAMPLER[:, :1], MASK)
    with pytest.raises(ValueError, match=r"mask has shape \(2, 3\) but old_log_prob has shape \(2, 1\)"):
        importance_weights(OLD[:, :1], SAMPLER, MASK)
    with pytest.raises(TypeError, match="mask must be boolean"):
        importance_weights(OLD, SAMPLER, MASK.float())
    for at, name in enumerate(("log_prob", "old_log_prob")):
        inputs = [OLD, SAMPLER, OLD]
        inputs[at] = OLD[:, :1]
        with pytest.raises(ValueError, match=rf"mask has shape \(2, 3\) but {name} has shape \(2, 1\)"):
            off_policy_sequence_mask(*inputs, MASK, delta=0.1)
    with pytest.raises(ValueError, match=r"mask has shape \(2, 3\) but advantage has shape \(2, 1\)"):
        off_policy_sequence_mask(OLD, SAMPLER, OLD[:, :1], MASK, delta=0.1)
    with pytest.raises(TypeError, match="mask must be boolean"):
        off_policy_sequence_mask(OLD, SAMPLER, OLD, MASK.float(), delta=0.1)
    for function in (top_entropy_mask, entropy_threshold):
        with pytest.raises(ValueError, match=r"mask has shape \(2, 3\) but entropy has shape \(2, 1\)"):
            function(OLD[:, :1], MASK)
        with pytest.raises(TypeError, match="mask must be boolean"):
            function(OLD, MASK.float())


def test_off_policy_sequences_by_hand() -> None:
    old = f64([[-1.0, -1.0, NAN], [-1.0, -1.0, -1.0], [-1.0, -1.0, -9.0]])
    # Means of old - new: 0.2, 0.05 and -0.3.
    log_prob = f64([[-1.3, -1.1, 5.0], [-1.2, -0.9, -1.05], [-0.7, -0.7, -9.0]])
    advantage = f64([[-1.0, 2.0, -1.0], [-1.0] * 3, [-1.0] * 3])
    mask = torch.tensor([[True, True, False], [True] * 3, [True, True, False]])
    weights, metrics = off_policy_sequence_mask(log_prob.requires_grad_(), old, advantage, mask, delta=0.1)
    assert weights.tolist() == [[0, 1, 0], [1, 1, 1], [1, 1, 0]]
    assert not weights.requires_grad
    assert_close(metrics["sequence_masked_fraction"].item(), 1 / 7)
    assert off_policy_sequence_mask(log_prob, old, advantage, mask, delta=torch.tensor(0.04))[0].sum() == 3
    with pytest.raises(ValueError, match=r"delta must be at least 0, got -0\.1"):
        off_policy_sequence_mask(log_prob, old, advantage, mask, delta=-0.1)


def test_only_negative_advantages_of_sequences_beyond_the_drift_limit_are_dropped() -> None:
    old, mask = f64([[-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]]), torch.ones(2, 3, dtype=torch.bool)
    log_prob = f64([[-1.5, -1.5, -1.5], [-1.25, -1.25, -1.25]])
    advantage = f64([[0.0, 0.5, -0.5], [-1.0, -1.0, -1.0]])
    weights, _ = off_policy_sequence_mask(log_prob, old, advantage, mask, delta=0.25)
    assert weights.tolist() == [[1, 1, 0], [1, 1, 1]]


ENTROPY = f64([[0.1, 2.0, 0.3, 9.0], [0.7, 0.5, NAN, 1.5]])
COUNTED = torch.tensor([[True, True, True, False], [True, True, False, True]])


@pytest.mark.parametrize(
    ("fraction", "threshold", "kept"),
    [
        # Of 6 tokens: 0.2 * 6 = 1.2, 2.4, 3.6, and never none.
        (0.2, 2.0, [[0, 1, 0, 0], [0, 0, 0, 0]]),
        (0.4, 1.5, [[0, 1, 0, 0], [0, 0, 0, 1]]),
        (0.6, 0.5, [[0, 1, 0, 0], [1, 1, 0, 1]]),
        (0.01, 2.0, [[0, 1, 0, 0], [0, 0, 0, 0]]),
        (1.0, 0.1, [[1, 1, 1, 0], [1, 1, 0, 1]]),
        (torch.tensor(0.4), 1.5, [[0, 1, 0, 0], [0, 0, 0, 1]]),
    ],
)
def test_top_entropy_by_hand(fraction: Any, threshold: float, kept: list[list[int]]) -> None:
    assert entropy_threshold(ENTROPY, COUNTED, fraction).item() == threshold
    weights, metrics = top_entropy_mask(ENTROPY.clone().requires_grad_(), COUNTED, fraction=fraction)
    assert weights.tolist() == kept
    assert not weights.requires_grad
    assert metrics["entropy_threshold"].item() == threshold
    assert_close(metrics["entropy_kept_fraction"].item(), sum(map(sum, kept)) / 6)


def test_a_fifth_is_the_default() -> None:
    entropy, mask = torch.arange(10.0).unsqueeze(0), torch.ones(1, 10, dtype=torch.bool)
    assert entropy_threshold(entropy, mask) == 8
    assert top_entropy_mask(entropy, mask)[0].sum() == 2


def test_equals_are_kept_together() -> None:
    weights, _ = top_entropy_mask(f64([[1.0, 0.5, 1.0, 1.0]]), torch.ones(1, 4, dtype=torch.bool), fraction=0.25)
    assert weights.tolist() == [[1, 0, 1, 1]]


def test_parts_of_a_batch_keep_the_same_tokens_as_the_whole() -> None:
    threshold = entropy_threshold(ENTROPY, COUNTED, 0.4)
    whole, _ = top_entropy_mask(ENTROPY, COUNTED, fraction=0.4)
    parts = [top_entropy_mask(ENTROPY[i : i + 1], COUNTED[i : i + 1], threshold=threshold)[0] for i in range(2)]
    assert torch.equal(torch.cat(parts), whole)
    alone = [top_entropy_mask(ENTROPY[i : i + 1], COUNTED[i : i + 1], fraction=0.7)[0] for i in range(2)]
    assert not torch.equal(torch.cat(alone), top_entropy_mask(ENTROPY, COUNTED, fraction=0.7)[0])
    assert top_entropy_mask(ENTROPY, COUNTED, threshold=0.7)[0].tolist() == [[0, 1, 0, 0], [1, 0, 0, 1]]


@settings(max_examples=30, deadline=None)
@given(tokens=st.integers(1, 40), fraction=st.floats(0.01, 1.0))
def test_how_many_are_kept(tokens: int, fraction: float) -> None:
    entropy = torch.randperm(tokens, generator=torch.Generator().manual_seed(tokens)).double().unsqueeze(0)
    kept = top_entropy_mask(entropy, torch.ones(1, tokens, dtype=torch.bool), fraction=fraction)[0].sum().item()
    assert kept >= 1
    assert abs(kept - fraction * tokens) <= 0.5 + 1e-4 or kept == 1


def test_no_threshold_is_read_on_the_host() -> None:
    """Tensors without data raise when they are read."""
    entropy, mask = ENTROPY.to("meta"), COUNTED.to("meta")
    assert top_entropy_mask(entropy, mask)[0].shape == (2, 4)
    assert importance_weights(OLD.to("meta"), SAMPLER.to("meta"), MASK.to("meta"), level="sequence")[0].shape == (2, 3)


@pytest.mark.parametrize("fraction", [0.0, 1.2])
def test_fractions(fraction: float) -> None:
    with pytest.raises(ValueError, match=f"fraction must be greater than 0 and at most 1, got {fraction}"):
        top_entropy_mask(ENTROPY, COUNTED, fraction=fraction)


def test_apply_multiplies_values_and_keeps_denominators() -> None:
    log_prob = f64([[-1.0, -2.0, -3.0], [-1.0, -2.0, -3.0]]).requires_grad_()
    (term,) = ppo(log_prob, MASK, old_log_prob=log_prob.detach(), advantage=torch.ones_like(log_prob))
    weights = f64([[2.0, 0.0, 1.0], [0.5, 3.0, 0.0]])
    (corrected,) = apply_correction([term], weights)
    assert corrected.mask is term.mask
    assert corrected.metrics is term.metrics
    assert_close(corrected.value.detach(), -weights)
    loss = aggregate(corrected.value, corrected.mask, denominator=count(term.mask))
    (gradient,) = torch.autograd.grad(loss, log_prob)
    assert_close(gradient, -weights / 5)


def test_a_weight_of_0_stops_non_finite_values() -> None:
    log_prob = f64([[0.0, -1.0]]).requires_grad_()
    term = LossTerm("objective", 1 / log_prob, torch.ones(1, 2, dtype=torch.bool))
    (corrected,) = apply_correction([term], f64([[0.0, 2.0]]))
    assert corrected.value.tolist() == [[0.0, -2.0]]


def test_a_value_per_sequence_gets_the_mean_of_its_weights() -> None:
    term = LossTerm("objective", f64([[10.0], [20.0]]), torch.ones(2, 1, dtype=torch.bool))
    token, sequence = (importance_weights(OLD, SAMPLER, MASK, level=level)[0] for level in ("token", "sequence"))
    # (2 + 1/8 + 1) / 3 and (2 + 3/2) / 2
    assert_close(apply_correction([term], token, MASK)[0].value, f64([[10 * 3.125 / 3], [35.0]]))
    assert_close(apply_correction([term], sequence, MASK)[0].value, f64([[5.0], [40.0]]))
    nested = LossTerm("objective", f64([[[10.0], [20.0]]]), torch.ones(1, 2, 1, dtype=torch.bool))
    assert_close(apply_correction([nested], sequence[None], MASK[None])[0].value, f64([[[5.0], [40.0]]]))
    with pytest.raises(ValueError, match="objective has one value per sequence: pass mask="):
        apply_correction([term], token)


def test_a_value_per_pair_cannot_be_corrected() -> None:
    term = LossTerm("objective", f64([[10.0]]), torch.ones(1, 1, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"objective has shape \(1, 1\), the weights \(2, 3\)"):
        apply_correction([term], RATIO, MASK)
