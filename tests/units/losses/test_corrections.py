"""Corrections of a sampler that differs from the trainer, by hand: weights, rejection, masks, metrics, effect on terms."""

from __future__ import annotations

import math
import re
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from torchrl_llm_kl.losses import (
    Divergence,
    LossTerm,
    RejectionMask,
    aggregate,
    apply_correction,
    correction_metrics,
    count,
    entropy_threshold,
    importance_weights,
    mismatch_metrics,
    off_policy_sequence_mask,
    ppo,
    rejection_mask,
    top_entropy_mask,
)

NAN, INF = float("nan"), float("inf")
LN2 = math.log(2)
DIVERGENCES = get_args(Divergence)


def f64(rows: Any) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


# ------------------------------------------------------------------ importance weights


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
def test_importance_weights_by_hand(
    hyper: dict[str, Any], weights: list[list[float]], metrics: dict[str, float]
) -> None:
    """Under numbers, and under the same as tensors."""
    tensors = {key: f64(value) if isinstance(value, float) else value for key, value in hyper.items()}
    for given in (hyper, tensors):
        found, seen = importance_weights(OLD.clone().requires_grad_(), SAMPLER, MASK, **given)
        assert_close(found, f64(weights), rtol=1e-6, atol=1e-7)
        assert not found.requires_grad
        for name, expected in metrics.items():
            assert math.isclose(seen[name].item(), expected, rel_tol=1e-6), name
            assert seen[name].ndim == 0
        fraction = "masked_fraction" if hyper.get("mode") == "mask" else "truncated_fraction"
        assert set(seen) == {"weight_mean", "weight_max", fraction, "effective_sample_size"}


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize(("mode", "high"), [("truncate", None), ("mask", 2.0)])
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


# ------------------------------------------------------------------ rejection and metrics


# Trainer over sampler: 2, 1/4, 1 | 1, 1/2 | 4. Masked out: anything.
D = f64([[2.0, 0.25, 1.0], [1.0, 0.5, 1.0], [4.0, 1.0, 1.0]]).log()
TOKENS = torch.tensor([[True, True, True], [True, True, False], [True, False, False]])
SEEN = f64([[-3.0, -0.5, -1.0], [-1.0, -2.0, NAN], [-2.0, -INF, 3.0]])
TRAINER = torch.where(TOKENS, SEEN + D, f64(7.0))


