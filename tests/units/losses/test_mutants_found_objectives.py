"""Tests for mutants of objectives that survived all others: bounds met exactly, advantages of 0, counts."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.testing import assert_close

from by_hand import assert_result, evaluate, tensor
from torchrl_llm_kl.losses import (
    LossTerm,
    cispo,
    dpo,
    dppo,
    gmpo,
    rec,
    sapo,
    select_clip_cov,
    select_kl_cov,
    sppo,
    vespo,
)


def metrics_of(term: LossTerm) -> dict[str, float]:
    return {name: round(metric.item(), 6) for name, metric in term.metrics.items()}


def test_cispo_counts_each_side_by_its_own_bound() -> None:
    tokens = {"ratio": [[1.25, 0.75, 0.5, 2.0, 3.0]], "advantage": [[1.0] * 5]}
    term, _ = evaluate(cispo, **tokens, clip_low=0.3, clip_high=0.2)
    assert metrics_of(term) == {"clip_fraction": 0.8, "clip_fraction_low": 0.2, "clip_fraction_high": 0.6}
    term, _ = evaluate(cispo, **tokens, clip_low=0.2, clip_high=0.3)
    assert metrics_of(term) == {"clip_fraction": 0.8, "clip_fraction_low": 0.4, "clip_fraction_high": 0.4}


def test_cispo_neither_counts_nor_drops_ratios_at_a_bound() -> None:
    tokens: dict[str, Any] = {"ratio": [[1.0, 1.0]], "advantage": [[1.0, -1.0]]}
    bounds = {"clip_low": 0.0, "clip_high": 0.0, "mask_clip_low": 0.0, "mask_clip_high": 0.0}
    result = evaluate(cispo, **tokens, **bounds, enable_mask_clip=True)
    assert_result(result, value=[[1.0, -1.0]], gradient=[[-1.0, 1.0]])
    assert set(metrics_of(result[0]).values()) == {0.0}


def test_cispo_drops_only_tokens_that_move_away() -> None:
    tokens = {"ratio": [[2.0, 2.0, 2.0, 0.5, 0.5, 0.5]], "advantage": [[0.5, 0.0, -0.5, 0.5, 0.0, -0.5]]}
    term, _ = evaluate(cispo, **tokens, enable_mask_clip=True, mask_clip_low=0.3, mask_clip_high=0.4)
    assert_close(term.metrics["token_masked_fraction"].item(), 2 / 6)


# Log-probs 4 and -4 from their mean, -5; the last token is masked out.
LOG_PROB = tensor([[-1.0, -9.0, -5.0, -5.0]])
MASK = torch.tensor([[True, True, True, False]])


def test_covariances_are_those_of_deviations_from_the_means() -> None:
    """Advantages 1, -1 and 0 from their mean, wherever that is: covariances 4, 4 and 0."""
    for shift in (-10.0, 0.0, 10.0):
        advantage = tensor([[1.0, -1.0, 0.0, 99.0]]) + shift
        inputs: dict[str, Any] = {"advantage": advantage, "old_log_prob": LOG_PROB, "fraction": 1.0}
        between = select_clip_cov(LOG_PROB, MASK, **inputs, cov_low=3.0, cov_high=5.0)
        assert between.tolist() == [[True, True, False, False]]
        # A masked-out log-prob and advantage of 0 would have a covariance of -5 times the mean.
        assert not select_clip_cov(LOG_PROB, MASK, **inputs, cov_low=40.0, cov_high=60.0).any()
        highest = select_kl_cov(LOG_PROB, MASK, advantage=advantage, fraction=0.7)
        assert highest.tolist() == [[True, True, False, False]]


def test_fractions_are_of_the_masked_in_tokens() -> None:
    inputs = {"advantage": tensor([[1.0, -1.0, 0.0, 0.0]]), "old_log_prob": LOG_PROB}
    assert select_clip_cov(LOG_PROB, MASK, **inputs, fraction=0.5, cov_low=3.0).sum() == 1


def test_dppo_keeps_distances_at_a_bound_and_treats_an_advantage_of_0_as_bad() -> None:
    tokens: dict[str, Any] = {"log_prob": [[math.log(0.5), math.log(0.25)]], "ratio": [[2.0, 0.5]]}
    term, _ = evaluate(dppo, **tokens, advantage=[[1.0, -1.0]], clip_low=0.25, clip_high=0.25)
    assert metrics_of(term) == dict.fromkeys(term.metrics, 0.0)
    term, _ = evaluate(dppo, **tokens, advantage=[[0.0, 0.0]], clip_low=0.1, clip_high=0.1)
    assert metrics_of(term)["clip_fraction_low"] == 0.5
    assert metrics_of(term)["clip_fraction_high"] == 0.0


def test_dppos_kl_where_the_old_policy_left_no_other_token() -> None:
    """KL(1 || 1/2) = log 2 = 0.69."""
    tokens: dict[str, Any] = {
        "log_prob": [[math.log(0.5)]],
        "ratio": [[0.5]],
        "advantage": [[-1.0]],
        "divergence": "kl",
    }
    for bound, dropped in ((0.6, 1.0), (0.8, 0.0)):
        term, _ = evaluate(dppo, **tokens, clip_low=bound)
        assert term.metrics["clip_fraction"] == dropped


def test_gmpo_counts_each_side_and_treats_an_advantage_of_0_as_bad() -> None:
    ratio, advantage = [[4.0, 1.0], [0.25, 0.25], [0.25, 4.0]], [[1.0, 1.0], [-1.0, -1.0], [0.0, 0.0]]
    term, _ = evaluate(gmpo, ratio=ratio, advantage=advantage, clip_low=0.2, clip_high=0.3)
    assert_close(term.metrics["clip_fraction"].item(), 4 / 6)
    assert_close(term.metrics["clip_fraction_low"].item(), 3 / 6)
    assert_close(term.metrics["clip_fraction_high"].item(), 1 / 6)


def test_rewards_of_preferences_are_means_over_pairs() -> None:
    log_prob = tensor([[-1.0], [-3.0], [-1.0], [-4.0], [0.0], [0.0]])
    ref = tensor([[-2.0], [-2.0], [-4.0], [-9.0], [0.0], [0.0]])
    mask = torch.tensor([[True], [True], [True], [True], [True], [False]])  # the third pair is no pair
    (term,) = dpo(log_prob, mask, ref_log_prob=ref, beta=0.5)
    # Chosen 1 and 3, rejected -1 and 5 nats above the reference.
    assert metrics_of(term) == {
        "chosen_reward": 1.0,
        "rejected_reward": 1.0,
        "reward_margin": 0.0,
        "reward_accuracy": 0.5,
    }


def test_rec_keeps_ratios_at_a_bound() -> None:
    """With log-probs of 0 the ratios are exact."""
    tokens: dict[str, Any] = {"ratio": [[2.0, 0.5]], "log_prob": [[0.0, 0.0]]}
    term, _ = evaluate(rec, **tokens, advantage=[[1.0, -1.0]], clip_mode="two-side", epsilon_low=0.5, epsilon_high=1.0)
    assert term.metrics["clip_fraction"] == 0
    bounds = {"epsilon_low": 0.25, "epsilon_high": 0.25, "epsilon_low_prime": 0.5, "epsilon_high_prime": 1.0}
    term, _ = evaluate(rec, **tokens, advantage=[[-1.0, 1.0]], clip_mode="ring", **bounds)
    assert term.metrics["clip_fraction"] == 0
    term, _ = evaluate(rec, **tokens, advantage=[[1.0, -1.0]], clip_mode="ring", **bounds)
    assert term.metrics["clip_fraction"] == 1


def test_recs_one_side_is_that_of_the_advantage() -> None:
    tokens: dict[str, Any] = {"ratio": [[3.0, 0.1, 3.0, 0.1]], "advantage": [[0.0, 0.0, 0.5, 0.5]]}
    term, _ = evaluate(rec, **tokens, clip_mode="one-side")
    assert metrics_of(term) == {"clip_fraction": 0.25, "clip_fraction_low": 0.0, "clip_fraction_high": 0.25}


def test_recs_sequence_weight_is_of_masked_in_tokens() -> None:
    tokens: dict[str, Any] = {"ratio": [[4.0, 1.0, 9.0]], "advantage": [[3.0, 3.0, 3.0]]}
    mask = torch.tensor([[True, True, False]])
    _, gradient = evaluate(rec, **tokens, mask=mask, weight="gspo_importance_sampling")
    assert_close(gradient, tensor([[-6.0, -6.0, 0.0]]))


def test_an_advantage_of_0_is_gated_by_sapo_as_a_bad_one_and_weighed_by_vespo_as_a_good_one() -> None:
    tokens: dict[str, Any] = {"ratio": [[2.0]], "advantage": [[0.0]]}
    term, _ = evaluate(sapo, **tokens, tau_pos=1.0, tau_neg=2.0)
    assert metrics_of(term) == {"gate_mean": 0.419974}  # 4 p (1 - p) with p = sigmoid(2)
    term, _ = evaluate(vespo, **tokens, k_pos=2.0, lambda_pos=3.0, k_neg=3.0, lambda_neg=2.0)
    assert metrics_of(term) == {"weight_mean": 0.199148}  # 2**2 exp(-3)


def test_sppo_keeps_ratios_at_a_bound() -> None:
    term, gradient = evaluate(sppo, ratio=[[1.0, 1.0]], advantage=[[3.0, -5.0]], epsilon=0.0)
    assert_close(gradient, tensor([[-3.0, 5.0]]))
    assert set(metrics_of(term).values()) == {0.0}
