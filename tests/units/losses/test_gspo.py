"""GSPO by hand, and its two levels against each other."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from by_hand import assert_result, evaluate, own_names
from objective_cases import random_batch
from torchrl_llm_kl.losses import aggregate, gspo, luspo, spec_of

BOUNDS = {"clip_low": 0.3, "clip_high": 0.2}
# Geometric means 2, 2, 1/2, 1/2 of the two masked-in tokens; the third is masked out.
RATIO = [[4.0, 1.0, 100.0], [1.0, 4.0, 100.0], [0.25, 1.0, 100.0], [0.5, 0.5, 100.0]]
ADVANTAGE = [[3.0, 3.0, 9.0], [-3.0, -3.0, 9.0], [3.0, 3.0, 9.0], [-3.0, -3.0, 9.0]]
MASK = torch.tensor([[True, True, False]]).expand(4, 3)


def test_token_level_by_hand() -> None:
    term, gradient = evaluate(gspo, ratio=RATIO, advantage=ADVANTAGE, mask=MASK, **BOUNDS)
    term = term.replace(value=torch.where(MASK, term.value, 0))
    assert_result(
        (term, gradient),
        value=[[-3.6, -3.6, 0.0], [6.0, 6.0, 0.0], [-1.5, -1.5, 0.0], [2.1, 2.1, 0.0]],
        gradient=[[0.0, 0.0, 0.0], [6.0, 6.0, 0.0], [-1.5, -1.5, 0.0], [0.0, 0.0, 0.0]],
        clip_fraction=0.5,
        clip_fraction_low=0.25,
        clip_fraction_high=0.25,
    )
    assert term.aggregation is None
    assert spec_of(gspo).aggregation == "seq-mean-token-mean"


def test_sequence_level_by_hand() -> None:
    result = evaluate(gspo, ratio=RATIO, advantage=ADVANTAGE, mask=MASK, level="sequence", **BOUNDS)
    assert_result(
        result,
        value=[[-3.6], [6.0], [-1.5], [2.1]],
        gradient=[[0.0, 0.0, 0.0], [3.0, 3.0, 0.0], [-0.75, -0.75, 0.0], [0.0, 0.0, 0.0]],
        clip_fraction=0.5,
        clip_fraction_low=0.25,
        clip_fraction_high=0.25,
    )


def test_advantages_may_differ_within_a_sequence() -> None:
    ratio, advantage = [[4.0, 1.0]], [[3.0, -1.0]]
    token = evaluate(gspo, ratio=ratio, advantage=advantage, **BOUNDS)
    assert_result(token, value=[[-3.6, 2.0]], gradient=[[0.0, 2.0]])
    sequence = evaluate(gspo, ratio=[[0.25, 1.0]], advantage=advantage, level="sequence", **BOUNDS)  # mean advantage 1
    assert_result(sequence, value=[[-0.5]], gradient=[[-0.25, -0.25]])


@pytest.mark.parametrize("seed", range(5))
def test_both_levels_agree_where_advantages_are_constant(seed: int) -> None:
    batch = random_batch(seed)
    batch["advantage"] = batch["advantage"][:, :1].expand_as(batch["mask"])
    batch["mask"][-1] = False
    losses, gradients = [], []
    for level in ("token", "sequence"):
        log_prob = batch["log_prob"].clone().requires_grad_()
        (term,) = gspo(**{**batch, "log_prob": log_prob}, level=level, clip_low=0.1, clip_high=0.15)
        losses.append(aggregate(term.value, term.mask, "seq-mean-token-mean"))
        gradients.append(torch.autograd.grad(losses[-1], log_prob)[0])
    assert_close(losses[0], losses[1])
    assert_close(gradients[0], gradients[1])
    assert gradients[0].any()


def test_defaults_and_names() -> None:
    high, low = math.exp(3.5e-4), math.exp(-3.5e-4)
    clipped = evaluate(gspo, ratio=[[low, low]], advantage=[[-1.0, -1.0]])
    assert_result(clipped, value=[[1 - 3e-4] * 2], gradient=[[0.0, 0.0]])
    free = evaluate(gspo, ratio=[[high, high]], advantage=[[1.0, 1.0]])
    assert_result(free, value=[[-high] * 2], gradient=[[-high] * 2])
    ours = evaluate(gspo, ratio=RATIO, advantage=ADVANTAGE, **BOUNDS)
    named = evaluate(gspo, ratio=RATIO, advantage=ADVANTAGE, **own_names(gspo, clip_range_low=0.3, clip_range_high=0.2))
    assert_close(named[0].value, ours[0].value)


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        ({"level": "word"}, "level must be one of 'token', 'sequence', got 'word'"),
        ({"clip_low": 1.1}, "clip_low must be at least 0 and at most 1, got 1.1"),
        ({"clip_high": -1.0}, "clip_high must be at least 0, got -1.0"),
    ],
)
def test_bad_hyper_parameters(hyper: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(gspo, ratio=RATIO, advantage=ADVANTAGE, **hyper)


def test_luspo_is_gspo_times_the_length_by_hand() -> None:
    """Lengths 3 and 1, geometric means 2 and 1/2: not clipped, so the gradient of each token is ``-A s``."""
    ratio, advantage = [[8.0, 1.0, 1.0], [0.5, 9.0, 9.0]], [[-3.0] * 3, [5.0] * 3]
    mask = torch.tensor([[True, True, True], [True, False, False]])
    (term, gradient) = evaluate(luspo, ratio=ratio, advantage=advantage, mask=mask, **BOUNDS)
    assert aggregate(term.value, term.mask, spec_of(luspo).aggregation).item() == pytest.approx((3 * 6.0 - 2.5) / 2)
    assert_close(gradient, torch.tensor([[6.0] * 3, [-2.5, 0.0, 0.0]], dtype=torch.float64))
    assert_close(aggregate(term.value, term.mask, spec_of(gspo).aggregation).item(), (6.0 - 2.5) / 2)


def test_luspo_has_the_fields_of_its_paper() -> None:
    assert spec_of(luspo).aggregation == "seq-mean-token-sum"
    assert own_names(luspo, clip_ratio_high=0.3, clip_range_low=0.1) == {"clip_high": 0.3, "clip_low": 0.1}
    with pytest.raises(TypeError, match="luspo has no hyper-parameter 'level'"):
        evaluate(luspo, ratio=RATIO, advantage=ADVANTAGE, mask=MASK, level="sequence")
