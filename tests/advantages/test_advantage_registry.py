"""The table of advantages: names, what they need, and how hyper-parameters are read."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchrl_llm_kl.advantages as layer
from torchrl_llm_kl.advantages import (
    UnknownAdvantageError,
    advantage,
    advantage_spec,
    available_advantages,
    gae,
    get_advantage,
    grpo,
    jsd,
    reinforce_plus_plus,
    rloo,
    step_wise_grpo,
)

# name -> (kind, what it cannot do without)
TABLE = {
    "gae": ("token", "reward value mask"),
    "reinforce_plus_plus": ("token", "reward mask"),
    "on_policy_distill": ("token", "old_log_prob teacher_log_prob mask"),
    "jsd": ("token", "old_log_prob teacher_log_prob mask"),
    "grpo": ("outcome", "reward group"),
    "dr_grpo": ("outcome", "reward group"),
    "rloo": ("outcome", "reward group"),
    "reinforce": ("outcome", "reward"),
    "remax": ("outcome", "reward baseline"),
    "opmd": ("outcome", "reward group"),
    "asymre": ("outcome", "reward group"),
    "rec": ("outcome", "reward group"),
    "best_of_group": ("outcome", "reward group"),
    "step_wise_grpo": ("trajectory", "reward group run step"),
    "gigpo": ("trajectory", "reward group run step state"),
}


def test_the_table_is_whole() -> None:
    assert set(available_advantages()) == set(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_what_is_known_of_each(name: str) -> None:
    function = get_advantage(name)
    assert function is getattr(layer, name)
    assert pickle.loads(pickle.dumps(function)) is function
    spec = advantage_spec(function)
    assert (spec.name, spec.kind, " ".join(spec.needs)) == (name, *TABLE[name])
    assert len(spec.source) > 10
    assert spec.outputs == (("advantage", "value_target") if name == "gae" else ("advantage",))
    assert copy.deepcopy(spec) == spec


def test_trinitys_names() -> None:
    assert get_advantage("ppo") is gae
    assert get_advantage("reinforceplusplus") is reinforce_plus_plus
    assert get_advantage("multi_step_grpo") is step_wise_grpo


def test_unknown_names() -> None:
    with pytest.raises(
        UnknownAdvantageError, match=r"unknown advantage 'gpro'; known: asymre, .*Did you mean 'grpo'\?"
    ):
        get_advantage("gpro")
    with pytest.raises(TypeError, match="expected an advantage of this package"):
        advantage_spec(len)


def test_two_cannot_have_one_name() -> None:
    with pytest.raises(ValueError, match="there is an advantage 'grpo' already"):
        advantage("grpo", "outcome", source="nowhere")(lambda reward: reward)


@pytest.mark.parametrize("name", TABLE)
def test_unknown_hyper_parameters_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} has no hyper-parameter 'epsilom'"):
        get_advantage(name)(epsilom=0.1)


@pytest.mark.parametrize("name", TABLE)
def test_inputs_that_are_missing_are_named(name: str) -> None:
    first = advantage_spec(get_advantage(name)).needs[0]
    with pytest.raises(ValueError, match=f"{name} needs {first}: pass {first}="):
        get_advantage(name)()


R, G = torch.tensor([1.0, 2.0]), torch.tensor([0, 0])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: grpo(R, G, epsilo=1.0), TypeError, "Did you mean 'epsilon'"),
        (lambda: grpo(R, G, std="group", std_cal_level="batch"), TypeError, "another name of 'std'.* pass one of them"),
        (lambda: grpo(R, G, R), TypeError, "grpo takes 2 positional arguments, reward, group: got 3"),
        (lambda: grpo(R, reward=R), TypeError, "grpo got 'reward' twice"),
        (lambda: rloo(R[:, None], G[:, None]), ValueError, r"reward must be \[B\], one number .*got shape \(2, 1\)"),
        (lambda: rloo(R, G[:1]), ValueError, r"reward has shape \(2,\) but group has shape \(1,\)"),
        (lambda: rloo(R, R), TypeError, r"group must be of an integer dtype, got torch\.float32"),
        (lambda: rloo(R, R > 1), TypeError, r"group must be of an integer dtype, got torch\.bool"),
        (lambda: jsd(R[None], R[None], R[None] > 0, beta=0.3, lambda_coef=0.3), TypeError, "another name of 'beta'"),
    ],
)
def test_bad_calls(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_by_keyword_or_by_place() -> None:
    assert torch.equal(rloo(R, G), rloo(group=G, reward=R))
    assert torch.equal(rloo(R, G), rloo(R, group=G.int()))
