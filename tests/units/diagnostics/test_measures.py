"""Columns of a batch in every layout, their scores equal to a plain forward; measures by hand, in float64."""

import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from seeded import columns_of, make_tokenizer
from torchrl_llm_kl import Ragged
from torchrl_llm_kl.diagnostics import TokenColumns, measure, read_columns
from torchrl_llm_kl.diagnostics._measures import clustered_mean, retokenised, worst_tokens
from toy_models import tiny_model

NAN, INF, LN2 = math.nan, math.inf, math.log(2)
f64 = partial(torch.tensor, dtype=torch.float64)
FULL = torch.tensor([[3, 4, 5, 6, 7], [3, 4, 8, 9, 0]])
REAL = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]).bool()
ASSISTANT = torch.tensor([[0, 1, 0, 1, 1], [0, 0, 1, 1, 0]]).bool()


def batch(*, masks: bool = True) -> TensorDict:
    """Two answers to one prompt. The first answer has two turns."""
    td = TensorDict(tokens=TensorDict(prompt=FULL[:, :1], full=FULL, batch_size=[2]), batch_size=[2])
    td["next", "reward"] = torch.tensor([[1.0], [0.5]])
    if masks:
        td["masks"] = TensorDict(all_attention_mask=REAL, all_assistant_mask=ASSISTANT, batch_size=[2])
    return td


def test_turns_places_advantages_and_the_first_zero_of_an_engine() -> None:
    td = batch().set("advantage", torch.tensor([2.0, -1.0]))
    td["log_probs", "full"] = torch.tensor([[0.0, 0.0, -2, -3, -4], [0.0, 0.0, 0.0, -7, 0]])
    columns = read_columns(td)
    assert columns.turns.tolist() == [-1, 0, -1, 1, 1, -1, -1, 0, 0]
    assert columns.places.tolist() == [-1, 0, -1, 1, 2, -1, -1, 0, 1]
    assert columns.rows["reward"].tolist() == [1.0, 0.5]
    assert columns.prompts.tolist() == [0, 0]
    assert columns.columns["advantage"][columns.mask].tolist() == [2.0, 2.0, 2.0, -1.0, -1.0]
    # The zero that the engine stores for the first token becomes NaN.
    assert columns.columns["sampler_log_prob"][columns.mask].isnan().tolist() == [True, False, False, True, False]
    # Each sequence starts a turn of its own, even if the mask continues over the border.
    assert read_columns(batch(masks=False)).turns.tolist() == [-1, 0, 0, 0, 0, -1, 0, 0, 0, 0]
    with pytest.raises(KeyError, match="no column"):
        read_columns(batch(), keys={"log_probs": "x"})


@pytest.mark.parametrize("nested", [False, True])
def test_log_probs_of_engine_and_transform_are_kept_apart(nested: bool) -> None:
    td, own = batch(), torch.tensor([[0.0, -1, -2, -3, -4], [0.0, -5, -6, -7, 0]])
    entries = {("next", "log_probs", "full"): own, ("log_probs", "full"): own * 2}
    if nested:
        td, entries["tokens", "full"] = TensorDict(batch_size=[2]), FULL
        entries = {key: torch.nested.nested_tensor([rows[0], rows[1, :4]]) for key, rows in entries.items()}
        entries["tokens", "prompt"] = torch.nested.nested_tensor([FULL[0, :1], FULL[1, :1]])
    for key, value in entries.items():
        td[key] = value
    columns = read_columns(td, scope="turn")
    expected = torch.tensor([0.0, -1, -2, -3, -4, 0, -5, -6, -7])[columns.mask]
    assert torch.equal(columns.columns["old_log_prob"][columns.mask], expected)
    assert torch.equal(columns.columns["sampler_log_prob"][columns.mask], 2 * expected)


