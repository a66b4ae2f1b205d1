"""Lengths and tokens that do not belong together: the error names the first difference, and the data is unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bad_input_cases import FORMS, GEN, REF, SCORING, Models, assert_refused, build, columns_of, histories, ids
from torchrl_llm_kl import KLComputation, RetrieveKL
from toy_rollouts import make_model, make_scoring_wrapper
from toy_tokenizer import CHATML, build_tokenizer

SHOUTING = CHATML.replace("message['content']", "message['content'] | upper")


@pytest.fixture(scope="module")
def models(tokenizer: Any, policy_model: Any, ref_model: Any) -> Models:
    return Models(tokenizer, policy_model, ref_model)


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return request.param


# ------------------------------------------------------------------ lengths


def longer(rows: list[list[float]], row: int) -> list[list[float]]:
    return [[*r, -9.0] if i == row else r for i, r in enumerate(rows)]


@pytest.mark.parametrize("side", ["gen", "ref"])
def test_lengths_differ_between_the_models(side: str, form: str) -> None:
    columns = columns_of(form, **{side: longer(GEN if side == "gen" else REF, 1)})
    data = build(form, columns)
    a, b = ((7, 6) if side == "gen" else (6, 7)) if form != "padded" else ((8, 7) if side == "gen" else (7, 8))
    row = 0 if form == "padded" else 1
    shapes = f"Sample {row} has different shapes", f"shape=torch.Size([{a}])", f"shape=torch.Size([{b}])"
    with assert_refused(ValueError, data, *shapes, f"From position {min(a, b)} on", "score the same tokens"):
        KLComputation()(data)


def test_lengths_differ_between_padded_and_nested() -> None:
    """By the mask of the padded entry sequence 1 has 6 tokens; the nested one has 5."""
    columns = columns_of("padded")
    columns["next", "ref_log_probs", "full"] = [torch.zeros(5), torch.zeros(5)]
    data = build("padded", columns)
    with assert_refused(ValueError, data, "Sample 1", "torch.Size([6])", "torch.Size([5])", "From position 5 on"):
        KLComputation()(data)


@pytest.mark.parametrize("longer_by", [1, -1])
def test_old_log_probs_of_another_length(longer_by: int, form: str) -> None:
    columns = columns_of(form)
    gen = columns["log_probs", "full"]
    if form == "padded":
        old = torch.zeros(2, gen.shape[1] + longer_by)
        found, expected = old.shape[1], gen.shape[1]
    else:
        old = [torch.zeros(5), torch.zeros(6 + longer_by)]
        found, expected = 6 + longer_by, 6
    data = build(form, {**columns, ("old", "full"): old})
    with assert_refused(ValueError, data, "('old', 'full')", str(found), str(expected), "same tokens"):
        KLComputation(estimator="corrected_k3", old_log_probs_key=("old", "full"))(data)


def test_old_log_probs_that_only_add_up(form: str) -> None:
    """Rows of 6 and 5 where 5 and 6 belong: the same total, each number at the wrong token."""
    if form == "padded":
        pytest.skip("padded rows have one length")
    data = build(form, {**columns_of(form), ("old", "full"): [torch.zeros(6), torch.zeros(5)]})
    with assert_refused(ValueError, data, "('old', 'full')", "Sample 0", "6", "5"):
        KLComputation(estimator="corrected_k3", old_log_probs_key=("old", "full"))(data)


def test_log_probs_of_the_policy_of_another_length(models: Models, form: str) -> None:
    data = build(form, columns_of(form, gen=longer(GEN, 1)))
    sizes = ("[8]", "[7]") if form == "padded" else ("[7]", "[6]")
    with assert_refused(ValueError, data, "Sample", *(f"torch.Size({s})" for s in sizes), "score the same tokens"):
        models.make("KLRewardTransform")(data)


def test_more_sampled_log_probs_than_tokens(models: Models, form: str) -> None:
    columns = columns_of(form)
    del columns["log_probs", "full"]
    response = torch.full((2, 9), -1.0) if form == "padded" else [torch.full((2,), -1.0), torch.full((9,), -1.0)]
    data = build(form, {**columns, ("log_probs", "response"): response})
    row, tokens = (0, 7) if form == "padded" else (1, 6)
    with assert_refused(
        ValueError, data, f"sequence {row} has 9 log-probs", "('log_probs', 'response')", f"but {tokens} tokens"
    ):
        models.make("KLRewardTransform")(data)


@pytest.mark.parametrize("name", SCORING)
def test_attention_mask_of_another_length(models: Models, name: str, form: str) -> None:
    columns = columns_of(form)
    wrong = torch.ones(2, 4) if form == "padded" else [torch.ones(5), torch.ones(4)]
    wrong = wrong.bool() if form == "padded" else [row.bool() for row in wrong]
    columns["masks", "all_attention_mask"] = wrong
    data = build(form, columns)
    row, width = (0, 7) if form == "padded" else (1, 6)
    with assert_refused(ValueError, data, "('masks', 'all_attention_mask')", f"sequence {row}", "4", str(width)):
        models.make(name)(data)


@pytest.mark.parametrize("name", SCORING)
def test_assistant_mask_of_another_length(models: Models, name: str, form: str) -> None:
    wrong = torch.ones(2, 4).bool() if form == "padded" else [torch.ones(5).bool(), torch.ones(4).bool()]
    data = build(form, {**columns_of(form), ("masks", "all_assistant_mask"): wrong})
    found, expected = ("[4, 4]", "[7, 7]") if form == "padded" else ("[5, 4]", "[5, 6]")
    with assert_refused(ValueError, data, "('masks', 'all_assistant_mask')", found, expected):
        models.make(name)(data)


@pytest.mark.parametrize("name", SCORING)
def test_prompt_longer_than_the_whole(models: Models, name: str, form: str) -> None:
    prompt = torch.ones(2, 9, dtype=torch.long) if form == "padded" else ids([[7, 8, 9], [1] * 9])
    data = build(form, {**columns_of(form), ("tokens", "prompt"): prompt})
    row, whole = (0, 7) if form == "padded" else (1, 6)
    with assert_refused(
        ValueError, data, f"sequence {row}", "has 9 tokens", str(whole), "pass both from the same step"
    ):
        models.make(name)(data)


@pytest.mark.parametrize("name", SCORING)
def test_prompt_of_another_sequence(models: Models, name: str, form: str) -> None:
    columns = columns_of(form)
    prompt = torch.tensor([[7, 8, 9], [0, 10, 99]]) if form == "padded" else ids([[7, 8, 9], [10, 99]])
    data = build(form, {**columns, ("tokens", "prompt"): prompt})
    where = f"sequence 1, position {2 if form == 'padded' else 1}"
    with assert_refused(ValueError, data, where, "does not start with ('tokens', 'prompt')", "pad token"):
        models.make(name)(data)


@pytest.mark.parametrize("name", [*SCORING[1:], "KLComputation"])
def test_reward_of_another_length(models: Models, name: str, form: str) -> None:
    if form == "padded":
        reward, found, expected = torch.ones(2, 5, 1), "(2, 5, 1)", "[7, 7]"
    else:
        reward, found, expected = [torch.ones(5, 1), torch.ones(4, 1)], "[5, 4]", "[5, 6]"
    data = build(form, {**columns_of(form), ("next", "reward"): reward})
    with assert_refused(ValueError, data, f"The rewards have shape {found}", expected, "[*B, T, 1]"):
        models.make(name)(data)


@pytest.mark.parametrize("form", ["nested", "lazy"])
def test_an_outcome_without_a_token_to_hold_it(form: str) -> None:
    rows = [torch.tensor([-1.0]), torch.zeros(0)]
    columns = {("log_probs", "full"): rows, ("ref_log_probs", "full"): rows}
    data = build(form, {**columns, "reward": torch.tensor([1.0, -2.5])})
    with assert_refused(ValueError, data, "sequence 1 has no token to hold its reward of -2.5", "drop empty sequences"):
        KLComputation()(data)
    out = KLComputation()(build(form, {**columns, "reward": torch.tensor([1.0, 0.0])}))
    assert [row.reshape(-1).tolist() for row in out.get("reward", as_list=True)] == [[1.0], []]


# ------------------------------------------------------------------ different tokens


@pytest.mark.parametrize("pad_output", [True, False])
def test_two_templates(models: Models, pad_output: bool) -> None:
    options = {"input_mode": "history", "pad_output": pad_output}
    gen = models.wrapper(models.gen, "gen_log_probs", chat_template=CHATML, **options)
    ref = models.wrapper(models.ref, "ref_log_probs", chat_template=SHOUTING, **options)
    data = histories()
    small, capital = (models.tokenizer.convert_tokens_to_ids(c) for c in "hH")
    # "<|im_start|>", "u", "s", "e", "r", "\n", then "hi" or "HI"
    found = "sequence 0, position 6", f"[{small}, ", f"[{capital}, "
    with assert_refused(ValueError, data, "different tokens", *found, "same tokenizer and chat template"):
        RetrieveKL(gen, ref)(data)


def test_two_tokenizers(models: Models) -> None:
    other = build_tokenizer(pad_token="<|pad|>", merges=[("h", "i")])
    gen = models.wrapper(models.gen, "gen_log_probs", input_mode="history")
    model = make_model(other, seed=1)
    ref = make_scoring_wrapper(model, other, pad_output=True, input_mode="history", log_probs_key="ref_log_probs")
    data = histories()
    # "<|im_start|>" has another id where a merge comes before it
    with assert_refused(ValueError, data, "sequence 0, position 0", "258", "259", "same tokenizer"):
        RetrieveKL(gen, ref)(data)
