"""The transforms produce the entries that they declare."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torchrl.data import Composite
from torchrl.envs import EnvBase, Transform, check_env_specs

from torchrl_llm_kl import KLComputation, KLRewardTransform, RetrieveKL, RetrieveLogProb
from toy_rollouts import Outcome, make_env, make_policy, make_scoring_wrapper, steps


def chain(
    name: str, tokenizer: Any, policy_model: Any, ref_model: Any, padded: bool, input_mode: str
) -> list[Transform]:
    """The transform and those whose output it reads, with models that take ``input_mode``."""

    def wrapper(model: Any, key: str, mode: str = input_mode) -> Any:
        return make_scoring_wrapper(model, tokenizer, pad_output=padded, log_probs_key=key, input_mode=mode)

    gen, ref = wrapper(policy_model, "log_probs"), wrapper(ref_model, "ref_log_probs")
    return {
        "RetrieveLogProb": [RetrieveLogProb(ref)],
        "KLComputation": [RetrieveLogProb(gen), RetrieveLogProb(ref), KLComputation()],
        "RetrieveKL": [RetrieveKL(gen, ref)],
        "KLRewardTransform": [RetrieveLogProb(gen), KLRewardTransform(wrapper(ref_model, "ref_log_probs", "tokens"))],
    }[name]


NAMES = ["RetrieveLogProb", "KLComputation", "RetrieveKL", "KLRewardTransform"]
PAIRS = list(zip(NAMES, [True, False, False, True], strict=True))


@pytest.mark.filterwarnings("ignore:sequence .*the full text does not start with its prompt")
@pytest.mark.parametrize(("name", "padded"), PAIRS, indirect=["padded"])
def test_check_env_specs(name: str, tokenizer: Any, policy_model: Any, ref_model: Any, padded: bool) -> None:
    """In text mode, the one in which the bare ``ChatEnv`` of torchrl 0.14 passes its own check."""
    transforms = chain(name, tokenizer, policy_model, ref_model, padded, "text")
    check_env_specs(make_env(tokenizer, *transforms, envs=2, turns=2, input_mode="text"))


def declared(env: EnvBase) -> dict[Any, Any]:
    entries: dict[Any, Any] = {}
    for spec in (env.full_observation_spec, env.full_reward_spec):
        entries |= {key: leaf for key, leaf in spec.items(True, True) if not isinstance(leaf, Composite)}
    return entries


def fits(shape: torch.Size, spec: Any) -> bool:
    """Whether the shape of one row is that of the spec, whose batch dimension comes first and where -1 is any size."""
    want = spec.shape[1:]
    return len(shape) == len(want) and all(w in (-1, s) for s, w in zip(shape, want, strict=True))


def check_declared(env: EnvBase, step: TensorDictBase, written: list[Any]) -> None:
    entries = declared(env)
    for key in written:
        value = step["next"].get(key)
        assert key in entries, f"{key} is written but not declared"
        assert fits(value.shape, entries[key]), f"{key}: declared {entries[key].shape}, produced {value.shape}"
        assert value.dtype == entries[key].dtype


@pytest.mark.parametrize(
    ("name", "padded", "input_mode"),
    [(name, padded != (mode == "text"), mode) for name, padded in PAIRS for mode in ("history", "text")],
    indirect=["padded"],
)
def test_declared_is_produced_by_a_policy(
    name: str, input_mode: str, tokenizer: Any, policy_model: Any, ref_model: Any, padded: bool
) -> None:
    transforms = chain(name, tokenizer, policy_model, ref_model, padded, input_mode)
    env = make_env(tokenizer, *transforms, envs=2, turns=2, input_mode=input_mode)
    bare = declared(make_env(tokenizer, envs=2, turns=2, input_mode=input_mode))
    added = [key for key, spec in declared(env).items() if key not in bare or spec != bare[key]]
    rollout = env.rollout(2, make_policy(policy_model, tokenizer, pad_output=padded, input_mode=input_mode))
    for step in steps(rollout):
        check_declared(env, step, added)
    expected = {
        "RetrieveLogProb": {("ref_log_probs", "full")},
        "KLComputation": {("log_probs", "full"), ("ref_log_probs", "full"), "kl_penalty", "reward"},
        "RetrieveKL": {("log_probs", "full"), ("ref_log_probs", "full"), "kl_penalty", "reward"},
        "KLRewardTransform": {("log_probs", "full"), "ref_log_probs", "kl_penalty", "reward"},
    }
    assert set(added) == expected[name]


@pytest.mark.parametrize(("name", "padded"), PAIRS, indirect=["padded"])
def test_after_a_reset_the_entries_exist_and_are_empty(
    name: str, tokenizer: Any, policy_model: Any, ref_model: Any, padded: bool
) -> None:
    env = make_env(tokenizer, *chain(name, tokenizer, policy_model, ref_model, padded, "history"), envs=3)
    reset = env.reset()
    for key, spec in declared(env).items():
        if key not in declared(make_env(tokenizer, envs=3)) and key not in env.full_reward_spec.keys(True, True):
            for step in steps(reset):
                assert step.get(key).shape == torch.Size([0, *spec.shape[2:]])


@pytest.mark.parametrize(
    ("features", "padded"),
    [((), True), ((1,), False), ((1, 1), True)],
    ids=["[B]", "[B, 1]", "[B, 1, 1]"],
    indirect=["padded"],
)
def test_defect_07a_07b_reward_of_any_outcome_shape(
    features: tuple[int, ...], tokenizer: Any, policy_model: Any, ref_model: Any, padded: bool
) -> None:
    (transform,) = chain("RetrieveKL", tokenizer, policy_model, ref_model, padded, "history")
    env = make_env(tokenizer).append_transform(Outcome(features)).append_transform(transform)
    (step,) = steps(env.rollout(1, make_policy(policy_model, tokenizer, pad_output=padded))[:1])
    check_declared(env, step, ["reward", "kl_penalty"])
    torch.testing.assert_close(step["next", "reward"].sum(), 1.0 - step["next", "kl_penalty"].sum())