@pytest.mark.parametrize(
    ("divergence", "bounds", "kept"),
    [
        # k1 of tokens in units of ln 2: -1, 2, 0 | 0, 1 | -2
        ("token_k1", {"low": -1.5 * LN2, "high": 1.5 * LN2}, [[1, 0, 1], [1, 1, 0], [0, 0, 0]]),
        ("token_k1", {"low": -0.5 * LN2}, [[0, 1, 1], [1, 1, 0], [0, 0, 0]]),
        ("token_k1", {"high": 0.5 * LN2}, [[1, 0, 1], [1, 0, 0], [1, 0, 0]]),
        # halves of squares: .24, .96, 0 | 0, .24 | .96
        ("token_k2", {"high": 0.5}, [[1, 0, 1], [1, 1, 0], [0, 0, 0]]),
        # r - 1 - ln r: .307, .636, 0 | 0, .193 | 1.614
        ("token_k3", {"high": 0.7}, [[1, 1, 1], [1, 1, 0], [0, 0, 0]]),
        ("token_k3", {"high": 0.25}, [[0, 0, 1], [1, 1, 0], [0, 0, 0]]),
        # sums: 1 | 1 | -2; 1.2 | .24 | .96; .943 | .193 | 1.614
        ("seq_sum_k1", {"low": -1.5 * LN2, "high": 1.5 * LN2}, [[1, 1, 1], [1, 1, 0], [0, 0, 0]]),
        ("seq_sum_k1", {"high": 0.5 * LN2}, [[0, 0, 0], [0, 0, 0], [1, 0, 0]]),
        ("seq_sum_k2", {"high": 1.0}, [[0, 0, 0], [1, 1, 0], [1, 0, 0]]),
        ("seq_sum_k3", {"high": 0.9}, [[0, 0, 0], [1, 1, 0], [0, 0, 0]]),
        # means: 1/3 | 1/2 | -2; .4 | .12 | .96; .314 | .097 | 1.614
        ("seq_mean_k1", {"low": -1.5 * LN2, "high": 0.4 * LN2}, [[1, 1, 1], [0, 0, 0], [0, 0, 0]]),
        ("seq_mean_k2", {"high": 0.3}, [[0, 0, 0], [1, 1, 0], [0, 0, 0]]),
        ("seq_mean_k3", {"high": 0.35}, [[1, 1, 1], [1, 1, 0], [0, 0, 0]]),
        ("seq_max_k1", {"low": -1.5 * LN2}, [[1, 1, 1], [1, 1, 0], [0, 0, 0]]),
        ("seq_max_k1", {"high": 1.5 * LN2}, [[0, 0, 0], [1, 1, 0], [1, 0, 0]]),
        ("seq_max_k2", {"high": 0.9}, [[0, 0, 0], [1, 1, 0], [0, 0, 0]]),
        ("seq_max_k3", {"high": 0.7}, [[1, 1, 1], [1, 1, 0], [0, 0, 0]]),
    ],
)
def test_rejection_by_hand(divergence: str, bounds: dict[str, Any], kept: list[list[int]]) -> None:
    """Under numbers, and under the same as tensors."""
    whole = sum(sum(row) == int(mask.sum()) for row, mask in zip(kept, TOKENS, strict=True))
    expected = {
        f"{divergence}_masked_fraction": 1 - sum(map(sum, kept)) / 6,
        f"{divergence}_seq_masked_fraction": 1 - whole / 3,
    }
    for given in (bounds, {name: f64(value) for name, value in bounds.items()}):
        weights, metrics = rejection_mask(
            TRAINER.clone().requires_grad_(), SEEN, TOKENS, divergence=divergence, **given
        )
        assert weights.tolist() == kept
        assert not weights.requires_grad
        assert {name: metric.item() for name, metric in metrics.items()} == pytest.approx(expected)


def test_bounds_are_part_of_what_is_kept_and_agreement_is_never_rejected() -> None:
    for divergence in DIVERGENCES:
        same, mask = f64([[-1.0, -2.0]]), torch.ones(1, 2, dtype=torch.bool)
        tiny = {"high": 1e-9} | ({"low": -1e-9} if divergence.endswith("k1") else {})
        assert rejection_mask(same, same, mask, divergence=divergence, **tiny)[0].tolist() == [[1, 1]]
        if divergence.endswith("k1"):
            assert rejection_mask(same, same, mask, divergence=divergence, low=0.0, high=0.0)[0].tolist() == [[1, 1]]


def test_masked_out_tokens_reject_nothing() -> None:
    """A bound that is a tensor is not read: it may exclude 0, the value of masked-out tokens."""
    weights, metrics = rejection_mask(
        f64([[-1.5, -1.0]]), f64([[-1.0, -1.0]]), torch.tensor([[True, False]]), divergence="seq_max_k1", low=f64(0.1)
    )
    assert weights.tolist() == [[1, 0]]
    assert metrics["seq_max_k1_seq_masked_fraction"] == 0


def test_rejection_of_anything() -> None:
    """Not scored is not rejected; impossible in one of the two is; no token, no metric."""
    for divergence in DIVERGENCES:
        low = {"low": -3.0} if divergence.endswith("k1") else {}
        mask = torch.ones(1, 1, dtype=torch.bool)
        for old, sampler, kept in (
            (-1.0, NAN, 1),
            (-INF, -INF, 1),
            (-INF, -1.0, 0),
            (-1.0, -INF, 0),
            (-200.0, -1.0, 0),
        ):
            weights, metrics = rejection_mask(
                f64([[old]]), f64([[sampler]]), mask, divergence=divergence, high=3.0, **low
            )
            assert weights.tolist() == [[kept]], (divergence, old, sampler)
            assert all(metric == 1 - kept for metric in metrics.values())
        for shape in ((2, 3), (0, 3), (2, 0)):
            nothing = torch.zeros(shape, dtype=torch.bool)
            weights, metrics = rejection_mask(
                torch.zeros(shape).bfloat16(), torch.zeros(shape), nothing, divergence=divergence, high=3.0
            )
            assert weights.dtype == torch.float32
            assert weights.sum() == 0
            assert all(metric == 0 for metric in metrics.values())
        meta = [x.to("meta") for x in (TRAINER, SEEN, TOKENS)]
        assert rejection_mask(*meta, divergence=divergence, high=f64(3.0).to("meta"))[0].shape == (3, 3)


