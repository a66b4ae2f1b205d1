"""The family of clipped surrogates by hand: ppo, dapo, dr_grpo, gspo, luspo, gmpo, cispo, sapo."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from by_hand import Case, assert_case, case, clip, evaluate, tensor
from objective_cases import random_batch
from torchrl_llm_kl.losses import aggregate, cispo, dapo, dr_grpo, gmpo, gspo, luspo, ppo, sapo, spec_of
from torchrl_llm_kl.losses.objectives._clipped import clipped_surrogate

E = math.exp
BOUNDS = {"clip_low": 0.3, "clip_high": 0.2}
DUAL = {**BOUNDS, "clip_ratio_c": 3.0}
TWO_OF_THREE = torch.tensor([[True, True, False]])

# Ratios on both sides of 0.7 and 1.2, with advantages of both signs.
BOTH_SIGNS: dict[str, Any] = {
    "ratio": [[2.0, 2.0, 0.5, 0.5, 1.1, 4.0]],
    "advantage": [[3.0, -3.0, 3.0, -3.0, 5.0, -1.0]],
}
FOUR: dict[str, Any] = {"ratio": [[1.5, 1.25, 0.75, 4.0]], "advantage": [[2.0, 2.0, -1.0, -1.0]]}
# Geometric means 2, 2, 1/2, 1/2 of the two masked-in tokens; the third is masked out.
SEQUENCES: dict[str, Any] = {
    "ratio": [[4.0, 1.0, 100.0], [1.0, 4.0, 100.0], [0.25, 1.0, 100.0], [0.5, 0.5, 100.0]],
    "advantage": [[3.0, 3.0, 9.0], [-3.0, -3.0, 9.0], [3.0, 3.0, 9.0], [-3.0, -3.0, 9.0]],
    "mask": TWO_OF_THREE.expand(4, 3),
}
HALVES = {"clip_fraction": 0.5, "clip_fraction_low": 0.25, "clip_fraction_high": 0.25}
# Log-ratios 1 and 0.1, or -1 and 0.1; the third token does not count.
UP, DOWN = [E(1.0), E(0.1), E(9.0)], [E(-1.0), E(0.1), E(9.0)]
CLIPPED: dict[str, Any] = {
    "ratio": [[2.0, 2.0, 0.5, 0.5, 1.1]],
    "advantage": [[3.0, -3.0, 3.0, -3.0, 5.0]],
    "log_prob": [[-1.0, -2.0, -1.0, -2.0, -3.0]],
}
AWAY: dict[str, Any] = {
    "ratio": [[2.0, 1.45, 2.0, 0.55, 0.65, 0.55]],
    "advantage": [[1.0, 1.0, -1.0, -1.0, -1.0, 1.0]],
}
# sigmoid and its slope at 1 and 2
P1, SLOPE1 = 0.7310585786300049, 0.19661193324148185
P2, SLOPE2 = 0.8807970779778823, 0.10499358540350662

CASES: dict[str, Case] = {
    "ppo: clipped, free, free, clipped, free, at the dual bound": case(
        ppo,
        BOTH_SIGNS,
        DUAL,
        [-3.6, 6, -1.5, 2.1, -5.5, 3],
        [0, 6, -1.5, 0, -5.5, 0],
        clip(2 / 6, 1 / 6, 1 / 6, clip_fraction_dual=1 / 6),
    ),
    "ppo: without the dual bound a large ratio is free": case(
        ppo,
        BOTH_SIGNS,
        {**DUAL, "clip_ratio_c": None},
        [-3.6, 6, -1.5, 2.1, -5.5, 4],
        [0, 6, -1.5, 0, -5.5, 4],
        {"clip_fraction": 2 / 6},
    ),
    "ppo: counts by the sign of the advantage and within the mask": case(
        ppo,
        {
            "ratio": [2, 2, 0.5, 4, 1, 9],
            "advantage": [0.5, 3, -0.5, -1, 0.5, 7],
            "mask": torch.tensor([[True] * 5 + [False]]),
        },
        DUAL,
        [-0.6, -3.6, 0.35, 3, -0.5, 0],
        [0, 0, 0, 0, -0.5, 0],
        clip(0.6, 0.2, 0.4, clip_fraction_dual=0.2),
    ),
    "ppo: masking drops bad tokens of sequences 0.2 nats below, and not those of sequences 0.05 below": case(
        ppo,
        {"ratio": [[E(-0.3), E(-0.1)], [E(-0.2), E(0.1)]], "advantage": [[-1, 2], [-1, -1]]},
        {"enable_sequence_masking": True, "delta_sequence_masking": 0.1, "clip_low": 0.5, "clip_high": 0.4},
        [[0, -2 * E(-0.1)], [E(-0.2), E(0.1)]],
        [[0, -2 * E(-0.1)], [E(-0.2), E(0.1)]],
        {"sequence_masked_fraction": 0.25},
    ),
    "ppo: the distance of a sequence is over masked-in tokens, 0.2 nats over two and 0.13 over three": case(
        ppo,
        {"ratio": [E(-0.3), E(-0.1), 1], "advantage": [-1, 2, 1], "mask": TWO_OF_THREE},
        {"enable_sequence_masking": True, "delta_sequence_masking": 0.15, "clip_low": 0.5, "clip_high": 0.4},
        [0, -2 * E(-0.1), 0],
        [0, -2 * E(-0.1), 0],
        {"sequence_masked_fraction": 0.5},
    ),
    "dapo: clips higher above than below, without a dual bound": case(
        dapo, FOUR, {}, [-2.56, -2.5, 0.8, 4], [0, -2.5, 0, 4], HALVES
    ),
    "dr_grpo: clips alike": case(dr_grpo, FOUR, {}, [-2.4, -2.4, 0.8, 4], [0, 0, 0, 4]),
    **{
        f"{function.__name__}: with other bounds": case(
            function,
            FOUR,
            {"clip_low": 0.1, "clip_high": 0.3, "clip_ratio_c": 3.0},
            [-2.6, -2.5, 0.9, 3],
            [0, -2.5, 0, 0],
            {"clip_fraction_dual": 0.25},
        )
        for function in (dapo, dr_grpo)
    },
    "gspo: each token has the ratio of its sequence": case(
        gspo,
        SEQUENCES,
        BOUNDS,
        [[-3.6, -3.6, 0], [6, 6, 0], [-1.5, -1.5, 0], [2.1, 2.1, 0]],
        [[0, 0, 0], [6, 6, 0], [-1.5, -1.5, 0], [0, 0, 0]],
        HALVES,
    ),
    "gspo: one value for each sequence": case(
        gspo,
        SEQUENCES,
        {**BOUNDS, "level": "sequence"},
        [[-3.6], [6], [-1.5], [2.1]],
        [[0, 0, 0], [3, 3, 0], [-0.75, -0.75, 0], [0, 0, 0]],
        HALVES,
    ),
    "gspo: advantages may differ within a sequence": case(
        gspo, {"ratio": [4, 1], "advantage": [3, -1]}, BOUNDS, [-3.6, 2], [0, 2]
    ),
    "gspo: one value for each sequence is of its mean advantage, 1": case(
        gspo, {"ratio": [0.25, 1], "advantage": [3, -1]}, {**BOUNDS, "level": "sequence"}, [-0.5], [-0.25, -0.25]
    ),
    "gspo: by default clips from 3e-4 below": case(
        gspo, {"ratio": [[E(-0.00035)] * 2], "advantage": [-1, -1]}, {}, [[1 - 0.0003] * 2], [0, 0]
    ),
    "gspo: and from 4e-4 above": case(
        gspo, {"ratio": [[E(0.00035)] * 2], "advantage": [1, 1]}, {}, [[-E(0.00035)] * 2], [[-E(0.00035)] * 2]
    ),
    "luspo: gspo, its aggregation sums over lengths 3 and 1": case(
        luspo,
        {
            "ratio": [[8, 1, 1], [0.5, 9, 9]],
            "advantage": [[-3] * 3, [5] * 3],
            "mask": torch.tensor([[True, True, True], [True, False, False]]),
        },
        BOUNDS,
        [[6] * 3, [-2.5, 0, 0]],
        [[6] * 3, [-2.5, 0, 0]],
    ),
    "gmpo: the mean of clipped log-ratios: of (0.3, 0.1), (-1, 0.1), (1, 0.1) and (-0.2, 0.1)": case(
        gmpo,
        {
            "ratio": [UP, DOWN, UP, DOWN],
            "advantage": [[2, 2, 9], [2, 2, 9], [-2, -2, 9], [-2, -2, 9]],
            "mask": TWO_OF_THREE.expand(4, 3),
        },
        {"clip_low": 0.2, "clip_high": 0.3},
        [[-2 * E(0.2)], [-2 * E(-0.45)], [2 * E(0.55)], [2 * E(-0.05)]],
        [[0, -E(0.2), 0], [-E(-0.45), -E(-0.45), 0], [E(0.55), E(0.55), 0], [0, E(-0.05), 0]],
        clip(2 / 8, 1 / 8, 1 / 8),
    ),
    "gmpo: the default bounds are the paper's": case(
        gmpo, {"ratio": [[E(0.5)], [E(-0.5)]], "advantage": [[1], [-1]]}, {}, [[-E(0.4)], [E(-0.4)]], [[0], [0]]
    ),
    "gmpo: the mean advantage of a sequence": case(
        gmpo,
        {"ratio": [E(1), E(0.1)], "advantage": [3, -1]},
        {"clip_low": 0.2, "clip_high": 0.3},
        [-E(0.2)],
        [0, -0.5 * E(0.2)],
    ),
    "gmpo: counts each side, and an advantage of 0 as a bad one": case(
        gmpo,
        {"ratio": [[4, 1], [0.25, 0.25], [0.25, 4]], "advantage": [[1, 1], [-1, -1], [0, 0]]},
        {"clip_low": 0.2, "clip_high": 0.3},
        [[-E(0.15)], [E(-0.2)], [0]],
        [[0, -0.5 * E(0.15)], [0, 0], [0, 0]],
        clip(4 / 6, 3 / 6, 1 / 6),
    ),
    "cispo: a clipped weight times the gradient of the log-prob": case(
        cispo, CLIPPED, BOUNDS, [3.6, -7.2, 2.1, -4.2, 16.5], [-3.6, 3.6, -2.1, 2.1, -5.5], clip(0.8, 0.4, 0.4)
    ),
    "cispo: by default there is no lower bound": case(
        cispo,
        {"ratio": [0.01, 5], "advantage": [1, 1]},
        {},
        [0.01, 1.28],
        [-0.01, -1.28],
        {"clip_fraction_low": 0.0, "clip_fraction_high": 0.5},
    ),
    "cispo: the token mask drops 2 > 1.5 with A > 0, and 0.55 < 0.6 with A < 0": case(
        cispo,
        AWAY,
        {**BOUNDS, "enable_mask_clip": True, "mask_clip_low": 0.4, "mask_clip_high": 0.5},
        [0, 1.2, -1.2, 0, -0.7, 0.7],
        [0, -1.2, 1.2, 0, 0.7, -0.7],
        {"token_masked_fraction": 2 / 6},
    ),
    "cispo: counts each side by its own bound": case(
        cispo,
        {"ratio": [1.25, 0.75, 0.5, 2, 3], "advantage": [[1] * 5]},
        {"clip_low": 0.2, "clip_high": 0.3},
        [1.25, 0.8, 0.8, 1.3, 1.3],
        [-1.25, -0.8, -0.8, -1.3, -1.3],
        clip(0.8, 0.4, 0.4),
    ),
    "cispo: neither counts nor drops ratios at a bound": case(
        cispo,
        {
            "ratio": [1, 1],
            "advantage": [1, -1],
            **dict.fromkeys(("clip_low", "clip_high", "mask_clip_low", "mask_clip_high"), 0.0),
        },
        {"enable_mask_clip": True},
        [1, -1],
        [-1, 1],
        dict.fromkeys(("clip_fraction", "clip_fraction_low", "clip_fraction_high", "token_masked_fraction"), 0.0),
    ),
    "cispo: drops only tokens that move away": case(
        cispo,
        {"ratio": [2, 2, 2, 0.5, 0.5, 0.5], "advantage": [0.5, 0, -0.5, 0.5, 0, -0.5]},
        {"enable_mask_clip": True, "mask_clip_low": 0.3, "mask_clip_high": 0.4},
        [0, 0, -0.64, 0.25, 0, 0],
        [0, 0, 0.64, -0.25, 0, 0],
        {"token_masked_fraction": 2 / 6},
    ),
    "sapo: the gate is part of what is differentiated": case(
        sapo,
        {"ratio": [2, 2], "advantage": [3, -5]},
        {"tau_pos": 1.0, "tau_neg": 2.0},
        [-3 * 4 * P1, 5 * 4 * P2 / 2],
        [-3 * 2 * 4 * SLOPE1, 5 * 2 * 4 * SLOPE2],
        {"gate_mean": 2 * (SLOPE1 + SLOPE2)},
    ),
    "sapo: at ratio 1 it is the policy gradient whatever the temperature": case(
        sapo,
        {"ratio": [1, 1], "advantage": [3, -5]},
        {"tau_pos": 0.5, "tau_neg": 4.0},
        [-12, 2.5],
        [-3, 5],
        {"gate_mean": 1.0},
    ),
    "sapo: default temperatures": case(sapo, {"ratio": [1, 1], "advantage": [1, -1]}, {}, [-2, 2 / 1.05], [-1, 1]),
    "sapo: an advantage of 0 is gated as a bad one": case(
        sapo,
        {"ratio": [2], "advantage": [0]},
        {"tau_pos": 1.0, "tau_neg": 2.0},
        [0],
        [0],
        {"gate_mean": 4 * P2 * (1 - P2)},
    ),
}


@pytest.mark.parametrize("shown", CASES)
def test_values_gradients_and_metrics_by_hand(shown: str) -> None:
    assert assert_case(CASES[shown]).aggregation is None


def test_defect_40_clipped_tokens_have_a_gradient() -> None:
    _, gradient = evaluate(cispo, **CLIPPED, **BOUNDS)
    assert (gradient != 0).all()
    # The weight of the bound, 1.2 or 0.7, times -A.
    assert gradient[0, :4].tolist() == pytest.approx([-3.6, 3.6, -2.1, 2.1])


def test_metrics_are_those_of_what_is_switched_on() -> None:
    assert "clip_fraction_dual" not in evaluate(dapo, **FOUR)[0].metrics
    assert "token_masked_fraction" not in evaluate(cispo, **AWAY, **BOUNDS)[0].metrics
    assert "sequence_masked_fraction" not in evaluate(ppo, **FOUR)[0].metrics


def test_aggregations_are_those_of_the_sources() -> None:
    function, inputs, *_ = CASES["luspo: gspo, its aggregation sums over lengths 3 and 1"]
    term, _ = evaluate(function, **inputs)
    assert aggregate(term.value, term.mask, spec_of(luspo).aggregation).item() == pytest.approx((3 * 6.0 - 2.5) / 2)
    assert_close(aggregate(term.value, term.mask, spec_of(gspo).aggregation).item(), (6.0 - 2.5) / 2)


def test_a_ratio_at_the_dual_bound_is_not_counted_as_beyond_it() -> None:
    one = torch.ones(1, 1)
    _, metrics = clipped_surrogate(3 * one, -one, one == 1, clip_low=0.2, clip_high=0.3, clip_ratio_c=3.0)
    assert metrics["clip_fraction_dual"] == 0


def test_ppos_fallback_is_the_plain_policy_gradient() -> None:
    log_prob, advantage = tensor([[-1.0, -2.0]]).requires_grad_(), tensor([[1.5, -0.5]])
    (term,) = ppo(log_prob, log_prob < 0, advantage=advantage, fallback_to_policy_gradient=True)
    assert_close(torch.autograd.grad(term.value.sum(), log_prob)[0], -advantage)
    with pytest.raises(ValueError, match="ppo needs old_log_prob"):
        ppo(log_prob, log_prob < 0, advantage=advantage)


def test_both_levels_of_gspo_agree_where_advantages_are_constant() -> None:
    for seed in range(5):
        batch = random_batch(seed)
        batch["advantage"] = batch["advantage"][:, :1].expand_as(batch["mask"])
        batch["mask"][-1] = False
        found: list[tuple[Tensor, Tensor]] = []
        for level in ("token", "sequence"):
            log_prob = batch["log_prob"].clone().requires_grad_()
            (term,) = gspo(**{**batch, "log_prob": log_prob}, level=level, clip_low=0.1, clip_high=0.15)
            loss = aggregate(term.value, term.mask, "seq-mean-token-mean")
            found.append((loss, torch.autograd.grad(loss, log_prob)[0]))
        assert_close(found[0], found[1])
        assert found[0][1].any()


def test_far_ratios_have_little_weight_in_sapo() -> None:
    """Detaching the gate, as Trinity does, yields 3.99."""
    term, gradient = evaluate(sapo, ratio=[[7.4, 7.4]], advantage=[[1.0, -1.0]], tau_neg=1.0)
    assert term.value[0].tolist() == pytest.approx([-3.9934, 3.9934], abs=1e-4)
    assert gradient[0].tolist() == pytest.approx([-0.0490, 0.0490], abs=1e-4)
