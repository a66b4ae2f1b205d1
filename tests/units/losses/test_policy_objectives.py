"""Policy objectives by hand: clipped surrogates, and objectives for data of another policy."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from by_hand import Case, assert_case, case, evaluate, tensor
from torchrl_llm_kl.losses import _arithmetic, cispo, dapo, get_objective, ppo, rec
from torchrl_llm_kl.losses.objectives._clipped import clipped_surrogate

E, LOG = math.exp, math.log
LN2, LN3, LN4 = LOG(2), LOG(3), LOG(4)
#: Short names of metrics; the fraction of clipped tokens is the sum of those below and above.
SEEN = {"clipped": "clip_fraction", **{name: f"clip_fraction_{name}" for name in ("low", "high", "dual")}}
SEEN |= {"dropped": "sequence_masked_fraction", "masked": "token_masked_fraction", "tapered": "tapered_fraction"}
SEEN |= {"cut": "truncated_fraction", "ratios": "ratio_mean", "mean": "weight_mean", "gate": "gate_mean"}
SEEN |= {"reverse": "reverse_kl", "future": "future_kl"}


Row = Callable[[str], Case]


def show(ratio: Any, advantage: Any, value: Any, gradient: Any, **others: Any) -> Row:
    """A case with one or several rows of tokens, expected metrics and other inputs, for an objective given by name."""
    metrics = {SEEN[name]: others.pop(name) for name in SEEN if name in others}
    if {"clip_fraction_low", "clip_fraction_high"} <= metrics.keys():
        metrics["clip_fraction"] = metrics["clip_fraction_low"] + metrics["clip_fraction_high"]
    inputs = {"ratio": ratio, "advantage": advantage, **others}
    return lambda name: case(get_objective(name), inputs, {}, value, gradient, metrics)


def bounded(now: list[float], old: list[float], advantage: list[float], gradient: list[float], **others: Any) -> Row:
    """A case of dppo, given by probabilities instead of ratios. The values are ``gradient * log p``."""
    ratio, log_prob = [a / b for a, b in zip(now, old, strict=True)], [LOG(p) for p in now]
    value = [g * lp for g, lp in zip(gradient, log_prob, strict=True)]
    return show(ratio, advantage, value, gradient, log_prob=log_prob, **others)


BOUNDS = {"clip_low": 0.3, "clip_high": 0.2}
DUAL, UNBOUNDED = ({**BOUNDS, "clip_ratio_c": x} for x in (3.0, None))
NARROW = {"clip_low": 0.2, "clip_high": 0.3}
NO_SIDE, KL = {"low": 0.0, "high": 0.0}, {"divergence": "kl"}
TENTH, QUARTER = ({"clip_low": x, "clip_high": x} for x in (0.1, 0.25))
NO_BOUND = dict.fromkeys(("clip_low", "clip_high", "mask_clip_low", "mask_clip_high"), 0.0)
TWO_OF_THREE, SIX_OF_SEVEN = (torch.tensor([[True] * n + [False]]) for n in (2, 6))
SIXTHS = {"mask": SIX_OF_SEVEN, "low": 1 / 6, "high": 1 / 6}
DROPS = {"enable_sequence_masking": True, "clip_low": 0.5, "clip_high": 0.4}
DROPS_10, DROPS_15 = ({**DROPS, "delta_sequence_masking": x} for x in (0.1, 0.15))
DROPS_15["mask"] = TWO_OF_THREE
OF_FOUR = {**BOUNDS, "mask": TWO_OF_THREE.expand(4, 3)}
# Ratios on both sides of 0.7 and 1.2, with advantages of both signs.
AT_THE_BOUND = [-0.6, 6, -1.5, 2.1, -5.5, 3, 0], [0, 6, -1.5, 0, -5.5, 0, 0]
LARGE_IS_FREE = [-0.6, 6, -1.5, 2.1, -5.5, 4, 0], [0, 6, -1.5, 0, -5.5, 4, 0]
BOTH_SIGNS = [2, 2, 0.5, 0.5, 1.1, 4, 9], [0.5, -3, 3, -3, 5, -1, 7]
OF_A2PO = {"ref_log_prob": tensor([[-2.0, -1.5, 5.0]]), "beta": 2.0, "mask": TWO_OF_THREE}
OTHER_BOUNDS = {"clip_low": 0.1, "clip_high": 0.3, "clip_ratio_c": 3.0}
FOUR = [1.5, 1.25, 0.75, 4], [2, 2, -1, -1]
# Geometric means 2, 2, 1/2, 1/2 of the two masked-in tokens; the third is masked out.
SEQUENCES = [[4, 1, 100], [1, 4, 100], [0.25, 1, 100], [0.5, 0.5, 100]], [[3, 3, 9], [-3, -3, 9]] * 2
BY_TOKEN = [[-3.6, -3.6, 0], [6, 6, 0], [-1.5, -1.5, 0], [2.1, 2.1, 0]], [[0] * 3, [6, 6, 0], [-1.5, -1.5, 0], [0] * 3]
BY_ROW = [[-3.6], [6], [-1.5], [2.1]], [[0] * 3, [3, 3, 0], [-0.75, -0.75, 0], [0] * 3]
LENGTHS = torch.tensor([[True, True, True], [True, False, False]])
LONG_AND_SHORT = [[8, 1, 1], [0.5, 9, 9]], [[-3] * 3, [5] * 3]
BELOW = [0, -2 * E(-0.1)], [E(-0.2), E(0.1)]
# Log-ratios 1 and 0.1, or -1 and 0.1; the third token does not count.
UP, DOWN = [E(1.0), E(0.1), E(9.0)], [E(-1.0), E(0.1), E(9.0)]
MEANS = [[-2 * E(0.2)], [-2 * E(-0.45)], [2 * E(0.55)], [2 * E(-0.05)]]
OF_MEANS = [[0, -E(0.2), 0], [-E(-0.45), -E(-0.45), 0], [E(0.55), E(0.55), 0], [0, E(-0.05), 0]]
CLIPPED = [2, 2, 0.5, 0.5, 1.1], [3, -3, 3, -3, 5]
AWAY = [2, 1.45, 2, 0.55, 0.65, 0.55, 2, 0.5], [1, 1, -1, -1, -1, 1, 0, 0]
MASKS = {"enable_mask_clip": True}
WIDER = {**MASKS, **BOUNDS, "mask_clip_low": 0.4, "mask_clip_high": 0.5}
# sigmoid and its slope at 1 and 2
P1, SLOPE1 = 0.7310585786300049, 0.19661193324148185
P2, SLOPE2 = 0.8807970779778823, 0.10499358540350662
GATED = [-12 * P1, 10 * P2], [-24 * SLOPE1, 40 * SLOPE2]
TAUS = {"tau_pos": 1.0, "tau_neg": 2.0}

LOG_PROBS = {"log_prob": [-1, -2]}
PLAIN = [2, 0.25], [3, -5]
TAPERED = [2, 0.5, 2, 0.5], [3, 3, -3, -3]
TWICE = {"log_prob": [-2, -2, -2, -2]}
WHOLE_ROWS = {"level": "sequence", "tapered": 1 / 3}
E30 = 10686474581524.463
ROWS = [[4, 0.0625], [4, 0.5], [4, 0.0625]], [[-1, -2], [-1, -2], [1, 2]]
# Log-ratios ln 2, -ln 2 and 0.
THREE = [2, 0.5, 1], [3, -1, 2], [6 + 0.2 * LN2**2, -1 + 0.2 * LN2**2, 1], [-3 + 0.4 * LN2, 1 - 0.4 * LN2, -2]
ANSWERS = [[2, 2, 7], [3, 5, 5]], [[3, 1, 50], [-1, 9, 9]]
OF_ANSWERS = [[6 + 0.15 * LN4**2], [-0.5 + 0.15 * LN3**2]], [[-2 + 0.3 * LN4] * 2 + [0], [1 + 0.3 * LN3, 0, 0]]
PARTS = {"log_prob": [[-2, -1, -9], [-0.5, -1, -1]], "mask": torch.tensor([[True, True, False], [True, False, False]])}
# Products 2 and 1/2. By default w^2 e^{3 (1 - w)} of good and w^3 e^{2 (1 - w)} of bad tokens.
PRODUCTS = [[4, 0.5, 9], [0.25, 2, 9]], [[1, -3, 9], [1, -3, 9]]
GOOD, BAD = [4 * E(-3.0), 0.25 * E(1.5)], [8 * E(-2.0), 0.125 * E(1.0)]
WEIGHED, PULLED = ([[s * g, -3 * s * b, 0] for g, b in zip(GOOD, BAD, strict=True)] for s in (1, -1))
U, V = 2 * E(-0.5), 16 * E(-0.25)
TWO_ROWS = {"mask": TWO_OF_THREE.expand(2, 3)}
GAMMA = {"k_pos": 1.0, "lambda_pos": 0.5, "k_neg": 4.0, "lambda_neg": 0.25}
# For rec, in range: 0.7 to 1.2; of the ring also up to 0.4 and from 2.5.
RATIO = [2, 0.5, 2, 0.5, 1.1, 1.1, 0.3, 3, 0.3, 3, 1.25, 0.75]
ADVANTAGE = [1, 1, -1, -1, 1, -1, 1, -1, -1, 1, 1, -1]
EPSILON = {"epsilon_low": 0.3, "epsilon_high": 0.2, "epsilon_low_prime": 0.6, "epsilon_high_prime": 1.5}
JUDGED = [[4, 1], [4, 1], [0.25, 1], [0.25, 1]], [[3, 3], [-3, -3]] * 2
WHOLE = {**EPSILON, "clip_mode": "gspo-one-side", "low": 0.25, "high": 0.25}
ONE_SIDE = {"clip_mode": "one-side"}
PENALTY = {**ONE_SIDE, "regularizer_coef": 0.1}
SECOND_AND_THIRD = [[0, 0], [-3, -3], [3, 3], [0, 0]], [[0, 0], [3, 3], [-3, -3], [0, 0]]
WEIGHTS = [("none", 1, 1), ("importance_sampling", 4, 0.25), ("advantage", E(2), E(-1.5))]
WEIGHTS.append(("gspo_importance_sampling", 1, 1))
SQUARED, SLOPE = 0.1 * LN2**2, 0.2 * LN2
PENALTY_K2 = {**PENALTY, "regularizer": "k2"}
# With log-probs of 0 the ratios are exact.
RING = {"epsilon_low": 0.25, "epsilon_high": 0.25, "epsilon_low_prime": 0.5, "epsilon_high_prime": 1.0}
RING |= {"clip_mode": "ring", "log_prob": [0, 0]}
SIDES = {"clip_mode": "two-side", "epsilon_low": 0.5, "epsilon_high": 1.0, "log_prob": [0, 0]}
BOTH_WAYS = [0.40, 0.30, 0.25, 0.25, 0.40, 0.25], [0.25, 0.25, 0.40, 0.50, 0.25, 0.50], [1, 1, -1, -1, -2, 2]
BACK_AND_FORTH = [0.25, 0.25, 0.75, 0.75], [0.5] * 4, [-1, 1, 1, -1]
OLD_HALF = [0.5] * 4, [1, 1, -1, -1]
FAR = [0.5, 0.5], [0.01, 0.01], [-1, 1]
ONE = [0.5], [1], [-1]

#: Probabilities that moved by 0.25, 0.05, -0.2, -0.05 and 0; ratios 2, 10/9, 3/5, 6/7 and 1.
MOVED = {"log_prob": [LOG(p) for p in (0.5, 0.5, 0.3, 0.3, 0.25)]}
MOVES = [2, 10 / 9, 0.6, 6 / 7, 1]


def pulled(ratio: list[float], free: list[float], tau: float) -> tuple[list[float], list[float]]:
    """Values and gradients of ``free`` times the ratio, plus the squared log-ratio."""
    logs = [LOG(r) for r in ratio]
    first = [x * r for x, r in zip(free, ratio, strict=True)]
    value = [x + tau * log**2 for x, log in zip(first, logs, strict=True)]
    return value, [x + 2 * tau * log for x, log in zip(first, logs, strict=True)]


# Up to the last policy, these moved by the factors 8, 8, 1.1, 1, 1 and 1/8, and since then by 2, 2, 1.1, 1.5, 1/2 and 1/2.
AGED, AGES = [16, 16, 1.21, 1.5, 0.5, 1 / 16], tensor([[4, 4, 2, 1, 0, 4]])
OF_AGES = [1, -1, 3, 2, -1, 4]
HOLE = torch.tensor([[True, False, True, True]])
FAR_AHEAD = [1] * 32 + [E(0.2)], [1] + [0] * 32

ROWS_OF_CASES: dict[str, Row] = {
    "a3po: clips the step since the last policy, and weighs by the way there, at most 5": show(
        *(AGED, OF_AGES, [-7, 10, -3.63, -2.8, 0.6, -0.25], [0, 10, -3.63, 0, 0, -0.25]),
        **{"age": AGES, "low": 1 / 6, "high": 2 / 6, "mean": 13.225 / 6},
    ),
    "a3po: other bounds": show(
        *(AGED, OF_AGES, [-10.4, 16, -3.63, -2.6, 0.8, -0.25], [0, 16, -3.63, 0, 0, -0.25]),
        **{"age": AGES, "clip_low": 0.2, "clip_high": 0.3, "weight_max": None, "low": 1 / 6, "high": 2 / 6},
    ),
    # The sums are 0.1 + 0.2 / 4 - 0.4 / 8 = 0.1, 0.2 - 0.4 / 2 = 0 and -0.4.
    "fipo: weighs by what follows; masked-out tokens count in the distance": show(
        [E(0.1), E(9), E(0.2), E(-0.4)],
        [2, 7, 3, -1],
        [-2 * E(0.2), 0, -3 * E(0.2), 0.64],
        [-2 * E(0.2), 0, -3 * E(0.2), 0],
        **{"mask": HOLE, "half_life": 1.0, "weight_low": 0.2, "low": 1 / 3, "high": 0.0},
        **{"future": -0.1, "mean": (E(0.1) + 1 + 0.8) / 3},
    ),
    "fipo: the weight is 1 to 1.2 by default": show(
        *([[E(-0.1)], [E(0.22)]], [[1], [1]], *[[[-E(-0.1)], [-1.2 * E(0.22)]]] * 2)
    ),
    "fipo: a lower bound": show([E(-0.4)], [2], [-1.4 * E(-0.4)], [-1.4 * E(-0.4)], weight_low=0.3, weight_high=0.1),
    "fipo: a ratio above 10 is not in the sums": show(
        [E(0.1), 20], [1, -1], [-E(0.2), 10], [-E(0.2), 0], half_life=1.0, future=0.05, dual=0.5
    ),
    "fipo: it is without the dual clip, but does not raise the weight of a bad token": show(
        *([E(0.1), 20], [1, -1], [-1.2 * E(0.1), 20], [-1.2 * E(0.1), 20]), half_life=1.0, clip_ratio_c=None
    ),
    "fipo: unless that is allowed": show(
        *([E(0.1), 20], [1, -1], [-1.2 * E(0.1), 24], [-1.2 * E(0.1), 24]),
        **{"half_life": 1.0, "clip_ratio_c": None, "safe_ratio": None},
    ),
    "fipo: a safe ratio": show([2], [-1], [2], [2], safe_ratio=1.9, mean=1.0),
    "fipo: a ratio below the safe one": show([2], [-1], [2.4], [2.4], safe_ratio=2.1, mean=1.2),
    "fipo: a log-ratio 32 tokens ahead counts half": show(*FAR_AHEAD, *[[-E(0.1)] + [0] * 32] * 2),
    "ctpo: prefixes of 0.02 and 0.05 nats": show(
        [E(0.02), E(9), E(0.03), 1], [1, 1, 1, 0], *[[-E(0.02), 0, -E(0.05), 0]] * 2, mask=HOLE, clipped=0.0
    ),
    # Prefixes of 0.06, 0.06 and 0.16 nats.
    "ctpo: bounds of 0.05 times the root of the position": show(
        [E(0.06), 1, E(0.1)],
        [1, 1, 1],
        [-E(0.05), -E(0.06), -E(0.05 * math.sqrt(3))],
        [0, -E(0.06), 0],
        **{"low": 0.0, "high": 2 / 3},
    ),
    "ctpo: and of -0.025": show([E(-0.03), 1], [-1, -1], [E(-0.025), E(-0.03)], [0, E(-0.03)], low=0.5, high=0.0),
    "ctpo: the dual clip widens too": show([E(0.06), 1], [-1, -1], [E(0.05), E(0.06)], [0, E(0.06)], dual=0.5),
    "ctpo: positions are those of masked-in tokens; other bounds": show(
        [[E(0.3), E(9), E(0.15), E(-0.7)], [E(0.3), E(9), E(0.15), E(-0.7)]],
        [[1] * 4, [-1] * 4],
        [[-E(0.2), 0, -E(0.4), -E(-0.25)], [E(0.25), 0, E(0.45), E(-0.25)]],
        [[0, 0, 0, -E(-0.25)], [0, 0, E(0.45), E(-0.25)]],
        **{"mask": HOLE.expand(2, 4), "clip_low": 0.1, "clip_high": 0.2, "clip_c": 0.25, "power": 1.0},
        **{"low": 0.0, "high": 2 / 6, "dual": 1 / 6},
    ),
    "ctpo: no dual clip": show([E(0.06)], [-1], [E(0.06)], [E(0.06)], clip_c=None),
    "mask_ipo: leaves out 0.25 > 0.2 and -0.2 < -0.1, whatever the advantage": show(
        *(MOVES, [1, -2, 3, -1, 4], *pulled(MOVES, [0, 2, 0, 1, -4], 0.3)),
        **{**MOVED, "clip_low": 0.1, "clip_high": 0.2, "kl_tau": 0.3, "low": 0.2, "high": 0.2},
    ),
    "mask_ipo: one-sided, leaves out what moved along its advantage; 0 counts as bad": show(
        *([2, 2, 0.6, 0.6, 0.6], [1, -1, 1, -1, 0], *pulled([2, 2, 0.6, 0.6, 0.6], [0, 1, -1, 0, 0], 0.3)),
        **{"log_prob": [LOG(p) for p in (0.5, 0.5, 0.3, 0.3, 0.3)], "one_sided": True, "kl_tau": 0.3},
        low=0.4,
        high=0.2,
    ),
    # Advantages log 2; the second probability fell by 0.25, the third by 0.15.
    "ref_kl: the advantage is the log-ratio of the teacher and the policy now": show(
        *([2, 0.5, 0.4], [7, 7, 7], *pulled([2, 0.5, 0.4], [-LN2, 0, -LN2], 0.1)),
        **{"log_prob": [LOG(p) for p in (0.5, 0.25, 0.1)], "ref_log_prob": tensor([[1.0, 0.5, 0.2]]).log()},
        kl_tau=0.1,
        low=1 / 3,
        high=0.0,
        reverse=-LN2,
    ),
    "a2po: (2 (1 + 0.5) - 1.5)^2": show([1, 1, 1], [2, 1, 9], [2.25], [6, 6, 0], **OF_A2PO),
    "ppo: the dual bound": show(*BOTH_SIGNS, *AT_THE_BOUND, **DUAL, **SIXTHS, dual=1 / 6),
    "ppo: without the dual bound": show(*BOTH_SIGNS, *LARGE_IS_FREE, **UNBOUNDED, **SIXTHS),
    "ppo: masking drops bad tokens of sequences 0.2 nats below, but not of sequences 0.05 below": show(
        [[E(-0.3), E(-0.1)], BELOW[1]], [[-1, 2], [-1, -1]], BELOW, BELOW, **DROPS_10, dropped=0.25
    ),
    "ppo: the distance of a sequence is over masked-in tokens, 0.2 nats over two and 0.13 over three": show(
        [E(-0.3), E(-0.1), 1], [-1, 2, 1], [*BELOW[0], 0], [*BELOW[0], 0], **DROPS_15, dropped=0.5
    ),
    "dapo: higher above than below": show(*FOUR, [-2.56, -2.5, 0.8, 4], [0, -2.5, 0, 4], low=0.25, high=0.25),
    "dr_grpo: clips alike": show(*FOUR, [-2.4, -2.4, 0.8, 4], [0, 0, 0, 4]),
    **{
        f"{name}: with other bounds": show(*FOUR, [-2.6, -2.5, 0.9, 3], [0, -2.5, 0, 0], **OTHER_BOUNDS, dual=0.25)
        for name in ("dapo", "dr_grpo")
    },
    "ppo_on_policy: the plain policy gradient, whatever the ratio": show(
        [4, 0.1], [1.5, -0.5], [-1.5, 0.5], [-1.5, 0.5]
    ),
    "gspo: each token has the ratio of its sequence": show(*SEQUENCES, *BY_TOKEN, **OF_FOUR, low=0.25, high=0.25),
    "gspo: one value for each sequence": show(*SEQUENCES, *BY_ROW, **OF_FOUR, level="sequence", low=0.25, high=0.25),
    "gspo: advantages may differ within a sequence": show([4, 1], [3, -1], [-3.6, 2], [0, 2], **BOUNDS),
    "gspo: of the mean advantage, 1": show([0.25, 1], [3, -1], [-0.5], [-0.25, -0.25], **BOUNDS, level="sequence"),
    "luspo: of lengths 3 and 1": show(*LONG_AND_SHORT, *[[[6] * 3, [-2.5, 0, 0]]] * 2, **BOUNDS, mask=LENGTHS),
    "gmpo: the mean of clipped log-ratios: of (0.3, 0.1), (-1, 0.1), (1, 0.1) and (-0.2, 0.1)": show(
        [UP, DOWN, UP, DOWN],
        [[2, 2, 9], [2, 2, 9], [-2, -2, 9], [-2, -2, 9]],
        MEANS,
        OF_MEANS,
        **{**OF_FOUR, **NARROW, "low": 1 / 8, "high": 1 / 8},
    ),
    "gmpo: the mean advantage of a sequence": show([E(1), E(0.1)], [3, -1], [-E(0.2)], [0, -0.5 * E(0.2)], **NARROW),
    "gmpo: counts each side, and an advantage of 0 as a bad one": show(
        [[4, 1], [0.25, 0.25], [0.25, 4]],
        [[1, 1], [-1, -1], [0, 0]],
        [[-E(0.15)], [E(-0.2)], [0]],
        [[0, -0.5 * E(0.15)], [0, 0], [0, 0]],
        **{**NARROW, "low": 3 / 6, "high": 1 / 6},
    ),
    "cispo: defect 40, a clipped weight times the gradient of the log-prob": show(
        *CLIPPED,
        [3.6, -7.2, 2.1, -4.2, 16.5],
        [-3.6, 3.6, -2.1, 2.1, -5.5],
        **{**BOUNDS, "log_prob": [-1, -2, -1, -2, -3], "low": 0.4, "high": 0.4},
    ),
    "cispo: by default without a lower bound": show([0.01, 5], [1, 1], [0.01, 1.28], [-0.01, -1.28], low=0.0, high=0.5),
    "cispo: the token mask drops 2 > 1.5 with A > 0, and 0.55 < 0.6 with A < 0": show(
        *AWAY, [0, 1.2, -1.2, 0, -0.7, 0.7, 0, 0], [0, -1.2, 1.2, 0, 0.7, -0.7, 0, 0], **WIDER, masked=2 / 8
    ),
    "cispo: ratios at a bound": show([1, 1], [1, -1], [1, -1], [-1, 1], **NO_BOUND, **MASKS, **NO_SIDE, masked=0.0),
    "sapo: the gate is differentiated": show([2, 2], [3, -5], *GATED, **TAUS, gate=2 * (SLOPE1 + SLOPE2)),
    "sapo: at ratio 1, any temperature": show([1, 1], [3, -5], [-12, 2.5], [-3, 5], tau_pos=0.5, tau_neg=4.0, gate=1.0),
    "sapo: an advantage of 0 is gated as a bad one": show([2], [0], [0], [0], **TAUS, gate=4 * P2 * (1 - P2)),
    "gpg: the policy gradient": show(*PLAIN, [3, -10], [-3, 5], **LOG_PROBS),
    "opmd: divided by 1 + tau": show(*PLAIN, [2.4, -8], [-2.4, 4], **LOG_PROBS, tau=0.25),
    "importance_sampling: the ratio is differentiated": show(*PLAIN, [-6, 1.25], [-6, 1.25], **LOG_PROBS, ratios=1.125),
    "importance_sampling: no clamp at 20": show([E(30), E(-30)], [1, 1], *[[-E30, -1 / E30]] * 2, log_prob=[-1, -40]),
    "importance_sampling: ends at 80 nats without gradient": show([E(100)], [1], [-E(80)], [0]),
    "topr: tapers the bad": show(*TAPERED, [6, 6, -6, -3], [-3, -3, 3, 1.5], **TWICE, mean=3.5 / 4, tapered=1 / 4),
    "topr: threshold": show(*TAPERED, [6, 3, -6, -3], [-3, -1.5, 3, 1.5], **TWICE, advantage_threshold=3.0, mean=0.75),
    "topr: a sequence has the product of its ratios, 1/4 and 2; the good one has weight 1": show(
        *ROWS, [[-0.25, -0.5], [-1, -2], [1, 2]], [[0.25, 0.5], [1, 2], [-1, -2]], **WHOLE_ROWS
    ),
    "sppo: in range from 1 / 1.25 = 0.8 (not 0.75) to 1.25": show(
        [1.2, 1.3, 0.82, 0.79, 1.2, 0.77],
        [2, 2, -1, -1, -3, 4],
        [-2 * LOG(1.2), 0, LOG(0.82), 0, 3 * LOG(1.2), 0],
        [-2, 0, 1, 0, 3, 0],
        **{"epsilon": 0.25, "low": 2 / 6, "high": 1 / 6},
    ),
    "sppo: keeps ratios at a bound": show([1, 1], [3, -5], [0, 0], [-3, 5], epsilon=0.0, low=0.0, high=0.0),
    "dro: tokens": show(*THREE, beta=0.4, log_prob=[-2, -1, -0.5]),
    "dro: whole answers": show(*ANSWERS, *OF_ANSWERS, **PARTS, beta=0.3, level="sequence"),
    "vespo: weighs the product": show(*PRODUCTS, WEIGHED, PULLED, **TWO_ROWS, mean=(sum(GOOD) + sum(BAD)) / 4),
    "vespo: each sign": show([[2], [2]], [[1], [-1]], [[U], [-V]], [[-U], [V]], **GAMMA),
    "vespo: far sequences have no weight rather than NaN; exp(900) is infinite in float64": show(
        [[E(300)] * 3, [E(-300)] * 3], [[1, -1, 1]] * 2, [[0] * 3] * 2, [[0] * 3] * 2
    ),
    "vespo: an advantage of 0 is weighed as a good one": show([2], [0], [0], [0], mean=4 * E(-3.0)),
    "rec: gspo-one-side": show(*JUDGED, *SECOND_AND_THIRD, **WHOLE),
    **{
        f"rec: {weight}": show([4, 0.25], [4, -3], [4 * up, -3 * down], [-4 * up, 3 * down], weight=weight, temp=2)
        for weight, up, down in WEIGHTS
    },
    "rec: the sequence weight is the geometric mean over masked-in tokens": show(
        [4, 1, 9], [1, 3, 3], [2, 6, 0], [-2, -6, 0], mask=TWO_OF_THREE, weight="gspo_importance_sampling"
    ),
    "rec: no regularizer": show([2, 0.5], [3, 3], [0, 3], [0, -3], **PENALTY),
    "rec: k2, also where clipped": show([2, 0.5], [3, 3], [SQUARED, 3 + SQUARED], [SLOPE, -3 - SLOPE], **PENALTY_K2),
    "rec: forward-kl": show([2, 0.5], [3, 3], [0.1, 3.1], [-0.1, -3.1], **PENALTY, regularizer="forward-kl"),
    "rec: two sides keep ratios at a bound": show([2, 0.5], [1, -1], [0, 0], [-1, 1], **SIDES, clipped=0.0),
    "rec: the ring keeps ratios at its outer bounds": show([2, 0.5], [-1, 1], [0, 0], [1, -1], **RING, clipped=0.0),
    "rec: and drops them where they have moved away": show([2, 0.5], [1, -1], [0, 0], [0, 0], **RING, clipped=1.0),
    "rec: 1 side": show([3, 0.1] * 2, [0, 0, 0.5, 0.5], [0, 0, 0, 0.5], [0, 0, 0, -0.5], **ONE_SIDE, low=0, high=0.25),
    "dppo: dropped 0.15 > 0.1 upwards, 0.25 > 0.2 downwards; kept 0.05, 0.15, and both that go back": bounded(
        *BOTH_WAYS, [0, -1.2, 0.625, 0, 3.2, -1], clip_low=0.2, clip_high=0.1, low=1 / 6, high=1 / 6, cut=0.0
    ),
    # KL(q || p) = 0.1438 and KL(p || q) = 0.1308 for q = 0.5, p = 0.25
    "dppo: KL": bounded(*BACK_AND_FORTH, [0, -0.5, -1.5, 1.5], **KL, clip_low=0.137, clip_high=0.15, low=0.25),
    "dppo: its mirror": bounded(*BACK_AND_FORTH, [0.5, -0.5, 0, 1.5], **KL, clip_low=0.15, clip_high=0.137, high=0.25),
    "dppo: weights are truncated at 20": bounded(*FAR, [20, 0], cut=1.0),
    "dppo: or not": bounded(*FAR, [50, -50], clip_ratio_c=None, clip_high=1.0, cut=0.0),
    "dppo: default bounds of the total variation": bounded([0.64, 0.66, 0.36, 0.34], *OLD_HALF, [-1.28, 0, 0.72, 0]),
    # KL(1/2 || 0.65) = 0.0472, KL(1/2 || 0.66) = 0.0541
    "dppo: default bounds of the KL": bounded([0.65, 0.66, 0.35, 0.34], *OLD_HALF, [-1.3, 0, 0.7, 0], divergence="kl"),
    # Infinite; 0; log 2, downwards and back.
    "dppo: no room for another token: the KL is infinite, and there is none if there was no room before": bounded(
        [1, 1, 0.5, 0.5], [0.5, 1, 1, 1], [1, 1, -1, 1], [0, -1, 0, -0.5], divergence="kl"
    ),
    "dppo: at a bound": bounded([0.5, 0.25], [0.25, 0.5], [1, -1], [-2, 0.5], **QUARTER, **NO_SIDE, cut=0.0),
    "dppo: 0 is a bad one": bounded([0.5, 0.25], [0.25, 0.5], [0, 0], [0, 0], **TENTH, low=0.5, high=0.0),
    # KL(1 || 1/2) = log 2 = 0.69
    "dppo: the old policy left no other token, dropped": bounded(*ONE, [0], divergence="kl", clip_low=0.6, clipped=1.0),
    "dppo: the old policy left no other token, kept": bounded(*ONE, [0.5], divergence="kl", clip_low=0.8, clipped=0.0),
}
#: The name before the colon is the objective's.
CASES = {title: row(title.partition(":")[0]) for title, row in ROWS_OF_CASES.items()}


@pytest.mark.parametrize("shown", CASES)
def test_values_gradients_and_metrics_by_hand(shown: str) -> None:
    term = assert_case(CASES[shown])
    assert term.aggregation == ("seq-mean-token-mean" if "gspo-one-side" in shown else None)


def test_metrics_of_disabled_options_are_absent() -> None:
    for function, metric in ((dapo, "dual"), (cispo, "masked"), (ppo, "dropped")):
        assert SEEN[metric] not in evaluate(function, ratio=[FOUR[0]], advantage=[FOUR[1]])[0].metrics
    one = torch.ones(1, 1)  # at the dual bound, not beyond it
    _, metrics = clipped_surrogate(3 * one, -one, one == 1, clip_low=0.2, clip_high=0.3, clip_ratio_c=3.0)
    assert metrics["clip_fraction_dual"] == 0


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
    term, gradient = evaluate(rec, ratio=[RATIO], advantage=[ADVANTAGE], clip_mode=clip_mode, **EPSILON)
    inside, advantage = tensor([kept]), tensor([ADVANTAGE])
    assert_close(term.value.detach(), advantage * inside)  # log-probs are -1
    assert_close(gradient, -advantage * inside)
    low, high = (((1 - inside) * (advantage == sign)).mean().item() for sign in (-1, 1))
    expected = {"clip_fraction": low + high, "clip_fraction_low": low, "clip_fraction_high": high}
    found = {name: metric.item() for name, metric in term.metrics.items()}
    assert found == pytest.approx({} if clip_mode == "none" else expected)  # nothing can be clipped


def test_sequence_sums_ignore_masked_out_tokens():
    value, mask = torch.tensor([[1.0, 2.0, math.inf], [math.nan, 4.0, 8.0]]), torch.tensor([[1, 1, 0], [0, 1, 1]]) == 1
    assert _arithmetic.sequence_sum(value, mask).tolist() == [[3.0], [12.0]]
    assert _arithmetic.prefix_sum(value, mask).tolist() == [[1.0, 3.0, 3.0], [0.0, 4.0, 12.0]]
