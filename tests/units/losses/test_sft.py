"""Imitation by hand: values, and gradients that show where the weights are detached."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from torchrl_llm_kl.losses import get_objective, sft_phi


def evaluate(name: str, probability: list[float], mask: list[bool] | None = None, **hyper: Any) -> tuple[Any, Tensor]:
    log_prob = torch.tensor([probability], dtype=torch.float64).log().requires_grad_()
    keep = torch.tensor([mask or [True] * len(probability)])
    (term,) = get_objective(name)(log_prob, keep, **hyper)
    (gradient,) = torch.autograd.grad(torch.where(keep, term.value, 0).sum(), log_prob)
    assert term.name == "objective"
    return term, gradient


def assert_row(actual: Tensor, expected: list[float]) -> None:
    assert_close(actual.detach(), torch.tensor([expected], dtype=torch.float64), rtol=1e-6, atol=1e-7)


def test_sft_is_minus_the_log_probability() -> None:
    term, gradient = evaluate("sft", [0.5, 0.1])
    assert_row(term.value, [0.6931472, 2.3025851])
    assert_row(gradient, [-1.0, -1.0])


def test_sft_is_weighs_by_the_probability_without_gradient() -> None:
    term, gradient = evaluate("sft_is", [0.5, 0.1, 0.9], [True, True, False])
    assert_row(term.value[:, :2], [0.3465736, 0.2302585])
    assert_row(gradient, [-0.5, -0.1, 0.0])
    assert_close(term.metrics["weight_mean"].item(), 0.3)


def test_sft_phi_weighs_by_how_undecided_the_policy_is() -> None:
    term, gradient = evaluate("sft_phi", [0.9, 0.5, 0.2, 0.01], [True, True, True, False])
    assert_row(term.value[:, :3], [0.0094824, 0.1732868, 0.2575101])
    assert_row(gradient, [-0.09, -0.25, -0.16, 0.0])
    assert_close(term.metrics["weight_mean"].item(), 0.5 / 3)


@pytest.mark.parametrize("cutoff", [0.4, torch.tensor(0.4, dtype=torch.float64)], ids=["number", "tensor"])
def test_above_the_cutoff_nothing_is_trained(cutoff: Any) -> None:
    term, gradient = evaluate("sft_phi", [0.9, 0.5, 0.3], cutoff_prob=cutoff)
    # 0.09 and 0.25 times -log(0.4); 0.21 times -log(0.3).
    assert_row(term.value, [0.0824662, 0.2290727, 0.2528343])
    assert_row(gradient, [0.0, 0.0, -0.21])


def test_without_a_cutoff_all_are_trained() -> None:
    assert_row(evaluate("sft_phi", [0.999, 0.5])[1], [-0.000999, -0.25])


def test_the_weight_near_certainty_is_not_rounded_away() -> None:
    log_prob = torch.tensor([[-1e-9]], requires_grad=True)
    (term,) = sft_phi(log_prob, torch.tensor([[True]]))
    (gradient,) = torch.autograd.grad(term.value.sum(), log_prob)
    assert math.isclose(gradient.item(), -1e-9, rel_tol=1e-5)


@pytest.mark.parametrize("cutoff", [0.0, 1.5, -0.1, float("nan")])
def test_a_cutoff_that_is_no_probability(cutoff: float) -> None:
    with pytest.raises(ValueError, match=f"cutoff_prob must be .*greater than 0 and at most 1, got {cutoff}"):
        evaluate("sft_phi", [0.5], cutoff_prob=cutoff)
