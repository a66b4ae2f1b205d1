"""Corrections of a sampler that differs from the trainer, by hand: weights, rejection, masks, metrics, effect on terms."""

import math
from functools import partial
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from by_hand import called, tensor as f64
from refused import refused
from torchrl_llm_kl import losses
from torchrl_llm_kl.losses import apply_correction, importance_weights, mismatch_metrics, top_entropy_mask

NAN, INF = float("nan"), float("inf")
LN2 = math.log(2)


def bools(*rows: list[int]) -> Tensor:
    return torch.tensor(rows) == 1


def everywhere(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bool)


# ------------------------------------------------------------------ importance weights
# Ratios 4, 1/8, 1 and 2, 3/2; the masked-out token would be e**800.
RATIO = f64([[4.0, 0.125, 1.0], [2.0, 1.5, 1.0]])
MASK = bools([1, 1, 1], [1, 1, 0])
SAMPLER = f64([[-2.0, -0.5, -1.0], [-3.0, -1.5, -800.0]])
OLD = SAMPLER + RATIO.log() + f64([[0.0, 0.0, 0.0], [0.0, 0.0, 800.0]])
SHORT = {"mean": "weight_mean", "most": "weight_max", "size": "effective_sample_size", "share": "truncated_fraction"}


def case(first: list[float], second: list[float], hyper: dict[str, Any], **metrics: float) -> tuple[Any, ...]:
    """Expected weights of both rows, and metrics. In the mode "mask", ``share`` is the masked share."""
    return [first, [*second, 0.0]], hyper, {SHORT[name]: value for name, value in metrics.items()}


@pytest.mark.parametrize(
    ("weights", "hyper", "metrics"),
    [
        # (6.625 / 5)**2 / (11.265625 / 5)
        case([2.0, 0.125, 1.0], [2.0, 1.5], {}, mean=1.725, most=4.0, share=0.2, size=0.7791956),
        case([3.0, 0.25, 1.0], [2.0, 1.5], {"low": 0.25, "high": 3.0}, mean=1.725, most=4.0, share=0.4),
        # (4.5 / 5)**2 / (7.25 / 5)
        case([0, 0, 1.0], [2.0, 1.5], {"mode": "mask", "low": 0.5, "high": 2.0}, mean=1.725, share=0.4, size=0.5586207),
        case([0, 0.125, 1.0], [2.0, 1.5], {"mode": "mask", "high": 3.0}, share=0.2),
        case([4.0, 0, 1.0], [2.0, 1.5], {"mode": "mask", "low": 0.5, "high": None}, share=0.2),
        case([0.75, 0.125, 0.75], [0.75, 0.75], {"low": 0.0, "high": 0.75}, share=0.8),
        case([1.5, 1.5, 1.5], [1.5, 1.5], {"low": 1.5, "high": 1.5}, size=1.0),
        case([4.0, 0.125, 1.0], [2.0, 1.5], {"high": None}, share=0.0),
        # Products 1/2 and 3; (2.5 / 2)**2 / (4.25 / 2)
        case([0.5] * 3, [2.0, 2.0], {"level": "sequence"}, mean=1.75, most=3.0, share=0.5, size=0.7352941),
        case([0.5] * 3, [0, 0], {"level": "sequence", "mode": "mask", "high": 2.5}, share=0.5, size=0.5),
        # The cube root of 1/2 and the square root of 3.
        case([0.7937005] * 3, [1.5, 1.5], {"level": "geometric", "low": 0.7, "high": 1.5}, mean=1.2628757, share=0.5),
        case([0] * 3, [1.7320508] * 2, {"level": "geometric", "mode": "mask", "low": 0.8, "high": 1.8}, share=0.5),
    ],
)
def test_importance_weights_by_hand(weights: Any, hyper: dict[str, Any], metrics: dict[str, float]) -> None:
    """Bounds may be numbers or tensors."""
    tensors = {key: f64(value) if isinstance(value, float) else value for key, value in hyper.items()}
    for given in (hyper, tensors):
        found, seen = called(importance_weights, OLD.clone().requires_grad_(), SAMPLER, MASK, **given)
        assert_close(found, f64(weights), rtol=1e-6, atol=1e-7)
        assert not found.requires_grad
        named = dict(seen)
        if hyper.get("mode") == "mask":
            named["truncated_fraction"] = named.pop("masked_fraction")
        assert set(named) == set(SHORT.values())
        assert all(metric.ndim == 0 for metric in seen.values())
        assert {name: named[name].item() for name in metrics} == pytest.approx(metrics, rel=1e-6)


