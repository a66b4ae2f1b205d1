"""REC by hand: each clip mode, each weight, each regularizer."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from by_hand import assert_result, evaluate, tensor
from torchrl_llm_kl.losses import rec

E, LOG = math.exp, math.log
RATIO = [[2.0, 0.5, 2.0, 0.5, 1.1, 1.1, 0.3, 3.0, 0.3, 3.0, 1.25, 0.75]]
ADVANTAGE = [[1.0, 1.0, -1.0, -1.0, 1.0, -1.0, 1.0, -1.0, -1.0, 1.0, 1.0, -1.0]]
# In range: 0.7 to 1.2; of the ring also up to 0.4 and from 2.5.
EPSILON = {"epsilon_low": 0.3, "epsilon_high": 0.2, "epsilon_low_prime": 0.6, "epsilon_high_prime": 1.5}
IN_RANGE = {
    "none": [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
    "one-side": [0, 1, 1, 0, 1, 1, 1, 1, 0, 0, 0, 1],
    "two-side": [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1],
    "ring": [0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1],
}


@pytest.mark.parametrize("clip_mode", IN_RANGE)
def test_clip_modes_by_hand(clip_mode: str) -> None:
    term, gradient = evaluate(rec, ratio=RATIO, advantage=ADVANTAGE, clip_mode=clip_mode, **EPSILON)
    kept = tensor([IN_RANGE[clip_mode]])
    assert_close(term.value.detach(), tensor(ADVANTAGE) * kept)  # log-probs are -1
    assert_close(gradient, -tensor(ADVANTAGE) * kept)
    assert term.aggregation is None
    if clip_mode == "none":
        assert not term.metrics  # nothing can be clipped
        return
    assert term.metrics["clip_fraction"].item() == pytest.approx(1 - kept.mean().item())
    for name, sign in (("low", -1), ("high", 1)):
        clipped = (1 - kept) * (tensor(ADVANTAGE) == sign)
        assert term.metrics[f"clip_fraction_{name}"].item() == pytest.approx(clipped.mean().item())


@pytest.mark.parametrize(
    ("hyper", "reads"),
    [
        ({}, False),
        ({"weight": "advantage", "temp": 0.5}, False),
        ({"regularizer": "forward-kl", "regularizer_coef": 0.3}, False),
        ({"clip_mode": "two-side"}, True),
        ({"weight": "importance_sampling"}, True),
        ({"weight": "gspo_importance_sampling"}, True),
        ({"regularizer": "k2", "regularizer_coef": 0.3}, True),
    ],
)
def test_old_log_probs_are_required_where_they_are_read(hyper: dict[str, Any], reads: bool) -> None:
    log_prob, advantage = tensor([[-1.0, -2.0]]), tensor([[1.5, -0.5]])
    mask = log_prob < 0
    first, second = (rec(log_prob, mask, old_log_prob=x * log_prob, advantage=advantage, **hyper) for x in (1, 3))
    assert (not torch.equal(first[0].value, second[0].value)) == reads
    if reads:
        with pytest.raises(ValueError, match=r"rec needs old_log_prob: .*, or change clip_mode='.*', weight='.*', reg"):
            rec(log_prob, mask, advantage=advantage, **hyper)
    else:
        assert torch.equal(rec(log_prob, mask, advantage=advantage, **hyper)[0].value, first[0].value)


def test_gspo_one_side_judges_whole_sequences() -> None:
    # Geometric means 2, 2, 1/2, 1/2; tokens alone would be judged otherwise.
    ratio = [[4.0, 1.0], [4.0, 1.0], [0.25, 1.0], [0.25, 1.0]]
    advantage = [[3.0, 3.0], [-3.0, -3.0], [3.0, 3.0], [-3.0, -3.0]]
    result = evaluate(rec, ratio=ratio, advantage=advantage, clip_mode="gspo-one-side", **EPSILON)
    assert_result(
        result,
        value=[[0.0, 0.0], [-3.0, -3.0], [3.0, 3.0], [0.0, 0.0]],
        gradient=[[0.0, 0.0], [3.0, 3.0], [-3.0, -3.0], [0.0, 0.0]],
        clip_fraction=0.5,
        clip_fraction_low=0.25,
        clip_fraction_high=0.25,
    )
    assert result[0].aggregation == "seq-mean-token-mean"


@pytest.mark.parametrize(
    ("weight", "factor"),
    [
        ("none", [1.0, 1.0]),
        ("importance_sampling", [4.0, 0.25]),
        ("gspo_importance_sampling", [1.0, 1.0]),
        ("advantage", [E(2.0), E(-1.5)]),
    ],
)
def test_weights_by_hand(weight: str, factor: list[float]) -> None:
    result = evaluate(rec, ratio=[[4.0, 0.25]], advantage=[[4.0, -3.0]], weight=weight, temp=2.0)
    value = [4 * factor[0], -3 * factor[1]]
    assert_result(result, value=[value], gradient=[[-value[0], -value[1]]])


def test_the_sequence_weight_is_the_geometric_mean() -> None:
    result = evaluate(rec, ratio=[[4.0, 1.0]], advantage=[[1.0, 3.0]], weight="gspo_importance_sampling")
    assert_result(result, value=[[2.0, 6.0]], gradient=[[-2.0, -6.0]])


@pytest.mark.parametrize(
    ("regularizer", "value", "gradient"),
    [
        ("none", [0.0, 3.0], [0.0, -3.0]),
        # 0.1 (log 2)^2 and its slope, on the clipped token too
        ("k2", [0.1 * LOG(2) ** 2, 3.0 + 0.1 * LOG(0.5) ** 2], [0.2 * LOG(2), -3.0 + 0.2 * LOG(0.5)]),
        ("forward-kl", [0.1, 3.1], [-0.1, -3.1]),
    ],
)
def test_regularizers_by_hand(regularizer: str, value: list[float], gradient: list[float]) -> None:
    hyper = {"regularizer": regularizer, "regularizer_coef": 0.1, "clip_mode": "one-side"}
    result = evaluate(rec, ratio=[[2.0, 0.5]], advantage=[[3.0, 3.0]], **hyper)
    assert_result(result, value=[value], gradient=[gradient])


MODES = ["none", "one-side", "two-side", "ring", "gspo-one-side"]
WEIGHTS = ["none", "importance_sampling", "gspo_importance_sampling", "advantage"]


@pytest.mark.parametrize(("clip_mode", "weight"), list(itertools.product(MODES, WEIGHTS)))
def test_every_weight_goes_with_every_clip_mode(clip_mode: str, weight: str) -> None:
    """On-policy nothing is clipped and every ratio is 1."""
    result = evaluate(rec, ratio=[[1.0, 1.0]], advantage=[[1.0, -2.0]], clip_mode=clip_mode, weight=weight)
    factor = (E(1.0), E(-2.0)) if weight == "advantage" else (1.0, 1.0)
    assert_result(result, value=[[factor[0], -2 * factor[1]]], gradient=[[-factor[0], 2 * factor[1]]])


def test_the_default_ring_is_trinitys() -> None:
    ratio = [[0.39, 0.41, 3.01, 2.99]]
    term, _ = evaluate(rec, ratio=ratio, advantage=[[1.0, 1.0, -1.0, -1.0]], clip_mode="ring")
    assert term.value[0].tolist() == pytest.approx([1.0, 0.0, -1.0, 0.0])


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        ({"clip_mode": "both"}, "clip_mode must be one of 'none', 'one-side', .* got 'both'"),
        ({"weight": "gspo"}, "weight must be one of .* got 'gspo'"),
        ({"regularizer": "k3"}, "regularizer must be one of 'none', 'k2', 'forward-kl', got 'k3'"),
        ({"epsilon_low": 0.0}, "epsilon_low must be greater than 0 and at most 1, got 0.0"),
        ({"epsilon_low_prime": 1.5}, "epsilon_low_prime must be greater than 0 and at most 1, got 1.5"),
        ({"epsilon_high": -1.0}, "epsilon_high must be greater than 0, got -1.0"),
        ({"epsilon_high_prime": 0.0}, "epsilon_high_prime must be greater than 0, got 0.0"),
        ({"temp": 0.0}, "temp must be greater than 0, got 0.0"),
        ({"regularizer_coef": -0.1}, "regularizer_coef must be at least 0, got -0.1"),
    ],
)
def test_bad_hyper_parameters(hyper: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(rec, ratio=RATIO, advantage=ADVANTAGE, **hyper)
