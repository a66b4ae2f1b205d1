"""Numbers, masks, models and tokenizers that cannot be used: the error names the change to make, and the data is unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bad_input_cases import (
    FORMS,
    GEN,
    REF,
    RESPONSES,
    SCORING,
    Models,
    assert_refused,
    build,
    columns_of,
    full,
    histories,
    masks,
    split,
)
from torchrl_llm_kl import KLComputation, KLRewardTransform, RetrieveKL, RetrieveLogProb
from toy_rollouts import make_model, make_policy, make_scoring_wrapper
from toy_tokenizer import CHATML, build_tokenizer


@pytest.fixture(scope="module")
def models(tokenizer: Any, policy_model: Any, ref_model: Any) -> Models:
    return Models(tokenizer, policy_model, ref_model)


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return request.param


# ------------------------------------------------------------------ NaN and infinite log-probs


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("side", ["gen", "ref"])
def test_log_probs_to_compare_that_are_not_finite(side: str, bad: float, form: str) -> None:
    rows = [list(row) for row in (GEN if side == "gen" else REF)]
    rows[1][4] = bad
    data = build(form, columns_of(form, **{side: rows}))
    who = "the policy under ('log_probs', 'full')" if side == "gen" else "the reference under ('ref_log_probs', 'full')"
    with assert_refused(ValueError, data, who, f"is {bad} at sequence 1, position 4", "check the model's weights"):
        KLComputation()(data)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf])
def test_an_infinite_log_prob_is_no_marker(bad: float, form: str) -> None:
    """A sequence may begin with NaN ("not scored"), not with infinity."""
    data = build(form, columns_of(form, gen=[GEN[0], [bad, *GEN[1][1:]]]))
    with assert_refused(ValueError, data, "the policy", f"is {bad} at sequence 1, position 0"):
        KLComputation()(data)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_log_probs_of_the_policy_that_are_not_finite(models: Models, bad: float, form: str) -> None:
    rows = [list(row) for row in GEN]
    rows[1][2] = bad
    data = build(form, columns_of(form, gen=rows))
    where = f"is {bad} at sequence 1, position 2"
    with assert_refused(ValueError, data, "the policy under ('log_probs', 'full')", where, "check the model's weights"):
        models.make("KLRewardTransform")(data)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("at", [0, 2])
def test_sampled_log_probs_that_are_not_finite(models: Models, bad: float, at: int, form: str) -> None:
    columns = columns_of(form)
    del columns["log_probs", "full"]
    responses = [torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -2.0, -3.0, -4.0])]
    responses[1][at] = bad
    response = pad_sequence(responses, batch_first=True) if form == "padded" else responses
    data = build(form, {**columns, ("log_probs", "response"): response})
    where = f"is {bad} at sequence 1, position {2 + at}"
    with assert_refused(
        ValueError, data, "the policy under ('log_probs', 'response')", where, "check the model's weights"
    ):
        models.make("KLRewardTransform")(data)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_old_log_probs_that_are_not_finite(bad: float, form: str) -> None:
    rows = [list(row) for row in GEN]
    rows[1][3] = bad
    old = full(*split(rows), form, fill=0.0)
    data = build(form, {**columns_of(form), ("old", "full"): old})
    with assert_refused(ValueError, data, "('old', 'full')", f"is {bad} at sequence 1, position 3"):
        KLComputation(estimator="corrected_k3", old_log_probs_key=("old", "full"))(data)


@pytest.mark.parametrize("name", SCORING)
def test_models_that_give_no_finite_log_prob(models: Models, name: str, form: str) -> None:
    broken = make_model(models.tokenizer, seed=2, tie_word_embeddings=False)
    forbidden = RESPONSES[1][2]
    bias = torch.zeros(len(models.tokenizer))
    bias[forbidden] = -torch.inf

    class Forbids(torch.nn.Module):
        def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Any:
            out = broken(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids)
            return (out.logits + bias,)

    data = build(form, columns_of(form))
    where = f"log-prob is -inf at sequence 1, position 4 (token {forbidden})"
    with pytest.warns(UserWarning, match="full forward"):
        transform = models.make(name, ref=Forbids())
    with assert_refused(ValueError, data, where, "Mask the token"):
        transform(data)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["KLRewardTransform", "KLComputation"])
def test_defect_37_padding_may_hold_anything(models: Models, name: str, bad: float) -> None:
    columns = columns_of("padded")
    for key in (("log_probs", "full"), ("next", "ref_log_probs", "full")):
        columns[key][0, 5:] = bad
        columns[key][1, 0] = bad
    found = models.make(name)(build("padded", columns))["next"]
    assert found["reward"].isfinite().all()
    kl = found["kl_penalty"].reshape(2, 7)
    assert (kl[0, 5:] == 0).all()
    assert kl[1, 0] == 0


# ------------------------------------------------------------------ empty masks


@pytest.mark.parametrize("name", SCORING)
@pytest.mark.parametrize("with_prompt", [True, False])
def test_a_mask_without_assistant_tokens(models: Models, name: str, with_prompt: bool, form: str) -> None:
    columns = columns_of(form)
    if not with_prompt:
        del columns["tokens", "prompt"]
    columns["masks", "all_assistant_mask"] = masks(form, [[0, 0, 0, 1, 1], [0] * 6])
    data = build(form, columns)
    wrappers = {
        side: models.wrapper(getattr(models, side), f"{side}_log_probs", chat_template=CHATML)
        for side in ("gen", "ref")
    }
    template = repr(CHATML[:60])
    found = "sequence 1", "('masks', 'all_assistant_mask')", template
    with assert_refused(ValueError, data, *found, "False everywhere", "Remove the mask", "assistant_only=False"):
        models.make(name, **wrappers)(data)


@pytest.mark.parametrize("name", SCORING)
def test_nothing_says_what_the_assistant_wrote(models: Models, name: str, form: str) -> None:
    columns = columns_of(form)
    del columns["tokens", "prompt"]
    data = build(form, columns)
    places = "('tokens', 'prompt')", "('masks', 'all_assistant_mask')"
    with assert_refused(ValueError, data, "cannot tell", *places, "Add one of them", "assistant_only=False"):
        models.make(name)(data)


# ------------------------------------------------------------------ too long


@pytest.mark.parametrize("name", SCORING)
def test_longer_than_the_models_positions(models: Models, name: str, form: str) -> None:
    short = make_model(models.tokenizer, seed=1)
    short.config.max_position_embeddings = 5
    data = build(form, columns_of(form))
    with assert_refused(
        ValueError, data, "sequence 1 has 6 tokens", "allows 5 positions", "truncate", "longer context"
    ):
        models.make(name, ref=short)(data)


@pytest.mark.parametrize("name", SCORING)
def test_a_token_outside_the_vocabulary(models: Models, name: str, form: str) -> None:
    columns = columns_of(form)
    columns["tokens", "full"][1][4] = 9999
    data = build(form, columns)
    position = 3 if form == "padded" else 4  # sequence 1 has one token of padding before its prompt
    with assert_refused(
        ValueError, data, f"token id 9999 at sequence 1, position {position}", "tokenizer of this model"
    ):
        models.make(name)(data)


# ------------------------------------------------------------------ models that do not fit


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (RetrieveLogProb, "The model must have `generate=False`"),
        (KLRewardTransform, "configured to generate text"),
        (lambda model: RetrieveKL(model, torch.nn.Identity()), "The generation model must have `generate=False`"),
        (lambda model: RetrieveKL("from_collector", model), "The reference model must have `generate=False`"),
    ],
    ids=["RetrieveLogProb", "KLRewardTransform", "RetrieveKL gen", "RetrieveKL ref"],
)
def test_models_that_generate(models: Models, padded: bool, make: Callable[..., Any], what: str) -> None:
    policy = make_policy(models.gen, models.tokenizer, pad_output=padded)
    with pytest.raises(ValueError, match=what):
        make(policy)


def test_pad_output_mismatch(models: Models, padded: bool) -> None:
    gen = models.wrapper(models.gen, "gen_log_probs", pad_output=padded)
    ref = models.wrapper(models.ref, "ref_log_probs", pad_output=not padded)
    found = f"pad_output mismatch: gen_model.pad_output={padded}, ref_model.pad_output={not padded}. Both models must"
    with pytest.raises(ValueError, match=found):
        RetrieveKL(gen, ref)


# ------------------------------------------------------------------ no template, no tokenizer


@pytest.mark.parametrize("name", ["RetrieveLogProb", "RetrieveKL"])
def test_a_tokenizer_without_a_template(models: Models, name: str, padded: bool) -> None:
    tokenizer = build_tokenizer(None, pad_token="<|pad|>")
    gen, ref = (
        make_scoring_wrapper(model, tokenizer, pad_output=padded, input_mode="history", log_probs_key=key)
        for model, key in ((models.gen, "gen_log_probs"), (models.ref, "ref_log_probs"))
    )
    data = histories()
    with assert_refused(ValueError, data, "toy", "chat template", "chat_template"):
        models.make(name, gen=gen, ref=ref)(data)


@pytest.mark.parametrize("name", ["RetrieveLogProb", "RetrieveKL"])
def test_no_tokenizer(models: Models, name: str, padded: bool) -> None:
    gen, ref = (
        models.wrapper(model, key, pad_output=padded, input_mode="history")
        for model, key in ((models.gen, "gen_log_probs"), (models.ref, "ref_log_probs"))
    )
    gen.tokenizer = ref.tokenizer = None
    data = histories()
    with assert_refused(ValueError, data, "tokenizer=None", "Pass `tokenizer=`"):
        models.make(name, gen=gen, ref=ref)(data)