# The trainer's log-probs under the weights that sampled. Ratios of the mismatch: 2, 1/2, 1 and 4, 3. The rest is staleness.
BEHAVIOR = SAMPLER + f64([[2.0, 0.5, 1.0], [4.0, 3.0, 1.0]]).log()


@pytest.mark.parametrize(
    ("ratio", "weights"),
    [
        ("both", [[4.0, 0.125, 1.0], [2.0, 1.5, 0.0]]),
        ("mismatch", [[2.0, 0.5, 1.0], [4.0, 3.0, 0.0]]),
        ("staleness", [[2.0, 0.25, 1.0], [0.5, 0.5, 0.0]]),
    ],
)
def test_the_two_causes_of_a_ratio(ratio: Any, weights: list[list[float]]) -> None:
    inputs = losses.LossInputs(OLD, MASK, old_log_prob=OLD, sampler_log_prob=SAMPLER, behavior_log_prob=BEHAVIOR)
    assert_close(importance_weights(inputs, high=None, ratio=ratio)[0], f64(weights))
    # k1 is minus the log-ratio, and at least -log 2.9 keeps ratios up to 2.9.
    kept = losses.rejection_mask(inputs, divergence="token_k1", low=-math.log(2.9), ratio=ratio)[0]
    assert_close(kept, f64([[float(0 < w <= 2.9) for w in row] for row in weights]))
    missing = losses.LossInputs(OLD, MASK, old_log_prob=OLD, sampler_log_prob=SAMPLER)
    if ratio != "both":
        with pytest.raises(ValueError, match="importance_weights needs behavior_log_prob"):
            importance_weights(missing, ratio=ratio)


def test_both_causes_multiply_and_each_is_unbiased() -> None:
    """Sums over a vocabulary of three: the mean under the sampler of both weights times f is the mean of f under old."""
    sampler, behavior, old = f64([[0.5, 0.3, 0.2], [0.4, 0.35, 0.25], [0.2, 0.2, 0.6]]).log().unsqueeze(1)
    given = {"old_log_prob": old, "sampler_log_prob": sampler, "behavior_log_prob": behavior}
    inputs = losses.LossInputs(old, everywhere(1, 3), **given)
    both, mismatch, staleness = (
        importance_weights(inputs, high=None, ratio=ratio)[0] for ratio in ("both", "mismatch", "staleness")
    )
    assert_close(mismatch * staleness, both)
    value = f64([[3.0, -1.0, 2.0]])
    for weights, target in ((both, old), (mismatch, behavior)):
        assert_close((sampler.exp() * weights * value).sum(), (target.exp() * value).sum())
    assert_close((behavior.exp() * staleness * value).sum(), (old.exp() * value).sum())


AGES = f64([[0.0, 1.0, 3.0], [9.0, 2.0, 50.0]])


@pytest.mark.parametrize(
    ("hyper", "weights", "too_old"),
    [
        ({}, [[1, 1, 1], [1, 1, 0]], 0.0),
        ({"max_age": 2}, [[1, 1, 0], [0, 1, 0]], 0.4),
        ({"decay": 0.5}, [[1, 0.5, 0.125], [1 / 512, 0.25, 0]], 0.0),
        ({"max_age": 3, "decay": 0.5}, [[1, 0.5, 0.125], [0, 0.25, 0]], 0.2),
    ],
)
def test_weights_by_age(hyper: dict[str, Any], weights: list[list[float]], too_old: float) -> None:
    got, metrics = losses.staleness_mask(losses.LossInputs(-AGES, MASK, age=AGES), **hyper)
    assert_close(got, f64(weights))
    want = {"age_mean": 3.0, "age_max": 9.0, "too_old_fraction": too_old}  # (0 + 1 + 3 + 9 + 2) / 5
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(want)


@pytest.mark.parametrize("hyper", [{"max_age": -1}, {"decay": 0.0}, {"decay": 1.5}], ids=str)
def test_ages_and_decays_out_of_range(hyper: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(hyper))):
        losses.StalenessMask(**hyper)  # type: ignore[arg-type]


