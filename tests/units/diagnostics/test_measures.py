"""Measures of a batch by hand, in float64, and as verl has them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from seeded import columns_of, make_tokenizer
from torchrl_llm_kl import Ragged
from torchrl_llm_kl.diagnostics import TokenColumns, measure
from torchrl_llm_kl.diagnostics._measures import clustered_mean, retokenised, worst_tokens

NAN = math.nan
LN2 = math.log(2)


def f64(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# ------------------------------------------------------------------ errors by sequence


def test_clustered_error_by_hand() -> None:
    """Sums of deviations of three sequences: -2, 0, 2; variance 3/2 * 8 / 6**2."""
    found = clustered_mean(f64([0, 0, 1, 1, 2, 2]), torch.tensor([3, 3, 5, 5, 9, 9]))
    assert found.value == 1.0
    assert found.error == pytest.approx(math.sqrt(1.5 * 8) / 6)
    assert found.count == 6


def test_the_error_of_single_tokens_is_a_lower_bound() -> None:
    """Within each sequence deviations cancel: the clustered error alone would be 0."""
    found = clustered_mean(f64([-1, 1, 1, -1]), torch.tensor([0, 0, 1, 1]))
    assert found.error == pytest.approx(math.sqrt(4) / 4)


@pytest.mark.parametrize(
    ("degrees", "t", "z"),
    # two-sided 5% and 0.1% points of Student's t (tables), and of the normal distribution
    [(5, 2.571, 1.960), (10, 2.228, 1.960), (30, 2.042, 1.960), (10, 4.587, 3.291), (30, 3.646, 3.291)],
)
def test_standard_scores_are_those_of_student_s_t(degrees: int, t: float, z: float) -> None:
    values = torch.linspace(-1, 1, degrees + 1, dtype=torch.float64)
    error = clustered_mean(values, torch.arange(degrees + 1)).error
    found = clustered_mean(values + t * error, torch.arange(degrees + 1))
    assert found.z == pytest.approx(z, abs=0.02)
    assert clustered_mean(-values - t * error, torch.arange(degrees + 1)).z == pytest.approx(-z, abs=0.02)


def test_one_sequence_has_no_error() -> None:
    found = clustered_mean(f64([1, 2]), torch.tensor([0, 0]))
    assert (found.value, found.z) == (1.5, 0.0)
    assert math.isnan(found.error)
    assert math.isnan(clustered_mean(f64([]), torch.tensor([])).value)


# ------------------------------------------------------------------ sampler and trainer


def test_mismatch_by_hand() -> None:
    """Ratios of trainer to sampler: 2, 1/2 | 4, and a token that the sampler did not score."""
    sampler = [[-2.0, -1.0], [-3.0, NAN]]
    trainer = [[-2.0 + LN2, -1.0 - LN2], [-3.0 + 2 * LN2, -1.0]]
    advantage = [[1.0, 1.0], [-1.0, -1.0]]
    found = measure(columns_of([[1, 1], [1, 1]], sampler_log_prob=sampler, old_log_prob=trainer, advantage=advantage))
    k3 = [2 - 1 - LN2, 0.5 - 1 + LN2, 4 - 1 - 2 * LN2]
    expected = {
        "mismatch/k1": -2 * LN2 / 3,
        "mismatch/k3": sum(k3) / 3,
        "mismatch/ratio": 6.5 / 3,
        "mismatch/rms": LN2 * math.sqrt(6 / 3),
        "mismatch/max_abs": 2 * LN2,
        "mismatch/ess_token": (6.5 / 3) ** 2 / ((4 + 0.25 + 16) / 3),
        "mismatch/ess_seq": (5 / 2) ** 2 / ((1 + 16) / 2),
        "mismatch/chi2_token": (4 + 0.25 + 16) / 3 - 1,
        "mismatch/chi2_seq": (1 + 16) / 2 - 1,
        "mismatch/ppl_ratio": (1 + 1 / 4) / 2,
        "mismatch/k1@0": -3 * LN2 / 2,
        "mismatch/k1@1-3": LN2,
        "mismatch/k3@positive": (k3[0] + k3[1]) / 2,
        "mismatch/k3@negative": k3[2],
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-12)
    assert "mismatch/k1@4-15" not in found


def test_the_stored_log_probs_are_the_sampler_s_if_there_are_no_others() -> None:
    both = columns_of([[1]], old_log_prob=[[-1.0]], log_prob=[[-1.5]])
    assert measure(both)["mismatch/k1"] == pytest.approx(0.5)
    alone = measure(columns_of([[1]], old_log_prob=[[-1.0]]))
    assert not any(name.startswith("mismatch") for name in alone)


# ------------------------------------------------------------------ surprisal


def test_surprisal_minus_entropy_is_0_for_samples_of_the_distribution() -> None:
    """Every token of p = (1/2, 1/4, 1/8, 1/8), as often as it is drawn: no noise, the expectation itself."""
    drawn = [LN2] * 4 + [2 * LN2] * 2 + [3 * LN2] * 2
    entropy = [1.75 * LN2] * 8
    found = measure(columns_of([[1] * 8, [1] * 8], log_prob=[[-x for x in drawn]] * 2, entropy=[entropy] * 2))
    assert found["surprisal/gap"] == pytest.approx(0, abs=1e-12)
    assert found["surprisal/entropy"] == pytest.approx(1.75 * LN2)
    # of a sampler that keeps the first two: surprisals ln 2 and 2 ln 2, as 2 to 1
    kept = measure(columns_of([[1] * 3], log_prob=[[-LN2, -LN2, -2 * LN2]], entropy=[[1.75 * LN2] * 3]))
    assert kept["surprisal/gap"] == pytest.approx((4 / 3 - 1.75) * LN2)


def test_surprisal_s_error_and_parts() -> None:
    mask = [[1, 0, 1], [1, 0, 1]]  # two turns of one token
    found = measure(
        columns_of(mask, log_prob=[[-1.0, 0, -3.0], [-2.0, 0, -6.0]], entropy=[[1.0, 0, 1.0], [1.0, 0, 1.0]])
    )
    assert found["surprisal/gap"] == 2.0  # 0, 2 | 1, 5
    assert found["surprisal/error"] == pytest.approx(math.sqrt(2 * (4 + 4)) / 4)
    assert (found["surprisal/gap@turn0"], found["surprisal/gap@turn1"]) == (0.5, 3.5)
    assert (found["surprisal/gap@0"], found["surprisal/gap@1-3"]) == (0.5, 3.5)


# ------------------------------------------------------------------ drift, clipping, KL


def test_drift_and_clipped_tokens() -> None:
    """Ratios of now to then: 1.5, 1.1 (up), 0.5, 2 (down) and 1 without a sign."""
    ratios = [[1.5, 1.1], [0.5, 2.0], [1.0, 1.0]]
    now = [[math.log(r) - 1 for r in row] for row in ratios]
    found = measure(
        columns_of(
            [[1, 1]] * 3, log_prob=now, old_log_prob=[[-1.0, -1.0]] * 3,
            advantage=[[1.0, 1.0], [-1.0, -1.0], [0.0, 0.0]],
        ),
        clip_low=0.2,
        clip_high=0.6,
    )  # fmt: skip
    assert found["clipped/outside"] == pytest.approx(2 / 6)
    assert (found["clipped/positive"], found["clipped/negative"]) == (0.0, 0.5)
    tight = measure(
        columns_of([[1, 1]], log_prob=now[:1], old_log_prob=[[-1.0, -1.0]], advantage=[[1.0, 1.0]]), clip_high=0.3
    )
    assert (tight["clipped/positive"], tight["drift/max_abs"]) == (0.5, pytest.approx(math.log(1.5)))
    assert found["drift/mean"] == pytest.approx((math.log(1.5) + math.log(1.1)) / 6)


def test_k1_against_the_exact_kl() -> None:
    found = measure(
        columns_of(
            [[1, 1], [1, 1]], log_prob=[[-1.0, -2.0], [-1.0, -2.0]], ref_log_prob=[[-2.0, -2.5], [-1.0, -1.0]],
            kl=[[0.5, 0.5], [0.25, 0.25]],
        )
    )  # fmt: skip
    assert found["kl/k1"] == pytest.approx((1 + 0.5 + 0 - 1) / 4)
    assert found["kl/exact"] == pytest.approx(0.375)
    assert found["kl/exact@1-3"] == pytest.approx(0.375)
    assert found["kl/k1_minus_exact"] == pytest.approx(0.125 - 0.375)
    # deviations from -0.25: 0.75, 0.25 | 0, -1: sums 1 and -1
    assert found["kl/k1_minus_exact_error"] == pytest.approx(math.sqrt(max(2 * 2, 0.5625 + 0.0625 + 1)) / 4)
    assert found["kl/k3"] == pytest.approx((math.exp(-1) - 1 + 1 + math.exp(-0.5) - 1 + 0.5 + 0 + math.e - 1 - 1) / 4)


def test_worst_tokens() -> None:
    columns = columns_of([[1, 1], [1, 0]], kl=[[0.1, 3.0], [2.0, 9.0]])
    assert worst_tokens(columns, most=2) == [
        {"sequence": 0, "position": 2, "token": 2, "kl": 3.0},
        {"sequence": 1, "position": 1, "token": 1, "kl": 2.0},
    ]
    assert worst_tokens(columns_of([[1]])) == []


# ------------------------------------------------------------------ masks, numbers, answers


def test_mask_and_numbers() -> None:
    found = measure(columns_of([[1, 0, 1], [0]], ref_log_prob=[[0.0, 0.0, NAN], [0.0]]))
    assert found["mask/coverage"] == pytest.approx(2 / 6)
    assert found["mask/empty_sequences"] == 0.5
    assert (found["nan/ref_log_prob"], found["zeros/ref_log_prob"]) == (0.5, 0.5)


def test_tokens_that_a_sampler_did_not_score_are_no_nan() -> None:
    inf = float("inf")
    found = measure(columns_of([[1, 1, 1, 1]], sampler_log_prob=[[NAN, -1.0, -inf, -2.0]]))
    assert (found["mask/not_recorded"], found["nan/sampler_log_prob"]) == (0.25, 0.25)


def test_answers_and_groups() -> None:
    """Four prompts; one has four answers instead of two, and one group has equal rewards."""
    rewards = f64([1, 0, 1, 1, 0, 1, 0, 2, 3, 4])
    columns = columns_of([[1, 1]] * 9 + [[1]], rows={"reward": rewards})
    columns = TokenColumns(
        columns.tokens, columns.mask, rows=columns.rows, prompts=torch.tensor([0, 0, 1, 1, 2, 2, 2, 2, 3, 3])
    )
    found = measure(columns, end=[1])  # tokens are 0, 1, 2 and once 0, 1
    assert found["groups/number"] == 4
    assert found["groups/duplicated_prompts"] == 0.25
    assert found["groups/without_spread"] == 0.25
    assert found["answers/at_limit"] == 0.9
    assert found["answers/length"] == 1.9
    assert measure(columns, end=[7])["answers/truncated"] == 1.0
    assert found["answers/truncated"] == 0.0  # the token before the last one may end the answer too


def test_decoded_and_encoded_again() -> None:
    """ "a" and "b" apart are one token when encoded; "ab" as one token stays."""
    tokenizer = make_tokenizer()
    a, b, x = tokenizer.convert_tokens_to_ids(["a", "b", "x"])
    whole = tokenizer.convert_tokens_to_ids("ab")
    tokens = Ragged.from_list([torch.tensor([x, x, a, b, x]), torch.tensor([x, whole, x])])
    found = retokenised(TokenColumns(tokens, tokens.positions > 0), tokenizer)
    assert found == {"retokenised/tokens": 3 / 6, "retokenised/answers": 0.5, "retokenised/first": 1.0}
