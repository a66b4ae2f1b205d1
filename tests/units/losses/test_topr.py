"""TOPR by hand: only what is bad is tapered, and no gradient goes through the weight."""

from __future__ import annotations

import pytest

from by_hand import assert_result, evaluate
from torchrl_llm_kl.losses import topr

TOKENS = {
    "ratio": [[2.0, 0.5, 2.0, 0.5]],
    "advantage": [[3.0, 3.0, -3.0, -3.0]],
    "log_prob": [[-2.0, -2.0, -2.0, -2.0]],
}


def test_tokens_by_hand() -> None:
    assert_result(
        evaluate(topr, **TOKENS),
        value=[[6.0, 6.0, -6.0, -3.0]],
        gradient=[[-3.0, -3.0, 3.0, 1.5]],
        weight_mean=3.5 / 4,
        tapered_fraction=1 / 4,
    )


def test_the_threshold_belongs_to_the_bad() -> None:
    result = evaluate(topr, **TOKENS, advantage_threshold=3.0)
    assert_result(result, value=[[6.0, 3.0, -6.0, -3.0]], gradient=[[-3.0, -1.5, 3.0, 1.5]], weight_mean=0.75)


def test_a_sequence_has_the_product_of_its_ratios() -> None:
    ratio, advantage = [[4.0, 0.0625], [4.0, 0.5], [4.0, 0.0625]], [[-1.0, -2.0], [-1.0, -2.0], [1.0, 2.0]]
    result = evaluate(topr, ratio=ratio, advantage=advantage, level="sequence")
    # Products 1/4 and 2; the good sequence has weight 1.
    assert_result(
        result,
        value=[[-0.25, -0.5], [-1.0, -2.0], [1.0, 2.0]],
        gradient=[[0.25, 0.5], [1.0, 2.0], [-1.0, -2.0]],
        tapered_fraction=1 / 3,
    )


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="level must be one of 'token', 'sequence', got 'batch'"):
        evaluate(topr, **TOKENS, level="batch")