def test_models_give_log_prob_entropy_and_the_exact_kl() -> None:
    policy, reference = tiny_model(seed=0).double(), tiny_model(seed=1).double()
    columns = read_columns(batch(), policy=policy, reference=reference, temperature=0.7)
    rows = (FULL[0], FULL[1, :4])
    logits = ([model(input_ids=ids[None]).logits[0, :-1].detach() for ids in rows] for model in (policy, reference))
    p, q = ((torch.cat(each) / 0.7).log_softmax(-1) for each in logits)
    drawn = torch.arange(len(p)), torch.cat([ids[1:] for ids in rows])
    expected = {"log_prob": p[drawn], "ref_log_prob": q[drawn]}
    expected |= {"entropy": -(p.exp() * p).sum(-1), "kl": (p.exp() * (p - q)).sum(-1)}
    after_the_first = columns.tokens.positions > 0
    for name, values in expected.items():
        found = columns.columns[name]
        wanted = values.to(found.dtype)[columns.mask[after_the_first]]
        torch.testing.assert_close(found[columns.mask], wanted, rtol=1e-5, atol=1e-6)
        assert bool(found[~columns.mask].isnan().all())
    assert "advantage" not in columns.columns


def test_clustered_error_by_hand() -> None:
    """The deviations of three sequences add up to -2, 0 and 2, so the variance is 3/2 * 8 / 6**2. Single tokens bound it."""
    found = clustered_mean(f64([0, 0, 1, 1, 2, 2]), torch.tensor([3, 3, 5, 5, 9, 9]))
    assert (found.value, found.error, found.count) == (1.0, pytest.approx(math.sqrt(1.5 * 8) / 6), 6)
    # Within each sequence deviations cancel: the clustered error alone would be 0.
    found = clustered_mean(f64([-1, 1, 1, -1]), torch.tensor([0, 0, 1, 1]))
    assert found.error == pytest.approx(math.sqrt(4) / 4)
    found = clustered_mean(f64([1, 2]), torch.tensor([0, 0]))  # one sequence has no error
    assert (found.value, found.z, math.isnan(found.error)) == (1.5, 0.0, True)
    assert math.isnan(clustered_mean(f64([]), torch.tensor([])).value)


def test_standard_scores_are_those_of_student_s_t() -> None:
    """Two-sided 5% and 0.1% points of Student's t (tables), and of the normal distribution."""
    points = [(5, 2.571, 1.960), (10, 2.228, 1.960), (30, 2.042, 1.960), (10, 4.587, 3.291), (30, 3.646, 3.291)]
    for (degrees, t, z), sign in itertools.product(points, (1, -1)):
        values = torch.linspace(-1, 1, degrees + 1, dtype=torch.float64)
        shift = t * clustered_mean(values, torch.arange(degrees + 1)).error
        found = clustered_mean(sign * (values + shift), torch.arange(degrees + 1))
        assert found.z == pytest.approx(sign * z, abs=0.02), (degrees, t)