def test_mismatch_metrics_by_hand() -> None:
    """Mean log-probs of the trainer, of the sampler; and the ratios that are above."""
    found = mismatch_metrics(TRAINER.clone().requires_grad_(), SEEN, TOKENS)
    sampler = [4.5 / 3, 3.0 / 2, 2.0]  # log-perplexities
    trainer = [sampler[0] + LN2 / 3, sampler[1] + LN2 / 2, sampler[2] - 2 * LN2]
    difference = [LN2 / 3, LN2 / 2, -2 * LN2]
    expected = {
        "trainer_log_ppl": sum(trainer) / 3,
        "sampler_log_ppl": 5 / 3,
        "trainer_ppl": sum(map(math.exp, trainer)) / 3,
        "sampler_ppl": sum(map(math.exp, sampler)) / 3,
        "log_ppl_diff": sum(difference) / 3,
        "log_ppl_abs_diff": (LN2 / 3 + LN2 / 2 + 2 * LN2) / 3,
        "log_ppl_diff_max": LN2 / 2,
        "log_ppl_diff_min": -2 * LN2,
        "ppl_ratio": (2 ** (1 / 3) + 2**0.5 + 0.25) / 3,
        "mismatch_k1": 0.0,
        "mismatch_k3": (2 + 0.25 + 1 + 1 + 0.5 + 4) / 6 - 1,
        "chi2_token": (4 + 1 / 16 + 1 + 1 + 1 / 4 + 16) / 6 - 1,
        "chi2_seq": (1 / 4 + 1 / 4 + 16) / 3 - 1,
    }
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name].shape == ()
        assert not found[name].requires_grad
        assert found[name].item() == pytest.approx(value, rel=1e-9, abs=1e-12), name


def test_metrics_of_sequences_that_all_differ_one_way() -> None:
    """The third has no tokens; of the last the trainer did not score one."""
    old, sampler = f64([[-1.5, -2.0], [-0.75, 9.0], [7.0, 7.0], [NAN, -1.25]]), f64([[-1.0, -1.0]] * 4)
    sampler[1, 0] = -0.5
    mask = torch.tensor([[True, True], [True, False], [False, False], [True, True]])
    found = mismatch_metrics(old, sampler, mask)
    assert found["mismatch_k1"].item() == pytest.approx((0.5 + 1.0 + 0.25 + 0.25) / 4)
    assert found["log_ppl_diff_max"].item() == pytest.approx(0.75)
    assert found["log_ppl_diff_min"].item() == pytest.approx(0.25)
    other = mismatch_metrics(sampler, old, mask)
    assert (other["log_ppl_diff_max"].item(), other["log_ppl_diff_min"].item()) == pytest.approx((-0.25, -0.75))
    far = mismatch_metrics(torch.full((1, 2), -1.0), torch.full((1, 2), -1e4), torch.ones(1, 2) == 1)
    assert all(value.isfinite() for value in far.values())


def test_tokens_that_the_sampler_did_not_score_are_left_out_of_the_metrics() -> None:
    old, sampler = f64([[-1.0, -2.0, -9.0], [-4.0, -1.0, -1.0]]), f64([[-1.5, -1.0, NAN], [NAN, NAN, NAN]])
    everywhere = torch.ones(2, 3, dtype=torch.bool)
    fewer = torch.tensor([[True, True, False], [False, False, False]])
    found, expected = mismatch_metrics(old, sampler, everywhere), mismatch_metrics(old, sampler, fewer)
    assert found == expected
    assert expected["log_ppl_diff"].item() == pytest.approx(0.25)


