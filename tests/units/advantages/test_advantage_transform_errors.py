"""Errors of the transform: arguments that contradict each other, and data that is missing or wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict
from test_advantage_transform import batch, conversations

from torchrl_llm_kl.advantages import Advantage

NAN = float("nan")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Advantage("grop"), ValueError, "unknown advantage 'grop'.*Did you mean 'grpo'"),
        (lambda: Advantage("grpo", epsilonn=1), TypeError, "no hyper-parameter 'epsilonn'.*Did you mean 'epsilon'"),
        (lambda: Advantage("reinforce", group_size=2), ValueError, "reinforce does not compare within groups"),
        (lambda: Advantage("gae", group_key="query"), ValueError, "gae does not compare within groups"),
        (lambda: Advantage("grpo", group_key="a", group_size=2), ValueError, "got both group_key='a' and group_size=2"),
        (lambda: Advantage("grpo", group_size=0), ValueError, "group_size must be at least 1, got 0"),
        (lambda: Advantage("grpo", layout="tokens"), ValueError, "layout must be one of .*got 'tokens'"),
        (
            lambda: Advantage("gae", layout="sequence"),
            ValueError,
            "gae has one number per token: layout must be 'token'",
        ),
        (
            lambda: Advantage("grpo", keys={"value": "v"}),
            ValueError,
            "grpo has no key 'value'.*Known: advantage, reward",
        ),
        (lambda: Advantage("grpo", keys={"mask": "m"}), ValueError, "grpo has no key 'mask'"),
        (lambda: Advantage("grpo", keys={"group": "g"}), ValueError, "no key 'group'. Pass group_key=. Known: "),
        (lambda: Advantage("jsd", temperature=0.5), ValueError, "is not supported"),
    ],
)
def test_arguments(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("name", "hyper", "drop", "message"),
    [
        ("grpo", {}, "query", r"the group is missing: expected 'query' in the TensorDict, found: .*Pass group_key="),
        (
            "grpo",
            {},
            ("next", "reward"),
            r"the reward is missing: expected \('next', 'reward'\) in the TensorDict, found: .*query.*; in 'next': ",
        ),
        ("remax", {}, "none", r"the baseline is missing: expected 'reward_baseline'.*Answer each prompt greedily"),
        ("gae", {}, ("next", "state_value"), r"the value is missing: .*Put RetrieveValue before"),
        ("jsd", {}, ("next", "ref_log_probs"), r"the teacher_log_prob is missing.*RetrieveKL\(policy, teacher\)"),
        (
            "on_policy_distill",
            {},
            ("next", "log_probs"),
            r"the old_log_prob is missing: expected \('next', 'log_probs'",
        ),
        ("gae", {"keys": {"mask": "m"}}, "none", "the mask is missing: expected 'm' in the TensorDict, found: "),
        ("gae", {}, ("tokens", "full"), r"nothing to score: expected \('tokens', 'full'\)"),
        (
            "gigpo",
            {"keys": {"run": "query"}},
            "none",
            "the state is missing: expected 'state'.*identifies the env's state",
        ),
        ("step_wise_grpo", {"keys": {"run": "r"}}, "none", "the run is missing: expected 'r'"),
    ],
)
def test_entries_that_are_missing(name: str, hyper: dict[str, Any], drop: Any, message: str) -> None:
    data = conversations("padded").exclude(drop)
    before = set(data.keys(True, True))
    with pytest.raises(KeyError, match=message):
        Advantage(name, **hyper)(data)
    assert set(data.keys(True, True)) == before


def test_which_tokens_are_the_response_must_be_known() -> None:
    data = conversations("padded").exclude(("tokens", "prompt"))
    with pytest.raises(ValueError, match="cannot tell which tokens the assistant produced"):
        Advantage("gae")(data)


@pytest.mark.parametrize("bad", [NAN, float("inf")])
@pytest.mark.parametrize("form", ["lazy", "strided", "padded"])
def test_rewards_that_are_not_finite_name_their_sequence(form: str, bad: float) -> None:
    data = conversations(form)
    reward = torch.tensor([[1.0], [bad], [2.0]])
    data["next", "reward"] = reward
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
    ("name", "change", "error", "message"),
    [
        ("grpo", {"query": torch.rand(6)}, TypeError, r"the group must be integers or strings, found torch\.float32"),
        ("grpo", {"query": NonTensorStack(*[1.5] * 6)}, TypeError, "must be integers or strings, found float"),
        ("remax", {"reward_baseline": NonTensorStack(*"abcdef")}, TypeError, "the baseline must be a tensor, found"),
        (
            "step_wise_grpo",
            {"run": torch.zeros(6, dtype=torch.long), "step": torch.rand(6)},
            TypeError,
            r"the step must be of an integer dtype, found torch\.float32",
        ),
        (
            "step_wise_grpo",
            {"run": torch.zeros(6, dtype=torch.long), "step": torch.zeros(6, 2, dtype=torch.long)},
            ValueError,
            "the step must have one number for each of 6 rows, found 12",
        ),
        ("step_wise_grpo", {}, ValueError, r"cannot tell trajectories apart: found batch size \(6,\)"),
    ],
)
def test_entries_of_another_kind(name: str, change: dict[str, Any], error: type[Exception], message: str) -> None:
    data = batch().update(change)
    keys = {key: key for key in ("run", "step") if key in change}
    with pytest.raises(error, match=message):
        Advantage(name, keys=keys)(data)


def test_lengths_that_are_not_those_of_the_tokens() -> None:
    data = conversations("padded")
    data["next", "state_value"] = torch.zeros(3, 2)
    with pytest.raises(
        ValueError, match=r"'state_value'.*: sequence 0 has 2 values and 5 tokens.*the response alone must"
    ):
        Advantage("gae")(data)
    data["next", "state_value"] = torch.zeros(3, 5, 2)
    with pytest.raises(ValueError, match=r"'state_value'.* must hold one number per token, found rows of \(2,\) each"):
        Advantage("gae")(data)
    data["next", "state_value"] = torch.zeros(3)
    with pytest.raises(ValueError, match="the value must hold one number per token, found one per sequence under"):
        Advantage("gae")(data)


def test_empty_and_locked_batches() -> None:
    with pytest.raises(ValueError, match=r"the batch is empty: a TensorDict of batch size \(0,\)"):
        Advantage("grpo")(TensorDict(batch_size=[0]))
    with pytest.raises(RuntimeError, match="Cannot modify locked TensorDict"):
        Advantage("grpo")(batch().lock_())
