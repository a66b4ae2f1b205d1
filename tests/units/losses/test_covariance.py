"""Clip-Cov and KL-Cov: the selected tokens, and their values."""

import math
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from by_hand import assert_result, called, evaluate, tensor
from objective_cases import random_batch, rows_of
from torchrl_llm_kl.losses import LossInputs, clip_cov, kl_cov, select_clip_cov, select_kl_cov

NAN = float("nan")
# The mean log-prob is -5, the mean advantage 0: covariances 4, 4, 2, 2 and -2, -2. The last token is masked out.
LOG_PROB = tensor([[-1.0, -9.0, -4.0, -6.0], [-4.0, -6.0, -5.0, NAN]])
ADVANTAGE = tensor([[1.0, -1.0, 2.0, -2.0], [-2.0, 2.0, 0.0, NAN]])
MASK = ~LOG_PROB.isnan()
INPUTS = {"old_log_prob": LOG_PROB, "advantage": ADVANTAGE}
BOUNDS = {"clip_low": 0.1, "clip_high": 0.2}


@pytest.mark.parametrize(
    ("bounds", "chosen"),
    [
        ((1.0, 3.0), [[0, 0, 1, 1], [0, 0, 0, 0]]),
        ((3.0, 5.0), [[1, 1, 0, 0], [0, 0, 0, 0]]),
        ((-3.0, -1.0), [[0, 0, 0, 0], [1, 1, 0, 0]]),
        ((2.0, 4.0), [[0, 0, 0, 0], [0, 0, 0, 0]]),  # strictly between
        # A masked-out log-prob and advantage of 0 would have a covariance of -5 times the mean.
        ((10.0, 60.0), [[0, 0, 0, 0], [0, 0, 0, 0]]),
    ],
)
def test_clip_cov_chooses_between_two_bounds(bounds: tuple[float, float], chosen: list[list[int]]) -> None:
    """The covariance uses deviations from the means, so a shift of the advantages changes nothing."""
    for shift in (0.0, 7.0, -10.0):
        inputs = {"old_log_prob": LOG_PROB, "advantage": ADVANTAGE + shift}
        got = called(select_clip_cov, LOG_PROB, MASK, **inputs, fraction=1.0, cov_low=bounds[0], cov_high=bounds[1])
        assert got.int().tolist() == chosen


@pytest.mark.parametrize(  # A > 0, A < 0, A > 0, A < 0
    ("ratio", "chosen"), [([1.3, 1.0, 1.15, 1.0], [0, 1, 1, 1]), ([1.0, 0.85, 1.0, 0.95], [1, 0, 1, 1])]
)
def test_clip_cov_skips_tokens_that_ppo_clips(ratio: list[float], chosen: list[int]) -> None:
    old = LOG_PROB - tensor([ratio, [1.0] * 4]).log()
    inputs = {"old_log_prob": old, "advantage": ADVANTAGE}
    got = called(select_clip_cov, LOG_PROB, MASK, **inputs, fraction=1.0, cov_low=1.0, **BOUNDS)
    assert got[0].tolist() == chosen


@pytest.mark.parametrize(("fraction", "number"), [(0.01, 1), (0.43, 3), (0.9, 4)])
def test_clip_cov_chooses_at_random_among_them(fraction: float, number: int) -> None:
    """The number is a fraction of the 7 masked-in tokens. Each of the 4 candidates is selected equally often."""
    generator, total = torch.Generator().manual_seed(0), torch.zeros(2, 4)
    for _ in range(400):
        got = called(select_clip_cov, LOG_PROB, MASK, **INPUTS, fraction=fraction, cov_low=1.0, generator=generator)
        assert got.sum() == number
        total += got
    assert not total[1].any()
    # 400 draws of probability number / 4: 5 standard deviations are at most 50.
    assert_close(total[0], torch.full((4,), 100.0 * number), atol=50.0, rtol=0)


def test_kl_cov_chooses_the_highest() -> None:
    log_prob = LOG_PROB.clone().requires_grad_()
    with torch.no_grad():
        log_prob[0, 0], log_prob[0, 2] = -0.8, -3.9  # make the order unique
    for fraction, number in ((0.01, 1), (0.3, 2), (0.5, 3), (1.0, 7)):
        for shift in (7.0, -10.0):
            got = select_kl_cov(LossInputs(log_prob, MASK, advantage=ADVANTAGE + shift), fraction=fraction)
            assert got.sum() == number
            assert got[0, :number].all()
            assert not got.requires_grad


def test_values_of_selected_tokens_by_hand() -> None:
    """Clip-Cov drops selected tokens. KL-Cov pulls them back."""
    tokens: dict[str, Any] = {"ratio": [[1.5, 1.1, 0.5, 0.5, 1.1]], "advantage": [[2.0, 2.0, -1.0, 1.0, -3.0]]}
    selected = torch.tensor([[False, True, False, True, False]])
    result = evaluate(clip_cov, **tokens, selected=selected, clip_low=0.3, clip_high=0.2)
    fractions = {"selected_fraction": 0.4, "clip_fraction_low": 0.2, "clip_fraction_high": 0.2}
    assert_result(result, value=[[-2.4, 0.0, 0.7, 0.0, 3.3]], gradient=[[0.0, 0.0, 0.0, 0.0, 3.3]], **fractions)
    assert result[0].mask.all()
    tokens = {"ratio": [[2.0, 0.5, 2.0, 1.0]], "advantage": [[3.0, 3.0, 3.0, 3.0]]}
    result = evaluate(kl_cov, **tokens, selected=torch.tensor([[True, True, False, True]]), coeff=0.25)
    penalty, metrics = 0.25 * math.log(2), {"selected_fraction": 0.75, "ratio_mean": 5.5 / 4}
    assert_result(result, value=[[-6 + penalty, -1.5 + penalty, -6, -3]], gradient=[[-5.75, -1.75, -6, -3]], **metrics)


CLIP_COV = {"fraction": 0.5, "cov_low": 0.3, "cov_high": 2.0, "clip_low": 0.1, "clip_high": 0.3}


@pytest.mark.parametrize(("function", "hyper"), [(clip_cov, CLIP_COV), (kl_cov, {"fraction": 0.2})])
def test_without_selected_tokens_are_selected_in_the_batch(function: Any, hyper: dict[str, float]) -> None:
    batch = random_batch(1, rows=8)
    batch["advantage"][:4] += 2.0
    inputs = {key: batch[key] for key in ("log_prob", "mask", "advantage")}
    torch.manual_seed(0)
    if function is clip_cov:
        selected = called(select_clip_cov, **inputs, old_log_prob=batch["old_log_prob"], **hyper)
    else:
        selected = called(select_kl_cov, **inputs, **hyper)
    torch.manual_seed(0)
    (term,) = called(function, **batch, **hyper)
    (given,) = called(function, **batch, **hyper, selected=selected)
    assert selected.any()
    assert_close(term.value, given.value)
    # A part of the batch would choose otherwise, and so needs to be told.
    rows = torch.arange(4)
    (part,) = called(function, **rows_of(batch, rows), **hyper, selected=selected[rows])
    assert_close(part.value, given.value[rows])
    assert not torch.equal(called(function, **rows_of(batch, rows), **hyper)[0].value, part.value)