def test_metrics_without_tokens_without_data_and_of_impossible_tokens() -> None:
    for shape in ((2, 3), (0, 3), (2, 0)):
        nothing = mismatch_metrics(torch.zeros(shape), torch.zeros(shape), torch.zeros(shape, dtype=torch.bool))
        assert all(value == 0 for value in nothing.values())
    meta = mismatch_metrics(*(x.to("meta") for x in (TRAINER, SEEN, TOKENS)))
    assert all(value.shape == () for value in meta.values())
    far = mismatch_metrics(torch.tensor([[-1e4, -1.0]]), torch.tensor([[-1.0, -1e4]]), torch.ones(1, 2) == 1)
    assert all(value.isfinite() for value in far.values())


def test_metrics_of_the_product_by_hand() -> None:
    weights = torch.tensor([[2.0, 0.0, 1.0], [1.0, 1.0, 9.0], [7.0, 7.0, 7.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True], [True, True, False], [False, False, False]])
    found = correction_metrics(weights.requires_grad_(), mask)
    # 2, 0, 1, 1, 1: a mean of 1, a mean square of 7/5
    assert {name: value.item() for name, value in found.items()} == pytest.approx(
        {"rejected_fraction": 1 / 5, "rejected_seq_fraction": 1 / 2, "correction_ess": 5 / 7}
    )
    assert not any(value.requires_grad for value in found.values())
    for empty in (torch.zeros(2, 3, dtype=torch.bool), torch.zeros(0, 3, dtype=torch.bool)):
        assert all(value == 0 for value in correction_metrics(torch.ones(empty.shape), empty).values())
    assert correction_metrics(torch.full((1, 2), 1e30), torch.ones(1, 2) == 1)["correction_ess"] == 1


# ------------------------------------------------------------------ tokens of some sequences, or of most entropy


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


def test_sequence_masking_keeps_good_tokens_and_sequences_at_the_bound() -> None:
    old, log_prob = torch.full((2, 3), -1.0), torch.tensor([[-1.25, -1.25, -1.25], [-2.0, -2.0, -2.0]])
    advantage = torch.tensor([[-1.0, -1.0, -1.0], [-1.0, 0.0, 0.5]])
    weights, metrics = off_policy_sequence_mask(
        log_prob, old, advantage, torch.ones(2, 3, dtype=torch.bool), delta=0.25
    )
    assert weights.tolist() == [[1.0, 1.0, 1.0], [0.0, 1.0, 1.0]]
    assert_close(metrics["sequence_masked_fraction"].item(), 1 / 6)


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


def test_how_many_are_kept() -> None:
    for tokens in (1, 2, 3, 7, 10, 33, 40):
        entropy = torch.randperm(tokens, generator=torch.Generator().manual_seed(tokens)).double().unsqueeze(0)
        for fraction in (0.01, 0.1, 0.25, 1 / 3, 0.5, 0.77, 0.99, 1.0):
            kept = top_entropy_mask(entropy, torch.ones(1, tokens) == 1, fraction=fraction)[0].sum().item()
            assert kept >= 1
            assert abs(kept - fraction * tokens) <= 0.5 + 1e-4 or kept == 1, (tokens, fraction)


def test_entropies_rounded_below_0_are_kept_and_masked_out_ones_are_not() -> None:
    entropy, mask = torch.tensor([[-1e-7, 1.0, 5.0]]), torch.tensor([[True, True, False]])
    assert_close(entropy_threshold(entropy, mask, fraction=1.0), torch.tensor(-1e-7), rtol=0, atol=0)
    assert top_entropy_mask(entropy, mask, fraction=1.0)[0].tolist() == [[1.0, 1.0, 0.0]]


