"""SAPO: the gate is part of what is differentiated."""

from __future__ import annotations

import pytest
from torch.testing import assert_close

from by_hand import assert_result, evaluate, own_names
from torchrl_llm_kl.losses import sapo, spec_of

# sigmoid and its slope at 1 and 2.
P1, SLOPE1 = 0.7310585786300049, 0.19661193324148185
P2, SLOPE2 = 0.8807970779778823, 0.10499358540350662


def test_values_and_gradients_by_hand() -> None:
    result = evaluate(sapo, ratio=[[2.0, 2.0]], advantage=[[3.0, -5.0]], tau_pos=1.0, tau_neg=2.0)
    assert_result(
        result,
        value=[[-3 * 4 * P1, 5 * 4 * P2 / 2]],
        gradient=[[-3 * 2 * 4 * SLOPE1, 5 * 2 * 4 * SLOPE2]],
        gate_mean=2 * (SLOPE1 + SLOPE2),
    )


def test_far_ratios_have_little_weight() -> None:
    """Detaching the gate, as Trinity does, yields 3.99."""
    term, gradient = evaluate(sapo, ratio=[[7.4, 7.4]], advantage=[[1.0, -1.0]], tau_neg=1.0)
    assert term.value[0].tolist() == pytest.approx([-3.9934, 3.9934], abs=1e-4)
    assert gradient[0].tolist() == pytest.approx([-0.0490, 0.0490], abs=1e-4)


def test_at_ratio_1_it_is_the_policy_gradient_whatever_the_temperature() -> None:
    result = evaluate(sapo, ratio=[[1.0, 1.0]], advantage=[[3.0, -5.0]], tau_pos=0.5, tau_neg=4.0)
    assert_result(result, value=[[-12.0, 2.5]], gradient=[[-3.0, 5.0]], gate_mean=1.0)


def test_defaults_and_names() -> None:
    ours, _ = evaluate(sapo, ratio=[[1.0, 1.0]], advantage=[[1.0, -1.0]])
    assert ours.value[0].tolist() == pytest.approx([-2.0, 2 / 1.05])
    hyper = own_names(sapo, sapo_temperature_pos=1.0, sapo_temperature_neg=2.0)
    named, _ = evaluate(sapo, ratio=[[2.0, 2.0]], advantage=[[3.0, -5.0]], **hyper)
    assert_close(named.value[0, 1].item(), 10 * P2)
    assert spec_of(sapo).aggregation == "seq-mean-token-mean"


@pytest.mark.parametrize("name", ["tau_pos", "tau_neg"])
def test_a_temperature_is_positive(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be greater than 0, got 0.0"):
        evaluate(sapo, ratio=[[1.0]], advantage=[[1.0]], **{name: 0.0})
