"""GMPO by hand: a mean over tokens of clipped log-ratios."""

from __future__ import annotations

import math

import pytest
import torch

from by_hand import assert_result, evaluate, own_names
from torchrl_llm_kl.losses import gmpo

E = math.exp
# Log-ratios 1 and 0.1, or -1 and 0.1; the third token does not count.
UP, DOWN = [E(1.0), E(0.1), E(9.0)], [E(-1.0), E(0.1), E(9.0)]
MASK = torch.tensor([[True, True, False]]).expand(4, 3)


def test_clipping_in_log_space_by_hand() -> None:
    result = evaluate(
        gmpo,
        ratio=[UP, DOWN, UP, DOWN],
        advantage=[[2.0, 2.0, 9.0], [2.0, 2.0, 9.0], [-2.0, -2.0, 9.0], [-2.0, -2.0, 9.0]],
        mask=MASK,
        clip_low=0.2,
        clip_high=0.3,
    )
    # Means of (0.3, 0.1), (-1, 0.1), (1, 0.1) and (-0.2, 0.1).
    assert_result(
        result,
        value=[[-2 * E(0.2)], [-2 * E(-0.45)], [2 * E(0.55)], [2 * E(-0.05)]],
        gradient=[[0.0, -E(0.2), 0.0], [-E(-0.45), -E(-0.45), 0.0], [E(0.55), E(0.55), 0.0], [0.0, E(-0.05), 0.0]],
        clip_fraction=2 / 8,
        clip_fraction_low=1 / 8,
        clip_fraction_high=1 / 8,
    )
    assert result[0].mask.tolist() == [[True]] * 4


def test_the_default_bounds_are_the_papers() -> None:
    result = evaluate(gmpo, ratio=[[E(0.5)], [E(-0.5)]], advantage=[[1.0], [-1.0]])
    assert_result(result, value=[[-E(0.4)], [E(-0.4)]], gradient=[[0.0], [0.0]])


def test_the_mean_advantage_of_a_sequence_counts() -> None:
    result = evaluate(
        gmpo,
        ratio=[[E(1.0), E(0.1)]],
        advantage=[[3.0, -1.0]],
        **own_names(gmpo, clip_range_low=0.2, clip_range_high=0.3),
    )
    assert_result(result, value=[[-E(0.2)]], gradient=[[0.0, -0.5 * E(0.2)]])


def test_a_negative_bound_is_refused() -> None:
    with pytest.raises(ValueError, match=r"clip_high must be at least 0, got -0.1"):
        evaluate(gmpo, ratio=[UP], advantage=[[1.0, 1.0, 1.0]], clip_high=-0.1)