def test_no_threshold_is_read_on_the_host() -> None:
    """Tensors without data raise when they are read."""
    entropy, mask = ENTROPY.to("meta"), COUNTED.to("meta")
    assert top_entropy_mask(entropy, mask)[0].shape == (2, 4)
    assert importance_weights(OLD.to("meta"), SAMPLER.to("meta"), MASK.to("meta"), level="sequence")[0].shape == (2, 3)


# ------------------------------------------------------------------ effect on terms


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


# ------------------------------------------------------------------ errors


SHAPED: dict[str, tuple[Any, dict[str, Tensor]]] = {
    "weights": (importance_weights, {"old_log_prob": OLD, "sampler_log_prob": SAMPLER}),
    "off-policy": (
        lambda **given: off_policy_sequence_mask(**given, delta=0.1),
        {"log_prob": OLD, "old_log_prob": SAMPLER, "advantage": OLD},
    ),
    "top entropy": (top_entropy_mask, {"entropy": OLD}),
    "threshold": (entropy_threshold, {"entropy": OLD}),
    "metrics": (mismatch_metrics, {"old_log_prob": OLD, "sampler_log_prob": SAMPLER}),
    "product": (correction_metrics, {"weights": OLD}),
}


@pytest.mark.parametrize("what", SHAPED)
def test_unequal_shapes_and_masks_of_numbers_are_refused(what: str) -> None:
    function, inputs = SHAPED[what]
    for name in inputs:
        with pytest.raises(ValueError, match=rf"mask has shape \(2, 3\) but {name} has shape \(2, 1\)"):
            function(**{**inputs, name: OLD[:, :1]}, mask=MASK)
    with pytest.raises(TypeError, match="mask must be boolean"):
        function(**inputs, mask=MASK.float())


#: what refuses -> hyper-parameters, and what it says
REFUSED: list[tuple[Any, list[tuple[dict[str, Any], str]]]] = [
    (
        lambda **hyper: importance_weights(OLD, SAMPLER, MASK, **hyper),
        [
            ({"level": "sentence"}, "level must be one of 'token', 'sequence', 'geometric', got 'sentence'"),
            ({"mode": "clip"}, "mode must be one of 'truncate', 'mask', got 'clip'"),
            ({"low": 3.0}, r"low must be at most high, got low=3\.0 and high=2\.0"),
            ({"low": -0.1}, r"low must be at least 0, got -0\.1"),
            ({"high": 0.0}, r"high must be greater than 0, got 0\.0"),
            ({"high": NAN}, "high must be greater than 0, got nan"),
        ],
    ),
    *(
        (
            refuses,
            [
                ({"divergence": "seq_k1", "high": 1.0}, "divergence must be one of 'token_k1', .*, got 'seq_k1'"),
                ({"divergence": "token_k3"}, "token_k3 rejects nothing without a bound"),
                ({"divergence": "seq_sum_k2", "low": 0.1, "high": 1.0}, r"k2 is never negative.*leave out low=0\.1"),
                ({"divergence": "token_k1", "low": 0.1}, r"low must be at most 0.*got 0\.1"),
                ({"divergence": "token_k1", "high": -0.1}, r"high must be at least 0.*got -0\.1"),
                ({"divergence": "token_k2", "high": 0.0}, r"high must be greater than 0.*got 0\.0"),
                ({"divergence": "token_k2", "high": NAN}, "high must be greater than 0.*got nan"),
            ],
        )
        for refuses in (lambda **hyper: rejection_mask(OLD, SAMPLER, MASK, **hyper), RejectionMask)
    ),
    (
        lambda **hyper: top_entropy_mask(-OLD, MASK, **hyper),
        [({"fraction": x}, f"fraction must be greater than 0 and at most 1, got {x}") for x in (0.0, 1.2)],
    ),
    (
        lambda **hyper: off_policy_sequence_mask(OLD, SAMPLER, OLD, MASK, **hyper),
        [({"delta": -0.1}, r"delta must be at least 0, got -0\.1")],
    ),
]


def test_bounds_that_are_refused() -> None:
    for function, table in REFUSED:
        for hyper, message in table:
            with pytest.raises(ValueError, match=re.compile(message)):
                function(**hyper)