def test_staleness_metrics_by_hand() -> None:
    d = f64([[0.0, LN2, -LN2], [LN2, 1.0, 700.0]])
    k3 = {0: 0.0, 1: 1 - LN2, 2: ((LN2 - 0.5) + (math.e - 2)) / 2, 4: 0.0, 8: 1 - LN2}
    metrics = losses.staleness_metrics(SAMPLER + d, SAMPLER, MASK, AGES)
    assert float(metrics["staleness_k1"]) == pytest.approx(-(LN2 + 1) / 5)
    assert float(metrics["staleness_k3"]) == pytest.approx((2 * (1 - LN2) + (LN2 - 0.5) + (math.e - 2)) / 5)
    for low, value in k3.items():
        assert float(metrics[f"staleness_k3_age{low}"]) == pytest.approx(value, abs=1e-12)
    shares = [float(metrics[f"age{low}_fraction"]) for low in k3]
    assert shares == pytest.approx([0.2, 0.2, 0.4, 0.0, 0.2])
    assert len(losses.staleness_metrics(SAMPLER, SAMPLER, MASK)) == 2


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize(("mode", "high"), [("truncate", None), ("mask", 2.0)])
def test_weights_are_finite_whatever_the_log_probs(level: str, mode: str, high: float | None) -> None:
    old = torch.tensor([[0.0, -1e4, -INF, 0.0, -1.0, -INF], [NAN, INF, 0.0, 0.0, 0.0, 0.0]])
    sampler = torch.tensor([[-1e4, 0.0, 0.0, -INF, NAN, -INF], [NAN, 0.0, 0.0, -1.0, 0.0, 0.0]])
    mask = bools([1] * 6, [0] * 6)
    weights, metrics = called(importance_weights, old, sampler, mask, level=level, mode=mode, high=high)
    assert weights.isfinite().all()
    assert (weights[1] == 0).all()
    assert all(metric.isfinite() for metric in metrics.values())


def test_edges_of_importance_weights() -> None:
    unscored, _ = called(importance_weights, f64([[-1.0, -1.0]]), f64([[NAN, -1.5]]), everywhere(1, 2))
    assert_close(unscored, f64([[1.0, math.exp(0.5)]]))
    # Each token's log-ratio ends at 80 nats before they are averaged.
    inputs = torch.zeros(1, 2), torch.tensor([[-200.0, 0.0]]), everywhere(1, 2)
    weights, _ = called(importance_weights, *inputs, level="geometric", high=None)
    assert_close(weights, torch.full((1, 2), math.exp(40.0)))
    same = torch.randn(3, 4, dtype=torch.bfloat16)
    weights, metrics = called(importance_weights, same, same, everywhere(3, 4), level="sequence")
    assert weights.dtype == torch.float32
    assert (weights == 1).all()
    assert metrics["effective_sample_size"] == 1


def test_corrections_of_a_batch_without_tokens() -> None:
    for shape in ((2, 3), (0, 3), (2, 0)):
        old, sampler, advantage = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
        nothing = ~everywhere(*shape)
        for weights, metrics in (
            called(importance_weights, old, sampler, nothing),
            called(importance_weights, old, sampler, nothing, level="sequence"),
            called(losses.off_policy_sequence_mask, old, sampler, advantage, nothing, delta=0.1),
            called(top_entropy_mask, old.abs(), nothing),
            (torch.zeros(shape), mismatch_metrics(old, sampler, nothing)),
            (torch.zeros(shape), losses.correction_metrics(old.abs(), nothing)),
        ):
            assert (weights == 0).all()
            assert all(metric == 0 for metric in metrics.values())


# ------------------------------------------------------------------ rejection and metrics
# Trainer over sampler: 2, 1/4, 1 | 1, 1/2 | 4. Masked out: anything.
D = f64([[2.0, 0.25, 1.0], [1.0, 0.5, 1.0], [4.0, 1.0, 1.0]]).log()
TOKENS = bools([1, 1, 1], [1, 1, 0], [1, 0, 0])
SEEN = f64([[-3.0, -0.5, -1.0], [-1.0, -2.0, NAN], [-2.0, -INF, 3.0]])
TRAINER = torch.where(TOKENS, SEEN + D, f64(7.0))


