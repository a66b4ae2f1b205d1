"""Errors of the transform: arguments that contradict each other, and data that is missing or wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict
from test_advantage_transform import batch, conversations, with_moments
from torch import Tensor

from torchrl_llm_kl.advantages import Advantage

NAN = float("nan")
REWARD, MOMENTS = ("next", "reward"), ("next", "moments")


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("grop", {}, "unknown advantage 'grop'.*Did you mean 'grpo'"),
        ("grpo", {"epsilonn": 1}, "no hyper-parameter 'epsilonn'.*Did you mean 'epsilon'"),
        ("reinforce", {"group_size": 2}, "reinforce does not compare within groups"),
        ("gae", {"group_key": "query"}, "gae does not compare within groups"),
        ("grpo", {"group_key": "a", "group_size": 2}, "got both group_key='a' and group_size=2"),
        ("grpo", {"group_size": 0}, "group_size must be at least 1, got 0"),
        ("grpo", {"layout": "tokens"}, "layout must be one of .*got 'tokens'"),
        ("gae", {"layout": "sequence"}, "gae has one number per token: layout must be 'token'"),
        ("grpo", {"keys": {"value": "v"}}, "grpo has no key 'value'.*Known: advantage, reward"),
        ("grpo", {"keys": {"mask": "m"}}, "grpo has no key 'mask'"),
        ("grpo", {"keys": {"group": "g"}}, "no key 'group'. Pass group_key=. Known: "),
        ("jsd", {"temperature": 0.5}, "is not supported"),
        ("grpo", {"keys": {"reward": ["a", "b"]}}, r"'reward': \.\.\.\} must be one key, got the list \['a', 'b'\]"),
        ("gdpo", {"keys": {"rewards": []}}, r"keys=\{'rewards': \.\.\.\} must be one key, got the list \[\]"),
    ],
)
def test_arguments(name: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError if "epsilonn" in settings else ValueError, match=message):
        Advantage(name, **settings)


@pytest.mark.parametrize(
    ("name", "hyper", "drop", "message"),
    [
        ("grpo", {}, "query", r"the group is missing: expected 'query' in the TensorDict, found: .*Pass group_key="),
        ("grpo", {}, REWARD, r"the reward is missing: expected \('next', 'reward'\) .*query.*; in 'next': "),
        (
            "gdpo",
            {"keys": {"rewards": [REWARD, "b"]}},
            "none",
            r"the rewards are missing: expected 'b'.*an entry for each",
        ),
        ("remax", {}, "none", r"the baseline is missing: expected 'reward_baseline'.*Answer each prompt greedily"),
        ("gae", {}, ("next", "state_value"), r"the value is missing: .*Put RetrieveValue before"),
        ("jsd", {}, ("next", "ref_log_probs"), r"the teacher_log_prob is missing.*RetrieveKL\(policy, teacher\)"),
        ("on_policy_distill", {}, ("next", "log_probs"), r"old_log_prob is missing: expected \('next', 'log_probs'"),
        ("gae", {"keys": {"mask": "m"}}, "none", "the mask is missing: expected 'm' in the TensorDict, found: "),
        ("gae", {}, ("tokens", "full"), r"nothing to score: expected \('tokens', 'full'\)"),
        ("gigpo", {"keys": {"run": "query"}}, "none", "the state is missing: expected 'state'.*the env's state"),
        ("step_wise_grpo", {"keys": {"run": "r"}}, "none", "the run is missing: expected 'r'"),
        ("clip_b", {}, ("next", "entropy"), "the entropy is missing: .*entropy_key='entropy'"),
        ("clip_v", {}, (*MOMENTS, "discriminator"), "the discriminator is missing: .*moments_key='moments'"),
        ("optimal_token_baseline", {}, (*MOMENTS, "collision"), "the collision is missing: .*moments_key='moments'"),
    ],
)
def test_entries_that_are_missing(name: str, hyper: dict[str, Any], drop: Any, message: str) -> None:
    data = with_moments("padded").exclude(drop)
    before = set(data.keys(True, True))
    with pytest.raises(KeyError, match=message):
        Advantage(name, **hyper)(data)
    assert set(data.keys(True, True)) == before


@pytest.mark.parametrize(("form", "bad"), [("lazy", NAN), ("nested", float("inf")), ("padded", NAN)])
def test_rewards_that_are_not_finite_name_their_sequence(form: str, bad: float) -> None:
    data = conversations(form)
    data["next", "reward"] = torch.tensor([[1.0], [bad], [2.0]])
    with pytest.raises(ValueError, match=f"the reward is {bad} at sequence 1: expected a finite number"):
        Advantage("rloo")(data)
    with pytest.raises(ValueError, match=f"the reward is {bad} at sequence 1, position 3"):
        Advantage("reinforce_plus_plus")(data)


def test_a_value_that_is_not_finite_names_its_token_and_padding_is_ignored() -> None:
    data = conversations("padded")
    value = data["next", "state_value"]
    value[0, 3:] = NAN
    value[1, :2] = NAN
    Advantage("gae")(data)
    value[2, 3] = NAN
    with pytest.raises(ValueError, match="the value is nan at sequence 2, position 3: expected a finite number"):
        Advantage("gae")(data)


@pytest.mark.parametrize(
    ("name", "key", "value", "error", "message"),
    [
        ("grpo", "query", torch.rand(6), TypeError, r"the group must be integers or strings, found torch\.float32"),
        ("grpo", "query", NonTensorStack(*[1.5] * 6), TypeError, "must be integers or strings, found float"),
        ("remax", "reward_baseline", NonTensorStack(*"abcdef"), TypeError, "the baseline must be a tensor, found"),
        ("step_wise_grpo", "step", torch.rand(6), TypeError, r"the step must be of an integer dtype, found torch\.fl"),
        ("step_wise_grpo", "step", torch.zeros(6, 2).long(), ValueError, "number for each of 6 rows, found 12"),
        ("step_wise_grpo", "x", torch.zeros(6), ValueError, r"cannot tell trajectories apart: found batch size \(6,\)"),
    ],
)
def test_entries_of_another_kind(name: str, key: str, value: Any, error: type[Exception], message: str) -> None:
    data = batch().update({key: value, "run": torch.zeros(6, dtype=torch.long)})
    with pytest.raises(error, match=message):
        Advantage(name, keys={"run": "run", "step": "step"} if key == "step" else {})(data)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (torch.zeros(6), r"under \('next', 'reward'\) must be \[\*B, R\], R numbers for each of 6 .* found \(6,\)"),
        (torch.zeros(6, 4, 1), r"must be \[\*B, R\].*found \(6, 4, 1\)\. Pass keys=\{'rewards': \[\.\.\.\]\}"),
        (torch.zeros(6, 2).index_put((torch.tensor(3), torch.tensor(1)), torch.tensor(NAN)), "at sequence 3, reward 1"),
    ],
)
def test_rewards_that_fit_no_sequence(reward: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Advantage("gdpo")(batch(reward=reward))


def test_lengths_that_are_not_those_of_the_tokens() -> None:
    data = conversations("padded")
    for shape, message in (
        ((3, 2), r"'state_value'.*: sequence 0 has 2 values and 5 tokens.*the response alone must"),
        ((3, 5, 2), r"'state_value'.* must hold one number per token, found rows of \(2,\) each"),
        ((3,), "the value must hold one number per token, found one per sequence under"),
    ):
        data["next", "state_value"] = torch.zeros(shape)
        with pytest.raises(ValueError, match=message):
            Advantage("gae")(data)
    data["next", "reward"] = torch.ones(3, 2)
    with pytest.raises(ValueError, match=r"the reward has shape \(3, 2\): .*sequence 0 has 2 numbers and 5 tokens"):
        Advantage("rloo")(data)


def test_empty_and_locked_batches_and_an_unknown_response() -> None:
    with pytest.raises(ValueError, match="cannot tell which tokens the assistant produced"):
        Advantage("gae")(conversations("padded").exclude(("tokens", "prompt")))
    with pytest.raises(ValueError, match=r"the batch is empty: a TensorDict of batch size \(0,\)"):
        Advantage("grpo")(TensorDict(batch_size=[0]))
    with pytest.raises(RuntimeError, match="Cannot modify locked TensorDict"):
        Advantage("grpo")(batch().lock_())
