"""The sampler's log-probs and the trainer's, each in its own entry."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch.testing import assert_close

from closeness import assert_near
from layouts import PROMPTS, RESPONSES, at_responses, tokens
from torchrl_llm_kl import RetrieveKL, RetrieveLogProb, SamplerLogProbs
from toy_models import FORWARD, tiny_model
from toy_rollouts import plain_log_probs, response_log_probs, steps

FULL, SAMPLER = ("log_probs", "full"), ("sampler_log_probs", "full")
STORED = [[-1.0, -2.0], [-0.5, -1.5, -2.5, -3.5], [-4.0]]
NAN = float("nan")


def rollout(layout: str, name: str = "full", stored: list[list[float]] = STORED) -> TensorDictBase:
    """Three sequences with log-probs of the whole sequence (9 at prompts) or of the response; 7 in padding."""
    values = [[9.0] * len(p) * (name == "full") + x for p, x in zip(PROMPTS, stored, strict=True)]
    return tokens(layout, fill=7.0, **{f"log_probs__{name}": values})


def responses(data: TensorDictBase, key: Any) -> list[list[float]]:
    return [row.tolist() for row in at_responses(data, key)]


@pytest.mark.parametrize(
    ("layout", "name"), [("padded", "full"), ("padded", "response"), ("nested", "full"), ("lazy", "response")]
)
def test_the_samplers_move_and_the_trainers_take_their_place(layout: str, name: str) -> None:
    model = tiny_model(seed=0)
    found = RetrieveLogProb(model, extras=[SamplerLogProbs(SAMPLER)])(rollout(layout, name))
    assert responses(found, SAMPLER) == STORED
    own = [plain_log_probs(model, torch.tensor(p + r))[len(p) :] for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    assert_near(at_responses(found, FULL), own, **FORWARD)
    # a second pass, with a trainer that has moved, leaves the sampler's
    again = RetrieveLogProb(tiny_model(seed=1), extras=[SamplerLogProbs(SAMPLER)])(found)
    assert responses(again, SAMPLER) == STORED
    assert responses(again, FULL) != responses(RetrieveLogProb(model)(rollout(layout, name)), FULL)


def test_a_first_token_that_was_not_scored_is_nan() -> None:
    stored = [[0.0, -2.0], [0.0, -1.5, 0.0, -3.5], [0.0]]
    found = RetrieveLogProb(tiny_model(seed=0), extras=[SamplerLogProbs(SAMPLER)])(rollout("lazy", stored=stored))
    expected = [[NAN, -2.0], [NAN, -1.5, 0.0, -3.5], [NAN]]  # of the last, the others show that 0 is not a score
    assert_close(at_responses(found, SAMPLER), list(map(torch.tensor, expected)), equal_nan=True, rtol=0, atol=0)


def test_below_next_and_through_retrieve_kl() -> None:
    """The policy writes at the root, the transform under "next"; an earlier score under "next" is not the sampler's."""
    data = rollout("nested", "response")
    earlier = torch.nested.as_nested_tensor([torch.full((n,), 8.0) for n in (5, 5, 3)])
    data["next"] = TensorDict({"reward": torch.ones(3, 1), FULL: earlier}, [3])
    model = tiny_model(seed=0)
    transform = RetrieveKL(model, tiny_model(seed=1), extras=[SamplerLogProbs(SAMPLER)])
    found = transform(data)
    assert responses(found, ("next", *SAMPLER)) == STORED
    assert [row.tolist() for row in found["log_probs", "response"].unbind()] == STORED
    assert SAMPLER in transform[0].out_keys
    assert transform.extras == (SamplerLogProbs(SAMPLER),)
    transform.extras = []
    assert SAMPLER not in transform[0].out_keys
    data = rollout("nested")
    data["next"] = rollout("nested", "response", [[8.0] * len(row) for row in STORED]).select("log_probs")
    found = RetrieveLogProb(model, extras=[SamplerLogProbs(SAMPLER)])(data)
    assert responses(found, ("next", *SAMPLER)) == STORED


def test_what_is_missing_or_contradicts_itself() -> None:
    model = tiny_model(seed=0)
    with pytest.raises(KeyError, match=r"moves the sampler's log-probs: expected them under \('log_probs', 'full'\)"):
        RetrieveLogProb(model, extras=[SamplerLogProbs(SAMPLER)])(rollout("lazy").exclude("log_probs"))
    with pytest.raises(ValueError, match=r"SamplerLogProbs and log_probs_full_key are both \('log_probs', 'full"):
        RetrieveLogProb(model, extras=[SamplerLogProbs(FULL)])


@pytest.mark.parametrize(("padded", "turns"), [(True, 3), (False, 2)], indirect=["padded"])
def test_in_an_env(lab: Any, padded: bool, turns: int) -> None:
    """Each turn keeps what the policy stored in that turn."""
    transform = RetrieveLogProb(lab.gen_model, tokenizer=lab.tokenizer, extras=[SamplerLogProbs(SAMPLER)])
    data = lab.collect(transform, pad_output=padded, turns=turns)
    assert data.shape == (2, turns)
    for step in steps(data):
        start = len(step["tokens", "prompt"])
        stored = step["log_probs", "response"][step["masks", "all_attention_mask"][start:]]
        found, own = step["next"][SAMPLER], response_log_probs(lab.gen_model, step)
        assert found.shape == step["tokens", "full"].shape
        assert not found[:start].any()
        assert found[start].isnan()
        scored = slice(start + 1, start + len(stored))
        assert_close(found[scored], stored[1:], rtol=0, atol=0)
        # the policy samples at temperature 1: both are scores of one model
        assert_close(step["next"][FULL], own, atol=1e-4, rtol=0)
        assert_close(found[scored], own[scored], atol=1e-4, rtol=0)
    spec = lab.env(transform.clone()).observation_spec
    assert spec[SAMPLER].shape == spec[FULL].shape == (2, -1)
