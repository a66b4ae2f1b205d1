"""DPPO by hand: bounds on probabilities, in the direction of the advantage only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from by_hand import assert_result
from torchrl_llm_kl.losses import LossTerm, dppo


def evaluate_probabilities(
    now: Sequence[float], old: Sequence[float], advantage: Sequence[float], **hyper: Any
) -> tuple[LossTerm, Tensor]:
    log_prob = torch.tensor([now], dtype=torch.float64).log().requires_grad_()
    (term,) = dppo(
        log_prob,
        torch.ones(1, len(now), dtype=torch.bool),
        old_log_prob=torch.tensor([old], dtype=torch.float64).log(),
        advantage=torch.tensor([advantage], dtype=torch.float64),
        **hyper,
    )
    (gradient,) = torch.autograd.grad(term.value.sum(), log_prob)
    return term, gradient


def weighted(now: Sequence[float], weight: Sequence[float]) -> list[list[float]]:
    """Values with these gradients: gradient * log p."""
    return [[w * torch.tensor(p, dtype=torch.float64).log().item() for p, w in zip(now, weight, strict=True)]]


def test_total_variation_by_hand() -> None:
    now, old = [0.40, 0.30, 0.25, 0.25, 0.40, 0.25], [0.25, 0.25, 0.40, 0.50, 0.25, 0.50]
    advantage = [1.0, 1.0, -1.0, -1.0, -2.0, 2.0]
    result = evaluate_probabilities(now, old, advantage, clip_low=0.2, clip_high=0.1)
    # Dropped: 0.15 > 0.1 upwards, 0.25 > 0.2 downwards. Kept: 0.05, 0.15, and both that go back.
    gradient = [0.0, -1.2, 0.625, 0.0, 3.2, -1.0]
    metrics = {
        "clip_fraction": 2 / 6,
        "clip_fraction_low": 1 / 6,
        "clip_fraction_high": 1 / 6,
        "truncated_fraction": 0.0,
    }
    assert_result(result, value=weighted(now, gradient), gradient=[gradient], **metrics)


def test_kl_is_of_the_old_policy_to_the_new() -> None:
    """KL(q || p) = 0.1438 and KL(p || q) = 0.1308 for q = 0.5, p = 0.25; and the mirror image."""
    now, old = [0.25, 0.25, 0.75, 0.75], [0.5, 0.5, 0.5, 0.5]
    hyper = {"divergence": "kl", "clip_low": 0.137, "clip_high": 0.15}
    result = evaluate_probabilities(now, old, [-1.0, 1.0, 1.0, -1.0], **hyper)
    gradient = [0.0, -0.5, -1.5, 1.5]
    assert_result(result, value=weighted(now, gradient), gradient=[gradient], clip_fraction_low=0.25)
    hyper = {"divergence": "kl", "clip_low": 0.15, "clip_high": 0.137}
    result = evaluate_probabilities(now, old, [-1.0, 1.0, 1.0, -1.0], **hyper)
    gradient = [0.5, -0.5, 0.0, 1.5]
    assert_result(result, value=weighted(now, gradient), gradient=[gradient], clip_fraction_high=0.25)


def test_weights_are_truncated() -> None:
    now, old = [0.5, 0.5], [0.01, 0.01]
    result = evaluate_probabilities(now, old, [-1.0, 1.0])
    assert_result(result, value=weighted(now, [20.0, 0.0]), gradient=[[20.0, 0.0]], truncated_fraction=1.0)
    free = evaluate_probabilities(now, old, [-1.0, 1.0], clip_ratio_c=None, clip_high=1.0)
    assert_result(free, value=weighted(now, [50.0, -50.0]), gradient=[[50.0, -50.0]], truncated_fraction=0.0)


@pytest.mark.parametrize(("divergence", "near", "far"), [("tv", 0.64, 0.66), ("kl", 0.65, 0.66)])
def test_default_bounds(divergence: str, near: float, far: float) -> None:
    """KL(1/2 || 0.65) = 0.0472, KL(1/2 || 0.66) = 0.0541."""
    _, gradient = evaluate_probabilities(
        [near, far, 1 - near, 1 - far], [0.5] * 4, [1.0, 1.0, -1.0, -1.0], divergence=divergence
    )
    assert (gradient != 0).tolist() == [[True, False, True, False]]


def test_a_token_that_has_become_certain() -> None:
    """No room for another token: the KL is infinite, and there is none if there was no room before."""
    now, old = [1.0, 1.0, 0.5, 0.5], [0.5, 1.0, 1.0, 1.0]
    result = evaluate_probabilities(now, old, [1.0, 1.0, -1.0, 1.0], divergence="kl")
    # Infinite; 0; log 2, downwards and back.
    gradient = [0.0, -1.0, 0.0, -0.5]
    assert_result(result, value=weighted(now, gradient), gradient=[gradient])


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        ({"divergence": "js"}, "divergence must be one of 'tv', 'kl', got 'js'"),
        ({"clip_low": -0.1}, "clip_low must be at least 0, got -0.1"),
        ({"clip_ratio_c": 1.0}, "clip_ratio_c must be greater than 1, got 1.0"),
    ],
)
def test_bad_hyper_parameters(hyper: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate_probabilities([0.5], [0.5], [1.0], **hyper)
