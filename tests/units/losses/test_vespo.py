"""VESPO by hand: one weight for each sequence and sign."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from by_hand import assert_result, evaluate, own_names
from objective_cases import random_batch
from torchrl_llm_kl.losses import vespo

E = math.exp
# k and lambda, different for the signs: w^2 e^{3 (1 - w)} and w^3 e^{2 (1 - w)}.


def test_the_weight_is_of_the_product_of_ratios() -> None:
    mask = torch.tensor([[True, True, False]]).expand(2, 3)
    ratio = [[4.0, 0.5, 9.0], [0.25, 2.0, 9.0]]  # products 2 and 1/2
    term, gradient = evaluate(vespo, ratio=ratio, advantage=[[1.0, -3.0, 9.0], [1.0, -3.0, 9.0]], mask=mask)
    up, down = [4 * E(-3.0), 0.25 * E(1.5)], [8 * E(-2.0), 0.125 * E(1.0)]
    assert_result(
        (term, gradient),
        value=[[up[0], -3 * down[0], 0.0], [up[1], -3 * down[1], 0.0]],
        gradient=[[-up[0], 3 * down[0], 0.0], [-up[1], 3 * down[1], 0.0]],
        weight_mean=(sum(up) + sum(down)) / 4,
    )


def test_hyper_parameters_and_trls_names() -> None:
    hyper = {"k_pos": 1.0, "lambda_pos": 0.5, "k_neg": 4.0, "lambda_neg": 0.25}
    for prefix in ("", "vespo_"):
        named = own_names(vespo, **{prefix + name: value for name, value in hyper.items()})
        result = evaluate(vespo, ratio=[[2.0], [2.0]], advantage=[[1.0], [-1.0]], **named)
        assert_result(result, value=[[2 * E(-0.5)], [-16 * E(-0.25)]], gradient=[[-2 * E(-0.5)], [16 * E(-0.25)]])


def test_far_sequences_have_no_weight_rather_than_nan() -> None:
    ratio = [[E(300.0)] * 3, [E(-300.0)] * 3]  # exp(900) is infinite in float64
    result = evaluate(vespo, ratio=ratio, advantage=[[1.0, -1.0, 1.0]] * 2)
    assert_result(result, value=[[0.0] * 3] * 2, gradient=[[0.0] * 3] * 2)


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        ({"k_neg": -1.0}, "k_neg must be at least 0, got -1.0"),
        ({"lambda_pos": 0.0}, "lambda_pos must be greater than 0, got 0.0"),
    ],
)
def test_bad_hyper_parameters(hyper: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(vespo, ratio=[[1.0]], advantage=[[1.0]], **hyper)


def test_weights_are_trls() -> None:
    grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer", exc_type=ImportError)
    batch = random_batch(3)
    log_ratio = batch["log_prob"] - batch["old_log_prob"]
    theirs = grpo_trainer.GRPOTrainer.get_gamma_weights(batch["advantage"], log_ratio, batch["mask"], None)
    (term,) = vespo(**batch)
    expected = torch.where(batch["mask"], -batch["advantage"] * theirs * batch["log_prob"], 0)
    assert_close(term.value, expected)