#: Ratios of trainer to sampler: 2, 1/2 | 4, and a token that the sampler did not score.
SAMPLER, TRAINER = [[-2.0, -1.0], [-3.0, NAN]], [[-2.0 + LN2, -1.0 - LN2], [-3.0 + 2 * LN2, -1.0]]
K3 = [2 - 1 - LN2, 0.5 - 1 + LN2, 4 - 1 - 2 * LN2]
#: Each token of p = (1/2, 1/4, 1/8, 1/8) as often as its probability says, so that the mean is the expectation.
DRAWN = [-LN2] * 4 + [-2 * LN2] * 2 + [-3 * LN2] * 2
#: Ratios of new to old: 1.5 and 1.1 with advantage 1, 0.5 and 2 with advantage -1, and 1 with advantage 0.
NOW = [[math.log(r) - 1 for r in row] for row in ([1.5, 1.1], [0.5, 2.0], [1.0, 1.0])]
ONE, TWO, PAIR = [[1]], [[1, 1]], [[1, 1]] * 2
#: Gaps of two sequences with two turns of one token each: 0, 2 | 1, 5.
TURNS = {"log_prob": [[-1.0, 0, -3.0], [-2.0, 0, -6.0]], "entropy": [[1.0, 0, 1.0]] * 2}
UP, SIGNS = [[1.0, 1.0]], [[1.0, 1.0], [-1.0, -1.0], [0.0, 0.0]]
KLS = {"log_prob": [[-1.0, -2.0]] * 2, "ref_log_prob": [[-2.0, -2.5], [-1.0, -1.0]], "kl": [[0.5, 0.5], [0.25, 0.25]]}
#: Name -> mask, columns, arguments.
BATCHES: dict[str, tuple[list[list[int]], dict[str, Any], dict[str, float]]] = {
    "mismatch": (PAIR, {"sampler_log_prob": SAMPLER, "old_log_prob": TRAINER, "advantage": SIGNS[:2]}, {}),
    "the sampler's": (ONE, {"old_log_prob": [[-1.0]], "log_prob": [[-1.5]]}, {}),
    "nothing beside": (ONE, {"old_log_prob": [[-1.0]]}, {}),
    "drawn": ([[1] * 8] * 2, {"log_prob": [DRAWN] * 2, "entropy": [[1.75 * LN2] * 8] * 2}, {}),
    "truncated": ([[1] * 3], {"log_prob": [[-LN2, -LN2, -2 * LN2]], "entropy": [[1.75 * LN2] * 3]}, {}),
    "turns": ([[1, 0, 1]] * 2, TURNS, {}),
    "drift": (TWO * 3, {"log_prob": NOW, "old_log_prob": [[-1.0] * 2] * 3, "advantage": SIGNS}, {"clip_high": 0.6}),
    "tight": (TWO, {"log_prob": NOW[:1], "old_log_prob": [[-1.0, -1.0]], "advantage": UP}, {"clip_high": 0.3}),
    "KL": (PAIR, KLS, {}),
    "masks": ([[1, 0, 1], [0]], {"ref_log_prob": [[0.0, 0.0, NAN], [0.0]]}, {}),
    "not recorded": ([[1] * 4], {"sampler_log_prob": [[NAN, -1.0, -INF, -2.0]]}, {}),
}
#: Name -> expected measures. None: the measure is missing.
MEASURED: dict[str, dict[str, float | None]] = {
    "mismatch": {
        **{"mismatch/k1": -2 * LN2 / 3, "mismatch/k3": sum(K3) / 3, "mismatch/ratio": 6.5 / 3},
        **{"mismatch/rms": LN2 * math.sqrt(6 / 3), "mismatch/max_abs": 2 * LN2},
        "mismatch/ess_token": (6.5 / 3) ** 2 / ((4 + 0.25 + 16) / 3),
        "mismatch/ess_seq": (5 / 2) ** 2 / ((1 + 16) / 2),
        "mismatch/chi2_token": (4 + 0.25 + 16) / 3 - 1,
        "mismatch/chi2_seq": (1 + 16) / 2 - 1,
        "mismatch/ppl_ratio": (1 + 1 / 4) / 2,
        "mismatch/k1@0": -3 * LN2 / 2,
        "mismatch/k1@1-3": LN2,
        "mismatch/k3@positive": (K3[0] + K3[1]) / 2,
        "mismatch/k3@negative": K3[2],
        "mismatch/k1@4-15": None,
    },
    # Stored log-probs count as the sampler's if it has no column. Without the policy's there is nothing to compare.
    "the sampler's": {"mismatch/k1": 0.5},
    "nothing beside": {"mismatch/k1": None, "mismatch/rms": None},
    "drawn": {"surprisal/gap": 0, "surprisal/entropy": 1.75 * LN2},
    # The sampler keeps the first two tokens. Their surprisals are ln 2 and 2 ln 2, drawn 2 to 1.
    "truncated": {"surprisal/gap": (4 / 3 - 1.75) * LN2},
    "turns": {
        "surprisal/gap": 2.0,
        "surprisal/error": math.sqrt(2 * (4 + 4)) / 4,
        **{"surprisal/gap@turn0": 0.5, "surprisal/gap@turn1": 3.5, "surprisal/gap@0": 0.5, "surprisal/gap@1-3": 3.5},
    },
    "drift": {
        **{"clipped/outside": 2 / 6, "clipped/positive": 0.0, "clipped/negative": 0.5},
        "drift/mean": (math.log(1.5) + math.log(1.1)) / 6,
    },
    "tight": {"clipped/positive": 0.5, "drift/max_abs": math.log(1.5)},
    "KL": {
        "kl/k1": (1 + 0.5 + 0 - 1) / 4,
        "kl/exact": 0.375,
        "kl/exact@1-3": 0.375,
        "kl/k1_minus_exact": 0.125 - 0.375,
        # Deviations from -0.25: 0.75, 0.25 | 0, -1: sums 1 and -1.
        "kl/k1_minus_exact_error": math.sqrt(max(2 * 2, 0.5625 + 0.0625 + 1)) / 4,
        "kl/k3": (math.exp(-1) - 1 + 1 + math.exp(-0.5) - 1 + 0.5 + 0 + math.e - 1 - 1) / 4,
    },
    "masks": {"mask/coverage": 1 / 3, "mask/empty_sequences": 0.5, "nan/ref_log_prob": 0.5, "zeros/ref_log_prob": 0.5},
    "not recorded": {"mask/not_recorded": 0.25, "nan/sampler_log_prob": 0.25},  # only the infinity
}