@pytest.mark.parametrize(
    ("divergence", "bounds", "kept"),
    [
        # k1 of tokens in units of ln 2: -1, 2, 0 | 0, 1 | -2
        ("token_k1", {"low": -1.5 * LN2, "high": 1.5 * LN2}, [[1, 0, 1], [1, 1, 0], [0, 0, 0]]),
        ("token_k1", {"low": -0.5 * LN2}, [[0, 1, 1], [1, 1, 0], [0, 0, 0]]),
        ("token_k1", {"high": 0.5 * LN2}, [[1, 0, 1], [1, 0, 0], [1, 0, 0]]),
        # halves of squares: .24, .96, 0 | 0, .24 | .96
        ("token_k2", {"high": 0.5}, [[1, 0, 1], [1, 1, 0], [0, 0, 0]]),
        # r - 1 - ln r: .307, .636, 0 | 0, .193 | 1.614
        ("token_k3", {"high": 0.7}, [[1, 1, 1], [1, 1, 0], [0, 0, 0]]),
        ("token_k3", {"high": 0.25}, [[0, 0, 1], [1, 1, 0], [0, 0, 0]]),
        # sums: 1 | 1 | -2; 1.2 | .24 | .96; .943 | .193 | 1.614
        ("seq_sum_k1", {"low": -1.5 * LN2, "high": 1.5 * LN2}, [[1, 1, 1], [1, 1, 0], [0, 0, 0]]),
        ("seq_sum_k1", {"high": 0.5 * LN2}, [[0, 0, 0], [0, 0, 0], [1, 0, 0]]),
        ("seq_sum_k2", {"high": 1.0}, [[0, 0, 0], [1, 1, 0], [1, 0, 0]]),
        ("seq_sum_k3", {"high": 0.9}, [[0, 0, 0], [1, 1, 0], [0, 0, 0]]),
        # means: 1/3 | 1/2 | -2; .4 | .12 | .96; .314 | .097 | 1.614
        ("seq_mean_k1", {"low": -1.5 * LN2, "high": 0.4 * LN2}, [[1, 1, 1], [0, 0, 0], [0, 0, 0]]),
        ("seq_mean_k2", {"high": 0.3}, [[0, 0, 0], [1, 1, 0], [0, 0, 0]]),
        ("seq_mean_k3", {"high": 0.35}, [[1, 1, 1], [1, 1, 0], [0, 0, 0]]),
        ("seq_max_k1", {"low": -1.5 * LN2}, [[1, 1, 1], [1, 1, 0], [0, 0, 0]]),
        ("seq_max_k1", {"high": 1.5 * LN2}, [[0, 0, 0], [1, 1, 0], [1, 0, 0]]),
        ("seq_max_k2", {"high": 0.9}, [[0, 0, 0], [1, 1, 0], [0, 0, 0]]),
        ("seq_max_k3", {"high": 0.7}, [[1, 1, 1], [1, 1, 0], [0, 0, 0]]),
    ],
)
def test_rejection_by_hand(divergence: str, bounds: dict[str, Any], kept: list[list[int]]) -> None:
    """Bounds may be numbers or tensors."""
    whole = sum(sum(row) == int(mask.sum()) for row, mask in zip(kept, TOKENS, strict=True))
    shares = {"masked_fraction": 1 - sum(map(sum, kept)) / 6, "seq_masked_fraction": 1 - whole / 3}
    for given in (bounds, {name: f64(value) for name, value in bounds.items()}):
        trainer = TRAINER.clone().requires_grad_()
        weights, metrics = called(losses.rejection_mask, trainer, SEEN, TOKENS, divergence=divergence, **given)
        assert weights.tolist() == kept
        assert not weights.requires_grad
        expected = {f"{divergence}_{name}": share for name, share in shares.items()}
        assert {name: metric.item() for name, metric in metrics.items()} == pytest.approx(expected)


