"""sPPO by hand: the interval is the same factor either way."""

from __future__ import annotations

import math

import pytest

from by_hand import assert_result, evaluate
from torchrl_llm_kl.losses import sppo

LOG = math.log


def test_values_and_gradients_by_hand() -> None:
    # In range from 1 / 1.25 = 0.8 (not 0.75) to 1.25.
    result = evaluate(
        sppo, ratio=[[1.2, 1.3, 0.82, 0.79, 1.2, 0.77]], advantage=[[2.0, 2.0, -1.0, -1.0, -3.0, 4.0]], epsilon=0.25
    )
    assert_result(
        result,
        value=[[-2 * LOG(1.2), 0.0, LOG(0.82), 0.0, 3 * LOG(1.2), 0.0]],
        gradient=[[-2.0, 0.0, 1.0, 0.0, 3.0, 0.0]],
        clip_fraction=3 / 6,
        clip_fraction_low=2 / 6,
        clip_fraction_high=1 / 6,
    )


def test_the_default_interval() -> None:
    result = evaluate(sppo, ratio=[[1.29, 1.31, 0.78, 0.76]], advantage=[[1.0, 1.0, 1.0, 1.0]])
    assert_result(result, value=[[-LOG(1.29), 0.0, -LOG(0.78), 0.0]], gradient=[[-1.0, 0.0, -1.0, 0.0]])


def test_a_negative_epsilon_is_refused() -> None:
    with pytest.raises(ValueError, match=r"epsilon must be at least 0, got -0.3"):
        evaluate(sppo, ratio=[[1.0]], advantage=[[1.0]], epsilon=-0.3)
