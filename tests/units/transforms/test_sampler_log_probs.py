"""The sampler's log-probs and the trainer's, each in its own entry."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torch.testing import assert_close

from closeness import assert_near
from layouts import PROMPTS, RESPONSES, at_responses, tokens
from torchrl_llm_kl import PolicyLoss, RetrieveKL, RetrieveLogProb
from torchrl_llm_kl.losses import ImportanceWeights, RejectionMask
from toy_models import FORWARD, tiny_model
from toy_rollouts import collect, flat, make_env, make_policy, plain_log_probs, response_log_probs, steps

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
    found = RetrieveLogProb(model, sampler_log_probs_key=SAMPLER)(rollout(layout, name))
    assert responses(found, SAMPLER) == STORED
    for row, prompt, response in zip(responses(found, FULL), PROMPTS, RESPONSES, strict=True):
        assert_near(
            torch.tensor(row), plain_log_probs(model, torch.tensor(prompt + response))[len(prompt) :], **FORWARD
        )
    # a second pass, with a trainer that has moved, leaves the sampler's
    again = RetrieveLogProb(tiny_model(seed=1), sampler_log_probs_key=SAMPLER)(found)
    assert responses(again, SAMPLER) == STORED
    assert responses(again, FULL) != responses(RetrieveLogProb(model)(rollout(layout, name)), FULL)


def test_a_first_token_that_was_not_scored_is_nan() -> None:
    stored = [[0.0, -2.0], [0.0, -1.5, 0.0, -3.5], [0.0]]
    found = RetrieveLogProb(tiny_model(seed=0), sampler_log_probs_key=SAMPLER)(rollout("lazy", stored=stored))
    expected = [[NAN, -2.0], [NAN, -1.5, 0.0, -3.5], [NAN]]  # of the last, the others show that 0 is no score
    for row, values in zip(responses(found, SAMPLER), expected, strict=True):
        assert_close(torch.tensor(row), torch.tensor(values), equal_nan=True, rtol=0, atol=0)


def test_below_next_and_through_retrieve_kl() -> None:
    """The policy writes at the root, the transform under "next"; an earlier score under "next" is not the sampler's."""
    data = rollout("nested", "response")
    data["next"] = TensorDict(
        {
            "reward": torch.ones(3, 1),
            "log_probs": {"full": torch.nested.as_nested_tensor([torch.full((n,), 8.0) for n in (5, 5, 3)])},
        },
        [3],
    )
    model = tiny_model(seed=0)
    transform = RetrieveKL(model, tiny_model(seed=1), sampler_log_probs_key=SAMPLER)
    found = transform(data)
    assert responses(found, ("next", *SAMPLER)) == STORED
    assert [row.tolist() for row in found["log_probs", "response"].unbind()] == STORED
    assert SAMPLER in transform[0].out_keys
    assert transform.sampler_log_probs_key == SAMPLER
    transform.sampler_log_probs_key = None
    assert SAMPLER not in transform[0].out_keys


def test_what_is_missing_or_contradicts_itself() -> None:
    model = tiny_model(seed=0)
    with pytest.raises(KeyError, match=r"moves the sampler's log-probs: expected them under \('log_probs', 'full'\)"):
        RetrieveLogProb(model, sampler_log_probs_key=SAMPLER)(rollout("lazy").exclude("log_probs"))
    with pytest.raises(
        ValueError, match=r"sampler_log_probs_key and log_probs_full_key are both \('log_probs', 'full'\)"
    ):
        RetrieveLogProb(model, sampler_log_probs_key=FULL)


@pytest.mark.parametrize(("padded", "turns"), [(True, 3), (False, 2)], indirect=["padded"])
def test_in_an_env(tokenizer: Any, policy_model: nn.Module, padded: bool, turns: int) -> None:
    """Each turn keeps what the policy stored in that turn."""
    policy = make_policy(policy_model, tokenizer, pad_output=padded, return_log_probs=True)
    transform = RetrieveLogProb(policy_model, tokenizer=tokenizer, sampler_log_probs_key=SAMPLER)
    data = collect(tokenizer, policy, transform, turns=turns)
    assert data.shape == (2, turns)
    for step in steps(data):
        real = step["masks", "all_attention_mask"]
        start = len(step["tokens", "prompt"])
        stored = step["log_probs", "response"][real[start:]]
        found = step["next", "sampler_log_probs", "full"]
        assert found.shape == step["tokens", "full"].shape
        assert not found[:start].any()
        assert found[start].isnan()
        assert_close(found[start + 1 : start + len(stored)], stored[1:], rtol=0, atol=0)
        # the policy samples at temperature 1: both are scores of one model
        own = response_log_probs(policy_model, step)
        assert_close(step["next", "log_probs", "full"], own, atol=1e-4, rtol=0)
        assert_close(found[start + 1 : start + len(stored)], own[start + 1 : start + len(stored)], atol=1e-4, rtol=0)
    spec = make_env(tokenizer, transform.clone()).observation_spec
    assert spec[SAMPLER].shape == spec[FULL].shape == (2, -1)


def test_a_loss_on_both(tokenizer: Any, policy_model: nn.Module) -> None:
    """Sampled and scored by one model: no mismatch, weights of 1, nothing rejected."""
    policy = make_policy(policy_model, tokenizer, pad_output=False, return_log_probs=True)
    transform = RetrieveLogProb(policy_model, tokenizer=tokenizer, sampler_log_probs_key=SAMPLER)
    data = flat(collect(tokenizer, policy, transform))
    data["advantage"] = torch.tensor([[1.0], [-0.5]])
    corrections = [ImportanceWeights(high=1.5), RejectionMask("seq_max_k3", high=0.01)]
    out = PolicyLoss(policy_model, corrections=corrections)(data)
    plain = PolicyLoss(policy_model)(data)
    assert_close(out.total_loss, plain.total_loss, atol=1e-5, rtol=0)
    assert out["num_tokens"] == plain["num_tokens"]  # an unscored token is trained all the same
    assert out["rejected_fraction"] == 0
    assert out["mismatch_k3"] < 1e-5
    assert_close(out["weight_max"], torch.tensor(1.0), atol=1e-4, rtol=0)
    # a sampler that was twice as sure of the second answer's tokens
    for row, shift in zip(data.unbind(0), (0.0, 0.7), strict=True):
        row["next", "sampler_log_probs", "full"] = row["next", "sampler_log_probs", "full"] + shift
    assert PolicyLoss(policy_model, corrections=corrections)(data)["rejected_seq_fraction"] == 0.5