@pytest.mark.parametrize("divergence", get_args(losses.Divergence))
def test_edges_of_rejection(divergence: str) -> None:
    """Agreement and unscored tokens are kept. Tokens that are impossible for only one of the two are rejected."""
    signed, same = divergence.endswith("k1"), f64([[-1.0, -2.0]])
    for bound in (1e-9, 0.0) if signed else (1e-9,):
        low = {"low": -bound} if signed else {}
        kept, _ = called(losses.rejection_mask, same, same, everywhere(1, 2), divergence=divergence, high=bound, **low)
        assert kept.tolist() == [[1, 1]]
    bounds = {"high": 3.0} | ({"low": -3.0} if signed else {})
    far = [(-1.0, NAN, 1), (-INF, -INF, 1), (-INF, -1.0, 0), (-1.0, -INF, 0), (-200.0, -1.0, 0)]
    for old, sampler, kept in far:
        one = f64([[old]]), f64([[sampler]]), everywhere(1, 1)
        weights, metrics = called(losses.rejection_mask, *one, divergence=divergence, **bounds)
        assert weights.tolist() == [[kept]], (divergence, old, sampler)
        assert all(metric == 1 - kept for metric in metrics.values())
    for shape in ((2, 3), (0, 3), (2, 0)):
        nothing = torch.zeros(shape).bfloat16(), torch.zeros(shape), ~everywhere(*shape)
        weights, metrics = called(losses.rejection_mask, *nothing, divergence=divergence, high=3.0)
        assert weights.dtype == torch.float32
        assert weights.sum() == 0
        assert all(metric == 0 for metric in metrics.values())
    meta = [x.to("meta") for x in (TRAINER, SEEN, TOKENS)]
    assert called(losses.rejection_mask, *meta, divergence=divergence, high=f64(3.0).to("meta"))[0].shape == (3, 3)


def test_masked_out_tokens_reject_nothing() -> None:
    """A tensor as a bound is not read. It may exclude 0, the value of masked-out tokens."""
    given = f64([[-1.5, -1.0]]), f64([[-1.0, -1.0]]), bools([1, 0])
    weights, metrics = called(losses.rejection_mask, *given, divergence="seq_max_k1", low=f64(0.1))
    assert (weights.tolist(), metrics["seq_max_k1_seq_masked_fraction"]) == ([[1, 0]], 0)


def test_mismatch_metrics_by_hand() -> None:
    """From the mean log-probs of trainer and sampler, and their ratios as listed above."""
    found = mismatch_metrics(TRAINER.clone().requires_grad_(), SEEN, TOKENS)
    sampler = [4.5 / 3, 3.0 / 2, 2.0]  # log-perplexities
    difference = [LN2 / 3, LN2 / 2, -2 * LN2]
    trainer = [a + b for a, b in zip(sampler, difference, strict=True)]
    expected = {
        "trainer_log_ppl": sum(trainer) / 3,
        "sampler_log_ppl": 5 / 3,
        "trainer_ppl": sum(map(math.exp, trainer)) / 3,
        "sampler_ppl": sum(map(math.exp, sampler)) / 3,
        "log_ppl_diff": sum(difference) / 3,
        "log_ppl_abs_diff": (LN2 / 3 + LN2 / 2 + 2 * LN2) / 3,
        "log_ppl_diff_max": LN2 / 2,
        "log_ppl_diff_min": -2 * LN2,
        "ppl_ratio": (2 ** (1 / 3) + 2**0.5 + 0.25) / 3,
        "mismatch_k1": 0.0,
        "mismatch_k3": (2 + 0.25 + 1 + 1 + 0.5 + 4) / 6 - 1,
        "chi2_token": (4 + 1 / 16 + 1 + 1 + 1 / 4 + 16) / 6 - 1,
        "chi2_seq": (1 / 4 + 1 / 4 + 16) / 3 - 1,
    }
    assert {name: value.item() for name, value in found.items()} == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert all(value.shape == () and not value.requires_grad for value in found.values())
    # Sequences that all differ one way; the third has no tokens; of the last the trainer did not score one.
    old, sampler = f64([[-1.5, -2.0], [-0.75, 9.0], [7.0, 7.0], [NAN, -1.25]]), f64([[-1.0, -1.0]] * 4)
    sampler[1, 0] = -0.5
    mask = bools([1, 1], [1, 0], [0, 0], [1, 1])
    found, other = mismatch_metrics(old, sampler, mask), mismatch_metrics(sampler, old, mask)
    ends = [x[f"log_ppl_diff_{end}"].item() for x in (found, other) for end in ("max", "min")]
    assert ends == pytest.approx([0.75, 0.25, -0.25, -0.75])
    assert found["mismatch_k1"].item() == pytest.approx((0.5 + 1.0 + 0.25 + 0.25) / 4)


