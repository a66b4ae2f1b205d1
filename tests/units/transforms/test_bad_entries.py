"""Entries that are missing, under another key, of another kind or empty: each is named, and the data left as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack

from bad_input_cases import FORMS, SCORING, Models, assert_refused, build, columns_of
from torchrl_llm_kl import KLComputation


@pytest.fixture(scope="module")
def models(tokenizer: Any, policy_model: Any, ref_model: Any) -> Models:
    return Models(tokenizer, policy_model, ref_model)


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("name", [*SCORING, "KLComputation"])
def test_the_data_of_these_tests_is_good(models: Models, name: str, form: str) -> None:
    """Without this every test of bad input (test_bad_*.py) could pass for another reason."""
    data = models.make(name)(build(form, columns_of(form)))
    key = ("next", "log_probs", "full") if name == "RetrieveLogProb" else ("next", "kl_penalty")
    assert data.get(key, as_list=True) is not None


# ------------------------------------------------------------------ missing and wrong keys


@pytest.mark.parametrize("name", SCORING)
def test_no_tokens(models: Models, name: str, form: str) -> None:
    columns = {k: v for k, v in columns_of(form).items() if k[0] != "tokens"}
    data = build(form, columns)
    with assert_refused(
        KeyError, data, "('tokens', 'full')", "found", "masks.all_attention_mask", "Run the policy first", "input_key"
    ):
        models.make(name)(data)


@pytest.mark.parametrize("name", SCORING)
def test_tokens_under_another_key(models: Models, name: str, form: str) -> None:
    gen, ref = (
        models.wrapper(model, key, input_key=("ids", "full"))
        for model, key in ((models.gen, "log_probs"), (models.ref, "ref_log_probs"))
    )
    data = build(form, columns_of(form))
    with assert_refused(KeyError, data, "('ids', 'full')", "found", "tokens.full", "input_key"):
        models.make(name, gen=gen, ref=ref)(data)


@pytest.mark.parametrize("missing", [("log_probs", "full"), ("next", "ref_log_probs", "full")])
def test_no_log_probs_to_compare(missing: Any, form: str) -> None:
    columns = columns_of(form)
    del columns[missing]
    data = build(form, columns)
    expected = "Log-probs not found. Expected keys: ('log_probs', 'full'), ('ref_log_probs', 'full')"
    found = f"Missing: {missing[-2:]}", "Found: ", "tokens.full", "in 'next': ", "reward"
    with assert_refused(ValueError, data, expected, *found, "Put RetrieveLogProb before"):
        KLComputation()(data)


@pytest.mark.parametrize("argument", ["gen_log_probs_full_key", "ref_log_probs_full_key"])
def test_log_probs_to_compare_under_another_key(argument: str, form: str) -> None:
    data = build(form, columns_of(form))
    with assert_refused(
        ValueError, data, "Missing: ('mine', 'full')", "Found: log_probs.full", "give the keys that hold them"
    ):
        KLComputation(**{argument: ("mine", "full")})(data)


@pytest.mark.parametrize("key", [("mine", "full"), "mine"])
def test_no_log_probs_of_the_policy(models: Models, key: Any, form: str) -> None:
    data = build(form, columns_of(form))
    with assert_refused(KeyError, data, repr(key), "found", "tokens.full", "return_log_probs=True", "RetrieveKL"):
        models.make("KLRewardTransform", log_prob_key=key)(data)


def test_no_old_log_probs(form: str) -> None:
    data = build(form, columns_of(form))
    with assert_refused(ValueError, data, "Missing: ('old', 'full')", "Found: log_probs.full", "give the keys"):
        KLComputation(estimator="corrected_k3", old_log_probs_key=("old", "full"))(data)


@pytest.mark.parametrize("name", SCORING)
def test_numbers_that_are_no_token_ids(models: Models, name: str, form: str) -> None:
    columns = columns_of(form)
    tokens = columns["tokens", "full"]
    columns["tokens", "full"] = tokens.float() if form == "padded" else [row.float() for row in tokens]
    data = build(form, columns)
    with assert_refused(TypeError, data, "integer token ids", "('tokens', 'full')", "torch.float32"):
        models.make(name)(data)


@pytest.mark.parametrize("name", SCORING)
def test_a_tensor_where_a_tensordict_belongs(models: Models, name: str) -> None:
    data = TensorDict(tokens=torch.tensor([[1, 2, 3]]), reward=torch.ones(1, 1), batch_size=[1])
    with assert_refused(TypeError, data, "'tokens'", "('tokens', 'full')", "Tensor"):
        models.make(name)(data)


@pytest.mark.parametrize("name", ["RetrieveLogProb", "RetrieveKL"])
def test_a_history_that_is_none(models: Models, name: str, padded: bool) -> None:
    gen, ref = (
        models.wrapper(model, key, pad_output=padded, input_mode="history")
        for model, key in ((models.gen, "gen_log_probs"), (models.ref, "ref_log_probs"))
    )
    data = TensorDict(history=TensorDict(full=torch.zeros(2, 3), batch_size=[2]), batch_size=[2])
    with assert_refused(TypeError, data, "expected a torchrl History", "('history', 'full')", "Tensor"):
        models.make(name, gen=gen, ref=ref)(data)


# ------------------------------------------------------------------ empty batches


EMPTY: dict[str, Callable[[], TensorDictBase]] = {
    "(0,)": lambda: build("padded", columns_of("padded"))[:0],
    "(0,) ": lambda: build("lazy", columns_of("lazy"))[:0],
    "(0, 2)": lambda: lazy_stack([build("lazy", columns_of("lazy"))])[:0],
    "(1, 0)": lambda: lazy_stack([build("padded", columns_of("padded"))])[:, :0],
}


@pytest.mark.parametrize("size", list(EMPTY))
@pytest.mark.parametrize("name", [*SCORING, "KLComputation"])
def test_an_empty_batch(models: Models, name: str, size: str) -> None:
    data = EMPTY[size]()
    with assert_refused(
        ValueError, data, f"the batch is empty: a TensorDict of batch size {size.strip()} holds", "drop it"
    ):
        models.make(name)(data)
