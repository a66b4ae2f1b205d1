"""DAPO and Dr. GRPO: PPO's surrogate with their own bounds and sums."""

from __future__ import annotations

from typing import Any

import pytest

from by_hand import assert_result, evaluate, own_names
from torchrl_llm_kl.losses import dapo, dr_grpo, spec_of

TOKENS = {"ratio": [[1.5, 1.25, 0.75, 4.0]], "advantage": [[2.0, 2.0, -1.0, -1.0]]}


def test_dapo_clips_higher_above_than_below() -> None:
    result = evaluate(dapo, **TOKENS)
    assert_result(
        result,
        value=[[-2.56, -2.5, 0.8, 4.0]],
        gradient=[[0.0, -2.5, 0.0, 4.0]],
        clip_fraction=0.5,
        clip_fraction_low=0.25,
        clip_fraction_high=0.25,
    )
    assert "clip_fraction_dual" not in result[0].metrics
    assert spec_of(dapo).aggregation == "token-mean"


def test_dr_grpo_by_hand() -> None:
    assert_result(evaluate(dr_grpo, **TOKENS), value=[[-2.4, -2.4, 0.8, 4.0]], gradient=[[0.0, 0.0, 0.0, 4.0]])
    assert spec_of(dr_grpo).aggregation == "seq-mean-token-sum-norm"


@pytest.mark.parametrize("function", [dapo, dr_grpo])
def test_the_bounds_can_be_set(function: Any) -> None:
    result = evaluate(
        function, **TOKENS, **own_names(function, clip_range_low=0.1, clip_range_high=0.3, clip_ratio_c=3.0)
    )
    assert_result(result, value=[[-2.6, -2.5, 0.9, 3.0]], gradient=[[0.0, -2.5, 0.0, 0.0]], clip_fraction_dual=0.25)


@pytest.mark.parametrize("function", [dapo, dr_grpo])
@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        ({"clip_low": 1.5}, "clip_low must be at least 0 and at most 1, got 1.5"),
        ({"clip_high": -0.1}, "clip_high must be at least 0, got -0.1"),
        ({"clip_ratio_c": 0.5}, "clip_ratio_c must be greater than 1, got 0.5"),
    ],
)
def test_bounds_out_of_range(function: Any, hyper: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(function, **TOKENS, **hyper)
