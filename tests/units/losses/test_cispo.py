"""CISPO by hand: no clipped token is without gradient."""

from __future__ import annotations

import pytest

from by_hand import assert_result, evaluate, own_names
from torchrl_llm_kl.losses import cispo

BOUNDS = {"clip_low": 0.3, "clip_high": 0.2}
TOKENS = {
    "ratio": [[2.0, 2.0, 0.5, 0.5, 1.1]],
    "advantage": [[3.0, -3.0, 3.0, -3.0, 5.0]],
    "log_prob": [[-1.0, -2.0, -1.0, -2.0, -3.0]],
}
VALUE, GRADIENT = [[3.6, -7.2, 2.1, -4.2, 16.5]], [[-3.6, 3.6, -2.1, 2.1, -5.5]]


def test_defect_40_clipped_tokens_have_a_gradient() -> None:
    _, gradient = evaluate(cispo, **TOKENS, **BOUNDS)
    assert (gradient != 0).all()
    # The weight of the bound, 1.2 or 0.7, times -A.
    assert gradient[0, :4].tolist() == pytest.approx([-3.6, 3.6, -2.1, 2.1])


def test_values_and_gradients_by_hand() -> None:
    metrics = {"clip_fraction": 0.8, "clip_fraction_low": 0.4, "clip_fraction_high": 0.4}
    assert_result(evaluate(cispo, **TOKENS, **BOUNDS), value=VALUE, gradient=GRADIENT, **metrics)
    named = evaluate(cispo, **TOKENS, **own_names(cispo, clip_range_low=0.3, clip_range_high=0.2))
    assert_result(named, value=VALUE, gradient=GRADIENT)


def test_by_default_there_is_no_lower_bound() -> None:
    result = evaluate(cispo, ratio=[[0.01, 5.0]], advantage=[[1.0, 1.0]])
    assert_result(
        result, value=[[0.01, 1.28]], gradient=[[-0.01, -1.28]], clip_fraction_low=0.0, clip_fraction_high=0.5
    )


def test_the_token_mask_drops_tokens_that_ppo_clips() -> None:
    tokens = {"ratio": [[2.0, 1.45, 2.0, 0.55, 0.65, 0.55]], "advantage": [[1.0, 1.0, -1.0, -1.0, -1.0, 1.0]]}
    hyper = own_names(cispo, enable_mask_clip=True, mask_clip_range_low=0.4, mask_clip_range_high=0.5)
    result = evaluate(cispo, **tokens, **hyper, **BOUNDS)
    # Dropped: 2 > 1.5 with A > 0, and 0.55 < 0.6 with A < 0.
    assert_result(
        result,
        value=[[0.0, 1.2, -1.2, 0.0, -0.7, 0.7]],
        gradient=[[0.0, -1.2, 1.2, 0.0, 0.7, -0.7]],
        token_masked_fraction=2 / 6,
    )
    assert result[0].mask.all()
    free, _ = evaluate(cispo, **tokens, **{**hyper, "enable_mask_clip": False}, **BOUNDS)
    assert "token_masked_fraction" not in free.metrics
    assert free.value[0, 0].item() == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        ({"clip_low": 1.5}, "clip_low must be at least 0 and at most 1, got 1.5"),
        ({"clip_high": -0.5}, "clip_high must be at least 0, got -0.5"),
        ({"mask_clip_low": 2.0}, "mask_clip_low must be at least 0 and at most 1, got 2.0"),
        ({"mask_clip_high": -2.0}, "mask_clip_high must be at least 0, got -2.0"),
    ],
)
def test_bounds_out_of_range(hyper: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(cispo, **TOKENS, **hyper)