@pytest.mark.parametrize("name", BATCHES)
def test_measures_by_hand(name: str) -> None:
    (mask, columns, settings), expected = BATCHES[name], MEASURED[name]
    found = measure(columns_of(mask, **columns), **settings)
    numbers = {key: value for key, value in expected.items() if value is not None}
    assert {key: found[key] for key in numbers} == pytest.approx(numbers, rel=1e-12, abs=1e-12)
    assert not (expected.keys() - numbers.keys()) & found.keys()


def test_worst_tokens() -> None:
    columns = columns_of([[1, 1], [1, 0]], kl=[[0.1, 3.0], [2.0, 9.0]])
    first = {"sequence": 0, "position": 2, "token": 2, "kl": 3.0}
    worst = [first, {"sequence": 1, "position": 1, "token": 1, "kl": 2.0}]
    assert worst_tokens(columns, most=2) == worst
    assert worst_tokens(columns_of([[1]])) == []


def test_answers_and_groups() -> None:
    """One of four prompts has four answers instead of two, and one group has equal rewards."""
    made = columns_of([[1, 1]] * 9 + [[1]], rows={"reward": f64([1, 0, 1, 1, 0, 1, 0, 2, 3, 4])})
    prompts = torch.tensor([0, 0, 1, 1, 2, 2, 2, 2, 3, 3])
    columns = TokenColumns(made.tokens, made.mask, rows=made.rows, prompts=prompts)
    found = measure(columns, end=[1])  # tokens are 0, 1, 2 and once 0, 1
    expected = {"groups/number": 4, "groups/duplicated_prompts": 0.25, "groups/without_spread": 0.25}
    # The token before the last one may end the answer too.
    expected |= {"answers/at_limit": 0.9, "answers/length": 1.9, "answers/truncated": 0.0}
    assert {name: found[name] for name in expected} == expected
    assert measure(columns, end=[7])["answers/truncated"] == 1.0


def test_the_share_of_tokens_that_change_when_encoded_again() -> None:
    """The tokens "a" and "b" become one token when they are encoded again. The token "ab" does not change."""
    tokenizer = make_tokenizer()
    a, b, x, whole = tokenizer.convert_tokens_to_ids(["a", "b", "x", "ab"])
    tokens = Ragged.from_list([torch.tensor([x, x, a, b, x]), torch.tensor([x, whole, x])])
    found = retokenised(TokenColumns(tokens, tokens.positions > 0), tokenizer)
    assert found == {"retokenised/tokens": 3 / 6, "retokenised/answers": 0.5, "retokenised/first": 1.0}
