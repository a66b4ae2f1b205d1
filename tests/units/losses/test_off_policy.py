"""Objectives for data of another policy, by hand: gpg, opmd, importance_sampling, topr, sppo, dro, dppo, vespo, rec."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from by_hand import Case, assert_case, assert_result, case, clip, evaluate, tensor
from torchrl_llm_kl.losses import dppo, dro, gpg, importance_sampling, opmd, rec, sppo, topr, vespo

E, LOG = math.exp, math.log
LN2, LN3, LN4 = LOG(2), LOG(3), LOG(4)
TWO_OF_THREE = torch.tensor([[True, True, False]])
PLAIN: dict[str, Any] = {"ratio": [[2.0, 0.25]], "advantage": [[3.0, -5.0]], "log_prob": [[-1.0, -2.0]]}
FOUR: dict[str, Any] = {
    "ratio": [[2.0, 0.5, 2.0, 0.5]],
    "advantage": [[3.0, 3.0, -3.0, -3.0]],
    "log_prob": [[-2.0, -2.0, -2.0, -2.0]],
}
# Log-ratios ln 2, -ln 2 and 0.
THREE: dict[str, Any] = {"ratio": [[2.0, 0.5, 1.0]], "advantage": [[3.0, -1.0, 2.0]], "log_prob": [[-2.0, -1.0, -0.5]]}
# Products 2 and 1/2. By default w^2 e^{3 (1 - w)} of good and w^3 e^{2 (1 - w)} of bad tokens.
PRODUCTS: dict[str, Any] = {
    "ratio": [[4.0, 0.5, 9.0], [0.25, 2.0, 9.0]],
    "advantage": [[1.0, -3.0, 9.0], [1.0, -3.0, 9.0]],
    "mask": TWO_OF_THREE.expand(2, 3),
}
GOOD, BAD = [4 * E(-3.0), 0.25 * E(1.5)], [8 * E(-2.0), 0.125 * E(1.0)]
# For rec, in range: 0.7 to 1.2; of the ring also up to 0.4 and from 2.5.
RATIO = [[2.0, 0.5, 2.0, 0.5, 1.1, 1.1, 0.3, 3.0, 0.3, 3.0, 1.25, 0.75]]
ADVANTAGE = [[1.0, 1.0, -1.0, -1.0, 1.0, -1.0, 1.0, -1.0, -1.0, 1.0, 1.0, -1.0]]
EPSILON = {"epsilon_low": 0.3, "epsilon_high": 0.2, "epsilon_low_prime": 0.6, "epsilon_high_prime": 1.5}
KL_PENALTY: dict[str, Any] = {"ratio": [[2.0, 0.5]], "advantage": [[3.0, 3.0]], "clip_mode": "one-side"}
# With log-probs of 0 the ratios are exact.
EXACT: dict[str, Any] = {"ratio": [[2.0, 0.5]], "log_prob": [[0.0, 0.0]]}
RING: dict[str, Any] = {
    "clip_mode": "ring",
    "epsilon_low": 0.25,
    "epsilon_high": 0.25,
    "epsilon_low_prime": 0.5,
    "epsilon_high_prime": 1.0,
}

CASES: dict[str, Case] = {
    "gpg: the policy gradient": case(gpg, PLAIN, {}, [3, -10], [-3, 5]),
    "opmd: divided by 1 + tau": case(opmd, PLAIN, {"tau": 0.25}, [2.4, -8], [-2.4, 4]),
    "opmd: tau is 1 by default": case(opmd, PLAIN, {}, [1.5, -5], [-1.5, 2.5]),
    "importance_sampling: the ratio is differentiated": case(
        importance_sampling, PLAIN, {}, [-6, 1.25], [-6, 1.25], {"ratio_mean": 1.125}
    ),
    "importance_sampling: is not clamped at 20 nats": case(
        importance_sampling,
        {"ratio": [E(30), E(-30)], "advantage": [1, 1], "log_prob": [-1, -40]},
        {},
        [-10686474581524.463, -1 / 10686474581524.463],
        [-10686474581524.463, -1 / 10686474581524.463],
    ),
    "importance_sampling: ends at 80 nats without gradient": case(
        importance_sampling, {"ratio": [E(100)], "advantage": [1]}, {}, [-E(80)], [0]
    ),
    "topr: only what is bad is tapered, and no gradient goes through the weight": case(
        topr, FOUR, {}, [6, 6, -6, -3], [-3, -3, 3, 1.5], {"weight_mean": 3.5 / 4, "tapered_fraction": 1 / 4}
    ),
    "topr: the threshold belongs to the bad": case(
        topr, FOUR, {"advantage_threshold": 3.0}, [6, 3, -6, -3], [-3, -1.5, 3, 1.5], {"weight_mean": 0.75}
    ),
    "topr: a sequence has the product of its ratios, 1/4 and 2; the good one has weight 1": case(
        topr,
        {"ratio": [[4, 0.0625], [4, 0.5], [4, 0.0625]], "advantage": [[-1, -2], [-1, -2], [1, 2]]},
        {"level": "sequence"},
        [[-0.25, -0.5], [-1, -2], [1, 2]],
        [[0.25, 0.5], [1, 2], [-1, -2]],
        {"tapered_fraction": 1 / 3},
    ),
    "sppo: in range from 1 / 1.25 = 0.8 (not 0.75) to 1.25": case(
        sppo,
        {"ratio": [1.2, 1.3, 0.82, 0.79, 1.2, 0.77], "advantage": [2, 2, -1, -1, -3, 4]},
        {"epsilon": 0.25},
        [-2 * LOG(1.2), 0, LOG(0.82), 0, 3 * LOG(1.2), 0],
        [-2, 0, 1, 0, 3, 0],
        clip(3 / 6, 2 / 6, 1 / 6),
    ),
    "sppo: the default interval": case(
        sppo,
        {"ratio": [1.29, 1.31, 0.78, 0.76], "advantage": [1, 1, 1, 1]},
        {},
        [-LOG(1.29), 0, -LOG(0.78), 0],
        [-1, 0, -1, 0],
    ),
    "sppo: keeps ratios at a bound": case(
        sppo,
        {"ratio": [1, 1], "advantage": [3, -5]},
        {"epsilon": 0.0},
        [0, 0],
        [-3, 5],
        dict.fromkeys(("clip_fraction", "clip_fraction_low", "clip_fraction_high"), 0.0),
    ),
    "dro: tokens": case(
        dro, THREE, {"beta": 0.4}, [6 + 0.2 * LN2**2, -1 + 0.2 * LN2**2, 1], [-3 + 0.4 * LN2, 1 - 0.4 * LN2, -2]
    ),
    "dro: whole answers of log-probs -3 and -0.5, log-ratios ln 4 and ln 3, mean advantages 2 and -1": case(
        dro,
        {
            "ratio": [[2, 2, 7], [3, 5, 5]],
            "advantage": [[3, 1, 50], [-1, 9, 9]],
            "log_prob": [[-2, -1, -9], [-0.5, -1, -1]],
            "mask": torch.tensor([[True, True, False], [True, False, False]]),
        },
        {"beta": 0.3, "level": "sequence"},
        [[6 + 0.15 * LN4**2], [-0.5 + 0.15 * LN3**2]],
        [[-2 + 0.3 * LN4] * 2 + [0], [1 + 0.3 * LN3, 0, 0]],
    ),
    "vespo: the weight is of the product of ratios": case(
        vespo,
        PRODUCTS,
        {},
        [[GOOD[0], -3 * BAD[0], 0], [GOOD[1], -3 * BAD[1], 0]],
        [[-GOOD[0], 3 * BAD[0], 0], [-GOOD[1], 3 * BAD[1], 0]],
        {"weight_mean": (sum(GOOD) + sum(BAD)) / 4},
    ),
    "vespo: exponents and rates of each sign": case(
        vespo,
        {
            "ratio": [[2], [2]],
            "advantage": [[1], [-1]],
            **{"k_pos": 1.0, "lambda_pos": 0.5, "k_neg": 4.0, "lambda_neg": 0.25},
        },
        {},
        [[2 * E(-0.5)], [-16 * E(-0.25)]],
        [[-2 * E(-0.5)], [16 * E(-0.25)]],
    ),
    "vespo: far sequences have no weight rather than NaN; exp(900) is infinite in float64": case(
        vespo, {"ratio": [[E(300)] * 3, [E(-300)] * 3], "advantage": [[1, -1, 1]] * 2}, {}, [[0] * 3] * 2, [[0] * 3] * 2
    ),
    "vespo: an advantage of 0 is weighed as a good one": case(
        vespo, {"ratio": [2], "advantage": [0]}, {}, [0], [0], {"weight_mean": 4 * E(-3.0)}
    ),
    "rec: gspo-one-side judges whole sequences": case(
        rec,
        {"ratio": [[4, 1], [4, 1], [0.25, 1], [0.25, 1]], "advantage": [[3, 3], [-3, -3], [3, 3], [-3, -3]]},
        {**EPSILON, "clip_mode": "gspo-one-side"},
        [[0, 0], [-3, -3], [3, 3], [0, 0]],
        [[0, 0], [3, 3], [-3, -3], [0, 0]],
        clip(0.5, 0.25, 0.25),
    ),
    **{
        f"rec: weight {weight}": case(
            rec,
            {"ratio": [4, 0.25], "advantage": [4, -3]},
            {"weight": weight, "temp": 2.0},
            [4 * up, -3 * down],
            [-4 * up, 3 * down],
        )
        for (weight, up, down) in (
            ("none", 1.0, 1.0),
            ("importance_sampling", 4.0, 0.25),
            ("gspo_importance_sampling", 1.0, 1.0),
            ("advantage", E(2.0), E(-1.5)),
        )
    },
    "rec: the sequence weight is the geometric mean over masked-in tokens": case(
        rec,
        {"ratio": [4, 1, 9], "advantage": [1, 3, 3], "mask": TWO_OF_THREE},
        {"weight": "gspo_importance_sampling"},
        [2, 6, 0],
        [-2, -6, 0],
    ),
    "rec: no regularizer": case(rec, KL_PENALTY, {"regularizer_coef": 0.1}, [0, 3], [0, -3]),
    "rec: k2 is 0.1 (log 2)^2, on the clipped token too": case(
        rec,
        KL_PENALTY,
        {"regularizer": "k2", "regularizer_coef": 0.1},
        [0.1 * LN2**2, 3 + 0.1 * LN2**2],
        [0.2 * LN2, -3 - 0.2 * LN2],
    ),
    "rec: forward-kl is the negative log-likelihood": case(
        rec, KL_PENALTY, {"regularizer": "forward-kl", "regularizer_coef": 0.1}, [0.1, 3.1], [-0.1, -3.1]
    ),
    "rec: the default ring is Trinity's": case(
        rec,
        {"ratio": [0.39, 0.41, 3.01, 2.99], "advantage": [1, 1, -1, -1]},
        {"clip_mode": "ring"},
        [1, 0, -1, 0],
        [-1, 0, 1, 0],
    ),
    "rec: two sides keep ratios at a bound": case(
        rec,
        {**EXACT, "advantage": [1, -1]},
        {"clip_mode": "two-side", "epsilon_low": 0.5, "epsilon_high": 1.0},
        [0, 0],
        [-1, 1],
        {"clip_fraction": 0.0},
    ),
    "rec: the ring keeps ratios at its outer bounds": case(
        rec, {**EXACT, "advantage": [-1, 1]}, RING, [0, 0], [1, -1], {"clip_fraction": 0.0}
    ),
    "rec: and drops them where they have moved away": case(
        rec, {**EXACT, "advantage": [1, -1]}, RING, [0, 0], [0, 0], {"clip_fraction": 1.0}
    ),
    "rec: one side is that of the advantage": case(
        rec,
        {"ratio": [3, 0.1, 3, 0.1], "advantage": [0, 0, 0.5, 0.5]},
        {"clip_mode": "one-side"},
        [0, 0, 0, 0.5],
        [0, 0, 0, -0.5],
        clip(0.25, 0.0, 0.25),
    ),
}


@pytest.mark.parametrize("shown", CASES)
def test_values_gradients_and_metrics_by_hand(shown: str) -> None:
    term = assert_case(CASES[shown])
    assert term.aggregation == ("seq-mean-token-mean" if "gspo-one-side" in shown else None)


# ---------------------------------------------------------------------- rec


@pytest.mark.parametrize(
    ("clip_mode", "kept"),
    [
        ("none", [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("one-side", [0, 1, 1, 0, 1, 1, 1, 1, 0, 0, 0, 1]),
        ("two-side", [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1]),
        ("ring", [0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1]),
    ],
)
def test_clip_modes_of_rec(clip_mode: str, kept: list[float]) -> None:
    term, gradient = evaluate(rec, ratio=RATIO, advantage=ADVANTAGE, clip_mode=clip_mode, **EPSILON)
    inside, advantage = tensor([kept]), tensor(ADVANTAGE)
    assert_close(term.value.detach(), advantage * inside)  # log-probs are -1
    assert_close(gradient, -advantage * inside)
    expected = {"clip_fraction": 1 - inside.mean().item()}
    for name, sign in (("low", -1), ("high", 1)):
        expected[f"clip_fraction_{name}"] = ((1 - inside) * (advantage == sign)).mean().item()
    expected = {} if clip_mode == "none" else expected  # nothing can be clipped
    assert {name: metric.item() for name, metric in term.metrics.items()} == pytest.approx(expected)


def test_rec_requires_old_log_probs_where_it_reads_them() -> None:
    log_prob, advantage = tensor([[-1.0, -2.0]]), tensor([[1.5, -0.5]])
    mask = log_prob < 0
    choices: list[tuple[dict[str, Any], bool]] = [
        ({}, False),
        ({"weight": "advantage", "temp": 0.5}, False),
        ({"regularizer": "forward-kl", "regularizer_coef": 0.3}, False),
        ({"clip_mode": "two-side"}, True),
        ({"weight": "importance_sampling"}, True),
        ({"weight": "gspo_importance_sampling"}, True),
        ({"regularizer": "k2", "regularizer_coef": 0.3}, True),
    ]
    for hyper, reads in choices:
        first, second = (rec(log_prob, mask, old_log_prob=x * log_prob, advantage=advantage, **hyper) for x in (1, 3))
        assert (not torch.equal(first[0].value, second[0].value)) == reads, hyper
        if reads:
            message = r"rec needs old_log_prob: .*, or change clip_mode='.*', weight='.*', reg"
            with pytest.raises(ValueError, match=message):
                rec(log_prob, mask, advantage=advantage, **hyper)
        else:
            assert torch.equal(rec(log_prob, mask, advantage=advantage, **hyper)[0].value, first[0].value), hyper


def test_every_weight_of_rec_goes_with_every_clip_mode() -> None:
    """On-policy nothing is clipped and every ratio is 1."""
    modes = ("none", "one-side", "two-side", "ring", "gspo-one-side")
    weights = ("none", "importance_sampling", "gspo_importance_sampling", "advantage")
    for clip_mode, weight in itertools.product(modes, weights):
        result = evaluate(rec, ratio=[[1.0, 1.0]], advantage=[[1.0, -2.0]], clip_mode=clip_mode, weight=weight)
        factor = (E(1.0), E(-2.0)) if weight == "advantage" else (1.0, 1.0)
        assert_result(result, value=[[factor[0], -2 * factor[1]]], gradient=[[-factor[0], 2 * factor[1]]])


# ---------------------------------------------------------------------- dppo


def probabilities(now: list[float], old: list[float], advantage: list[float], **hyper: Any) -> dict[str, Any]:
    """Inputs from probabilities in place of ratios."""
    ratio = [[a / b for a, b in zip(now, old, strict=True)]]
    return {"ratio": ratio, "log_prob": [[LOG(p) for p in now]], "advantage": [advantage], **hyper}


BACK_AND_FORTH = ([0.25, 0.25, 0.75, 0.75], [0.5] * 4, [-1.0, 1.0, 1.0, -1.0])
FAR = ([0.5, 0.5], [0.01, 0.01], [-1.0, 1.0])
#: what it shows -> (inputs, gradients; the values are gradient * log p, metrics)
DPPO: dict[str, tuple[dict[str, Any], list[float], dict[str, float]]] = {
    "dropped: 0.15 > 0.1 upwards, 0.25 > 0.2 downwards; kept: 0.05, 0.15, and both that go back": (
        probabilities(
            [0.40, 0.30, 0.25, 0.25, 0.40, 0.25],
            [0.25, 0.25, 0.40, 0.50, 0.25, 0.50],
            [1.0, 1.0, -1.0, -1.0, -2.0, 2.0],
            clip_low=0.2,
            clip_high=0.1,
        ),
        [0.0, -1.2, 0.625, 0.0, 3.2, -1.0],
        {"clip_fraction": 2 / 6, "clip_fraction_low": 1 / 6, "clip_fraction_high": 1 / 6, "truncated_fraction": 0.0},
    ),
    # KL(q || p) = 0.1438 and KL(p || q) = 0.1308 for q = 0.5, p = 0.25
    "the KL is of the old policy to the new": (
        probabilities(*BACK_AND_FORTH, divergence="kl", clip_low=0.137, clip_high=0.15),
        [0.0, -0.5, -1.5, 1.5],
        {"clip_fraction_low": 0.25},
    ),
    "and its mirror image": (
        probabilities(*BACK_AND_FORTH, divergence="kl", clip_low=0.15, clip_high=0.137),
        [0.5, -0.5, 0.0, 1.5],
        {"clip_fraction_high": 0.25},
    ),
    "weights are truncated at 20": (probabilities(*FAR), [20.0, 0.0], {"truncated_fraction": 1.0}),
    "or not": (
        probabilities(*FAR, clip_ratio_c=None, clip_high=1.0),
        [50.0, -50.0],
        {"truncated_fraction": 0.0},
    ),
    "default bounds of the total variation": (
        probabilities([0.64, 0.66, 0.36, 0.34], [0.5] * 4, [1.0, 1.0, -1.0, -1.0]),
        [-1.28, 0.0, 0.72, 0.0],
        {},
    ),
    # KL(1/2 || 0.65) = 0.0472, KL(1/2 || 0.66) = 0.0541
    "default bounds of the KL": (
        probabilities([0.65, 0.66, 0.35, 0.34], [0.5] * 4, [1.0, 1.0, -1.0, -1.0], divergence="kl"),
        [-1.3, 0.0, 0.7, 0.0],
        {},
    ),
    # Infinite; 0; log 2, downwards and back.
    "no room for another token: the KL is infinite, and there is none if there was no room before": (
        probabilities([1.0, 1.0, 0.5, 0.5], [0.5, 1.0, 1.0, 1.0], [1.0, 1.0, -1.0, 1.0], divergence="kl"),
        [0.0, -1.0, 0.0, -0.5],
        {},
    ),
    "distances at a bound are kept": (
        probabilities([0.5, 0.25], [0.25, 0.5], [1.0, -1.0], clip_low=0.25, clip_high=0.25),
        [-2.0, 0.5],
        dict.fromkeys(("clip_fraction", "clip_fraction_low", "clip_fraction_high", "truncated_fraction"), 0.0),
    ),
    "an advantage of 0 is a bad one": (
        probabilities([0.5, 0.25], [0.25, 0.5], [0.0, 0.0], clip_low=0.1, clip_high=0.1),
        [0.0, 0.0],
        {"clip_fraction_low": 0.5, "clip_fraction_high": 0.0},
    ),
    # KL(1 || 1/2) = log 2 = 0.69
    "the old policy left no other token: dropped": (
        probabilities([0.5], [1.0], [-1.0], divergence="kl", clip_low=0.6),
        [0.0],
        {"clip_fraction": 1.0},
    ),
    "the old policy left no other token: kept": (
        probabilities([0.5], [1.0], [-1.0], divergence="kl", clip_low=0.8),
        [0.5],
        {"clip_fraction": 0.0},
    ),
}


@pytest.mark.parametrize("shown", DPPO)
def test_dppo_bounds_probabilities_in_the_direction_of_the_advantage(shown: str) -> None:
    inputs, gradient, metrics = DPPO[shown]
    value = [[g * lp for g, lp in zip(gradient, inputs["log_prob"][0], strict=True)]]
    assert_case((dppo, inputs, value, [gradient], metrics))


# ---------------------------------------------------------------------- dro and vespo


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_dros_gradient_vanishes_where_the_log_ratio_is_the_advantage_over_beta(level: str) -> None:
    advantage = tensor([[0.6, 0.6, 0.6], [-0.9, -0.9, -0.9]])
    share = 3.0 if level == "sequence" else 1.0  # the log-ratio of the whole answer is the sum
    log_prob = tensor([[-1.0, -0.2, -2.0], [-0.4, -3.0, -1.0]]).requires_grad_()
    old = log_prob.detach() - advantage / 0.3 / share
    (term,) = dro(log_prob, torch.ones(2, 3) == 1, old_log_prob=old, advantage=advantage, beta=0.3, level=level)
    (gradient,) = torch.autograd.grad(term.value.sum(), log_prob)
    assert_close(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("tempered", [1.0, 2.0])
def test_offline_dro_learns_the_optimum_of_the_regularised_reward(tempered: float) -> None:
    """Answers of two tokens, all nine weighted by a fixed policy that is trained on but never sampled again."""
    rng = torch.Generator().manual_seed(0)
    beta, reward = 0.4, torch.rand(9, generator=rng, dtype=torch.float64)
    logits = [torch.randn(3, generator=rng).double(), torch.randn(3, 3, generator=rng).double()]

    def log_probs(first: Tensor, second: Tensor) -> Tensor:  # [answers, tokens]
        return torch.stack([first.log_softmax(-1).repeat_interleave(3), second.log_softmax(-1).flatten()], -1)

    old_token = log_probs(*logits)
    old = old_token.sum(-1)
    soft_value = beta * (old + reward / beta).logsumexp(-1)
    data = (old * tempered).softmax(-1)  # whichever policy wrote the data
    logits = [x.clone().requires_grad_() for x in logits]
    optimiser = torch.optim.LBFGS(logits, max_iter=300, line_search_fn="strong_wolfe", tolerance_grad=1e-10)
    mask, advantage = torch.ones(9, 2, dtype=torch.bool), (reward - soft_value).unsqueeze(-1).expand(9, 2)

    def closure() -> Tensor:
        optimiser.zero_grad()
        (term,) = dro(
            log_probs(*logits), mask, old_log_prob=old_token, advantage=advantage, beta=beta, level="sequence"
        )
        loss = (data.unsqueeze(-1) * term.value).sum()
        loss.backward()
        return loss

    for _ in range(5):
        optimiser.step(closure)
    optimum = (old + reward / beta).softmax(-1)
    assert (optimum - old.exp()).abs().sum() > 0.2
    assert_close(log_probs(*logits).sum(-1).exp(), optimum, rtol=1e-4, atol=1e-5)