def test_metrics_of_tokens_that_are_not_scored_or_impossible() -> None:
    old, sampler = f64([[-1.0, -2.0, -9.0], [-4.0, -1.0, -1.0]]), f64([[-1.5, -1.0, NAN], [NAN, NAN, NAN]])
    expected = mismatch_metrics(old, sampler, bools([1, 1, 0], [0, 0, 0]))
    assert mismatch_metrics(old, sampler, everywhere(2, 3)) == expected
    assert expected["log_ppl_diff"].item() == pytest.approx(0.25)
    meta = mismatch_metrics(*(x.to("meta") for x in (TRAINER, SEEN, TOKENS)))
    assert all(value.shape == () for value in meta.values())
    for old, sampler in (([-1e4, -1.0], [-1.0, -1e4]), ([-1.0, -1.0], [-1e4, -1e4])):
        far = mismatch_metrics(torch.tensor([old]), torch.tensor([sampler]), everywhere(1, 2))
        assert all(value.isfinite() for value in far.values())


def test_metrics_of_the_product_by_hand() -> None:
    weights = f64([[2.0, 0.0, 1.0], [1.0, 1.0, 9.0], [7.0, 7.0, 7.0]]).requires_grad_()
    found = losses.correction_metrics(weights, bools([1, 1, 1], [1, 1, 0], [0, 0, 0]))
    # 2, 0, 1, 1, 1: a mean of 1, a mean square of 7/5
    expected = {"rejected_fraction": 1 / 5, "rejected_seq_fraction": 1 / 2, "correction_ess": 5 / 7}
    assert {name: value.item() for name, value in found.items()} == pytest.approx(expected)
    assert not any(value.requires_grad for value in found.values())
    assert losses.correction_metrics(torch.full((1, 2), 1e30), everywhere(1, 2))["correction_ess"] == 1


# ------------------------------------------------------------------ tokens of some sequences, or of most entropy
def test_off_policy_sequences_by_hand() -> None:
    """Tokens with a positive advantage and sequences at the bound are kept."""
    old = f64([[-1.0, -1.0, NAN], [-1.0, -1.0, -1.0], [-1.0, -1.0, -9.0]])
    # Means of old - new: 0.2, 0.05 and -0.3.
    log_prob = f64([[-1.3, -1.1, 5.0], [-1.2, -0.9, -1.05], [-0.7, -0.7, -9.0]]).requires_grad_()
    given = log_prob, old, f64([[-1.0, 2.0, -1.0], [-1.0] * 3, [-1.0] * 3]), bools([1, 1, 0], [1] * 3, [1, 1, 0])
    weights, metrics = called(losses.off_policy_sequence_mask, *given, delta=0.1)
    assert weights.tolist() == [[0, 1, 0], [1, 1, 1], [1, 1, 0]]
    assert not weights.requires_grad
    assert_close(metrics["sequence_masked_fraction"].item(), 1 / 7)
    assert called(losses.off_policy_sequence_mask, *given, delta=torch.tensor(0.04))[0].sum() == 3
    given = f64([[-1.25] * 3, [-2.0] * 3]), f64([[-1.0] * 3] * 2), f64([[-1.0] * 3, [-1.0, 0.0, 0.5]]), everywhere(2, 3)
    weights, metrics = called(losses.off_policy_sequence_mask, *given, delta=0.25)
    assert weights.tolist() == [[1, 1, 1], [0, 1, 1]]
    assert_close(metrics["sequence_masked_fraction"].item(), 1 / 6)


def test_tokens_that_leave_a_far_sampler_by_hand() -> None:
    """Ratios 2, 1/2 and 1 of one sequence, with distances 1/2, 1/4 and 0, and 1.2 of another, with distance 0.1."""
    log_prob = f64([[2.0, 0.5, 1.0, 9.0], [1.2, 9.0, 9.0, 9.0]]).log() - 5
    mask = bools([1, 1, 1, 0], [1, 0, 0, 0])
    for advantage, kept in ((1.0, [[0, 1, 1, 0], [1, 0, 0, 0]]), (-1.0, [[1, 0, 1, 0], [1, 0, 0, 0]])):
        given = log_prob, torch.full_like(log_prob, -5.0), torch.full_like(log_prob, advantage), mask
        weights, metrics = called(losses.total_variation_mask, *given, delta=0.2)
        assert weights.tolist() == kept
        assert_close(
            [metrics[name].item() for name in ("total_variation", "total_variation_masked_fraction")],
            [(0.25 + 0.1) / 2, 1 / 4],
        )
        assert called(losses.total_variation_mask, *given, delta=0.26)[0].sum() == 4
        assert called(losses.total_variation_mask, *given, delta=torch.tensor(0.05))[0].sum() == (
            2 if advantage > 0 else 3
        )
        at_the_bound = [x[:1, :2] for x in given]  # a mean of 0.375, which no rounding reaches from above
        assert called(losses.total_variation_mask, *at_the_bound, delta=0.3751)[0].sum() == 2
    assert not weights.requires_grad


def test_the_distance_to_the_sampler_is_the_total_variation() -> None:
    """Its mean over the sampler's tokens, enumerated: half the sum of the differences of all probabilities."""
    old, now = torch.randn(2, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64).softmax(-1)
    given = (x.unsqueeze(-1) for x in (now.log(), old.log(), torch.zeros_like(old)))
    distances = [
        called(losses.total_variation_mask, *row, delta=0.5)[1]["total_variation"]
        for row in zip(*given, [everywhere(1)] * 7, strict=True)
    ]
    assert_close((old * torch.stack(distances)).sum(), (now - old).abs().sum() / 2)


ENTROPY = f64([[0.1, 2.0, 0.3, 9.0], [0.7, 0.5, NAN, 1.5]])
COUNTED = bools([1, 1, 1, 0], [1, 1, 0, 1])


@pytest.mark.parametrize(
    ("fraction", "threshold", "kept"),
    [
        # Of 6 tokens: 0.2 * 6 = 1.2, 2.4, 3.6, and never none.
        (0.2, 2.0, [[0, 1, 0, 0], [0, 0, 0, 0]]),
        (0.4, 1.5, [[0, 1, 0, 0], [0, 0, 0, 1]]),
        (0.6, 0.5, [[0, 1, 0, 0], [1, 1, 0, 1]]),
        (0.01, 2.0, [[0, 1, 0, 0], [0, 0, 0, 0]]),
        (1.0, 0.1, [[1, 1, 1, 0], [1, 1, 0, 1]]),
        (torch.tensor(0.4), 1.5, [[0, 1, 0, 0], [0, 0, 0, 1]]),
    ],
)
def test_top_entropy_by_hand(fraction: Any, threshold: float, kept: list[list[int]]) -> None:
    assert losses.entropy_threshold(ENTROPY, COUNTED, fraction).item() == threshold
    weights, metrics = called(top_entropy_mask, ENTROPY.clone().requires_grad_(), COUNTED, fraction=fraction)
    assert weights.tolist() == kept
    assert not weights.requires_grad
    assert metrics["entropy_threshold"].item() == threshold
    assert_close(metrics["entropy_kept_fraction"].item(), sum(map(sum, kept)) / 6)


def test_edges_of_top_entropy() -> None:
    """The default is a fifth. Ties are kept together. Entropies may be rounded below 0. Nothing is read on the host."""
    entropy = torch.arange(10.0).unsqueeze(0)
    assert losses.entropy_threshold(entropy, everywhere(1, 10)) == 8
    assert called(top_entropy_mask, entropy, everywhere(1, 10))[0].sum() == 2
    equals, _ = called(top_entropy_mask, f64([[1.0, 0.5, 1.0, 1.0]]), everywhere(1, 4), fraction=0.25)
    assert equals.tolist() == [[1, 0, 1, 1]]
    entropy, mask = torch.tensor([[-1e-7, 1.0, 5.0]]), bools([1, 1, 0])
    assert_close(losses.entropy_threshold(entropy, mask, fraction=1.0), torch.tensor(-1e-7), rtol=0, atol=0)
    assert called(top_entropy_mask, entropy, mask, fraction=1.0)[0].tolist() == [[1.0, 1.0, 0.0]]
    assert called(top_entropy_mask, ENTROPY.to("meta"), COUNTED.to("meta"))[0].shape == (2, 4)


def test_parts_of_a_batch_keep_the_same_tokens_as_the_whole() -> None:
    def in_parts(**how: Any) -> Tensor:
        return torch.cat([called(top_entropy_mask, ENTROPY[i : i + 1], COUNTED[i : i + 1], **how)[0] for i in range(2)])

    threshold = losses.entropy_threshold(ENTROPY, COUNTED, 0.4)
    assert torch.equal(in_parts(threshold=threshold), called(top_entropy_mask, ENTROPY, COUNTED, fraction=0.4)[0])
    assert not torch.equal(in_parts(fraction=0.7), called(top_entropy_mask, ENTROPY, COUNTED, fraction=0.7)[0])
    assert called(top_entropy_mask, ENTROPY, COUNTED, threshold=0.7)[0].tolist() == [[0, 1, 0, 0], [1, 0, 0, 1]]


def test_apply_multiplies_values_and_keeps_denominators() -> None:
    log_prob = f64([[-1.0, -2.0, -3.0], [-1.0, -2.0, -3.0]]).requires_grad_()
    ones = torch.ones_like(log_prob)
    (term,) = losses.ppo(losses.LossInputs(log_prob, MASK, old_log_prob=log_prob.detach(), advantage=ones))
    weights = f64([[2.0, 0.0, 1.0], [0.5, 3.0, 0.0]])
    (corrected,) = apply_correction([term], weights)
    assert corrected.mask is term.mask
    assert corrected.metrics is term.metrics
    assert_close(corrected.value.detach(), -weights)
    loss = losses.aggregate(corrected.value, corrected.mask, denominator=losses.count(term.mask))
    assert_close(torch.autograd.grad(loss, log_prob)[0], -weights / 5)
    # a weight of 0 stops what is not finite
    infinite = losses.LossTerm("objective", 1 / f64([[0.0, -1.0]]), everywhere(1, 2))
    assert apply_correction([infinite], f64([[0.0, 2.0]]))[0].value.tolist() == [[0.0, -2.0]]


def test_values_per_sequence_get_the_mean_weight_of_their_tokens() -> None:
    term = losses.LossTerm("objective", f64([[10.0], [20.0]]), everywhere(2, 1))
    token, sequence = (OF_WEIGHTS(level=level)[0] for level in ("token", "sequence"))
    # (2 + 1/8 + 1) / 3 and (2 + 3/2) / 2
    assert_close(apply_correction([term], token, MASK)[0].value, f64([[10 * 3.125 / 3], [35.0]]))
    assert_close(apply_correction([term], sequence, MASK)[0].value, f64([[5.0], [40.0]]))
    nested = losses.LossTerm("objective", f64([[[10.0], [20.0]]]), everywhere(1, 2, 1))
    assert_close(apply_correction([nested], sequence[None], MASK[None])[0].value, f64([[[5.0], [40.0]]]))
    with pytest.raises(ValueError, match="objective has one value per sequence: pass mask="):
        apply_correction([term], token)
    with pytest.raises(ValueError, match=r"objective has shape \(1, 1\) but the weights of sequences has shape"):
        apply_correction([losses.LossTerm("objective", f64([[10.0]]), everywhere(1, 1))], RATIO, MASK)


OF_WEIGHTS, OF_REJECTION = (partial(called, f, OLD, SAMPLER, MASK) for f in (importance_weights, losses.rejection_mask))


test_what_is_refused = refused(
    lambda function, hyper: function(**hyper),
    (OF_WEIGHTS, {"mode": "clip"}, "mode must be one of 'truncate', 'mask', got 'clip'"),
    (OF_WEIGHTS, {"low": 3.0}, r"low must be at least 0 and at most 2, got 3\.0"),
    (losses.RejectionMask, {"divergence": "token_k3"}, r"token_k3 needs a bound: pass high="),
    (OF_REJECTION, {"divergence": "seq_sum_k2", "low": 0.1, "high": 1.0}, r"seq_sum_k2 needs a bound: pass high="),
    (OF_REJECTION, {"divergence": "token_k1", "low": 0.1}, r"low must be at most 0, got 0\.1"),
    (OF_REJECTION, {"divergence": "token_k2", "high": 0.0}, r"high must be greater than 0, got 0\.0"),
    (partial(called, top_entropy_mask, -OLD, MASK), {"fraction": 1.2}, "fraction must be greater than 0 and at most 1"),
    (partial(mismatch_metrics, OLD, SAMPLER[:, :1], MASK), {}, r"mask has shape \(2, 3\) but sampler_log_prob has"),
    (partial(losses.correction_metrics, OLD, MASK.float()), {}, TypeError, "mask must be boolean"),
)
