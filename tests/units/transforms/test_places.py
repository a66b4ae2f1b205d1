"""Every transform in every place that TorchRL runs one, padded and nested, against the plain model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs import Transform

from closeness import assert_near
from torchrl_llm_kl import KLComputation, KLRewardTransform, RetrieveKL, RetrieveLogProb
from toy_models import FORWARD
from toy_rollouts import (
    OUTCOMES,
    collect,
    flat,
    leaves,
    make_env,
    make_policy,
    make_scoring_wrapper,
    response_log_probs,
    same_leaves,
    steps,
)

COEFF = 0.3
WRITTEN = {
    "RetrieveLogProb": [("next", "ref_log_probs", "full")],
    "KLComputation": [("next", "kl_penalty"), ("next", "reward")],
    "RetrieveKL": [
        ("next", "log_probs", "full"),
        ("next", "ref_log_probs", "full"),
        ("next", "kl_penalty"),
        ("next", "reward"),
    ],
    "KLRewardTransform": [("next", "kl_penalty"), ("next", "ref_log_probs"), ("next", "reward")],
}
NAMES = list(WRITTEN)


class Lab:
    """The models, the transforms under test, and the entries they read."""

    def __init__(self, tokenizer: Any, policy_model: Any, ref_model: Any, padded: bool) -> None:
        self.tokenizer, self.policy_model, self.ref_model, self.padded = tokenizer, policy_model, ref_model, padded
        self.policy = make_policy(policy_model, tokenizer, pad_output=padded)

    def wrapper(self, model: Any, key: str) -> Any:
        return make_scoring_wrapper(model, self.tokenizer, pad_output=self.padded, log_probs_key=key)

    def make(self, name: str) -> Transform:
        gen, ref = self.wrapper(self.policy_model, "log_probs"), self.wrapper(self.ref_model, "ref_log_probs")
        if name == "RetrieveLogProb":
            return RetrieveLogProb(ref)
        if name == "KLComputation":
            return KLComputation(coeff=COEFF)
        if name == "RetrieveKL":
            return RetrieveKL(gen, ref, coeff=COEFF)
        return KLRewardTransform(ref, coef=COEFF)

    def before(self, name: str) -> list[Transform]:
        """Transforms whose output ``name`` reads."""
        gen = RetrieveLogProb(self.wrapper(self.policy_model, "log_probs"))
        ref = RetrieveLogProb(self.wrapper(self.ref_model, "ref_log_probs"))
        return {"KLComputation": [gen, ref], "KLRewardTransform": [gen]}.get(name, [])

    def data(self, name: str, envs: int = 2, turns: int = 1) -> TensorDictBase:
        return collect(self.tokenizer, self.policy, *self.before(name), envs=envs, turns=turns)

    def check(self, name: str, step: TensorDictBase, outcome: float) -> None:
        """Compare a step with numbers from one plain forward for each model."""
        gen = response_log_probs(self.policy_model, step)
        ref = response_log_probs(self.ref_model, step)
        response = torch.zeros_like(gen, dtype=torch.bool)
        response[len(step["tokens", "prompt"]) :] = True
        response &= step["masks", "all_attention_mask"]
        kl = gen - ref
        reward = -COEFF * kl
        reward[response.nonzero()[-1]] += outcome
        feature = name == "KLRewardTransform"
        want = {
            ("next", "log_probs", "full"): gen,
            ("next", "ref_log_probs", "full"): ref,
            ("next", "kl_penalty"): kl.unsqueeze(-1) if feature else kl,
            ("next", "ref_log_probs"): ref.unsqueeze(-1),
            ("next", "reward"): reward.unsqueeze(-1),
        }
        assert (gen[response] != 0).all(), "the oracle itself must score every token"
        for key in WRITTEN[name]:
            found = step[key]
            assert found.dtype == torch.float32
            assert not found.requires_grad
            assert_near(found, want[key], **FORWARD, msg=f"{name} {key}")
            assert (found.reshape(len(gen), -1)[~response] == 0).all()


@pytest.fixture
def lab(tokenizer: Any, policy_model: Any, ref_model: Any, padded: bool) -> Lab:
    return Lab(tokenizer, policy_model, ref_model, padded)


BATCHES: dict[str, Callable[[TensorDictBase], TensorDictBase]] = {
    "no batch dimension": lambda td: td[1, 0],
    "one": lambda td: td[:, 0],
    "two": lambda td: td,
}


@pytest.mark.parametrize("batch", list(BATCHES))
@pytest.mark.parametrize("name", NAMES)
def test_direct_call(lab: Lab, name: str, batch: str) -> None:
    data = BATCHES[batch](lab.data(name, envs=2, turns=2))
    before = [leaves(step) for step in steps(data)]
    result = lab.make(name)(data)
    outcomes = {
        "no batch dimension": [OUTCOMES[1]],
        "one": OUTCOMES[:2],
        "two": [o for o in OUTCOMES[:2] for _ in "ab"],
    }
    for step, was, outcome in zip(steps(result), before, outcomes[batch], strict=True):
        lab.check(name, step, outcome)
        assert same_leaves(was, step, except_for=WRITTEN[name])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("envs", "turns"), [(2, 1), (3, 3)])
def test_chat_env(lab: Lab, name: str, envs: int, turns: int) -> None:
    torch.manual_seed(0)
    env = make_env(lab.tokenizer, *lab.before(name), lab.make(name), envs=envs, turns=turns)
    rollout = env.rollout(turns, lab.policy)
    assert rollout.shape == (envs, turns)
    for i, env_rollout in enumerate(rollout.unbind(0)):
        for step in env_rollout.unbind(0):
            lab.check(name, step, OUTCOMES[i])


@pytest.mark.parametrize("name", NAMES)
def test_collector(lab: Lab, name: str) -> None:
    env = make_env(lab.tokenizer, *lab.before(name), lab.make(name), envs=2, turns=2)
    collector = LLMCollector(env, policy=lab.policy, dialog_turns_per_batch=4, total_dialog_turns=8)
    seen = 0
    for batch in collector:
        for i, env_batch in enumerate(batch.unbind(0)):
            for step in env_batch.unbind(0):
                lab.check(name, step, OUTCOMES[i])
                seen += 1
    collector.shutdown()
    assert seen == 8


@pytest.mark.parametrize("name", NAMES)
def test_replay_buffer_on_extend(lab: Lab, name: str) -> None:
    data = flat(lab.data(name, envs=3))
    before = [leaves(step) for step in steps(data)]
    buffer = ReplayBuffer(storage=LazyStackStorage(8), batch_size=3)
    buffer.append_transform(lab.make(name), invert=True)
    buffer.extend(data)
    assert len(buffer) == 3
    for i in range(3):
        lab.check(name, buffer._storage[i], OUTCOMES[i])
    for step, was in zip(steps(data), before, strict=True):
        assert same_leaves(was, step), "extend must leave the caller's data as it was"


@pytest.mark.parametrize("name", NAMES)
def test_replay_buffer_on_sample(lab: Lab, name: str) -> None:
    data = flat(lab.data(name, envs=3))
    buffer = ReplayBuffer(storage=LazyStackStorage(8), batch_size=4)
    buffer.extend(data)
    stored = [leaves(buffer._storage[i]) for i in range(3)]
    outcome_of = {str(step["tokens", "full"].tolist()): OUTCOMES[i] for i, step in enumerate(steps(data))}
    buffer.append_transform(lab.make(name))
    for _ in range(2):  # the second time too: what sampling wrote must not have reached the storage
        sample = buffer.sample()
        assert sample.shape == (4,)
        for step in steps(sample):
            lab.check(name, step, outcome_of[str(step["tokens", "full"].tolist())])
    for i in range(3):
        assert same_leaves(stored[i], buffer._storage[i])


@pytest.mark.parametrize("factory", [False, True], ids=["policy=", "policy_factory="])
def test_from_collector(lab: Lab, factory: bool) -> None:
    transform = RetrieveKL("from_collector", lab.wrapper(lab.ref_model, "ref_log_probs"), coeff=COEFF)
    env = make_env(lab.tokenizer, transform, envs=2, turns=2)
    policy = {"policy_factory": lambda: lab.policy} if factory else {"policy": lab.policy}
    settings = dict(lab.policy.tokenizer_kwargs), lab.policy.pad_output, lab.policy.in_keys
    collector = LLMCollector(env, **policy, dialog_turns_per_batch=4, total_dialog_turns=8)
    seen = 0
    for batch in collector:
        for i, env_batch in enumerate(batch.unbind(0)):
            for step in env_batch.unbind(0):
                lab.check("RetrieveKL", step, OUTCOMES[i])
                seen += 1
    collector.shutdown()
    assert seen == 8
    assert settings == (dict(lab.policy.tokenizer_kwargs), lab.policy.pad_output, lab.policy.in_keys)


@pytest.mark.parametrize("place", ["direct", "env"])
def test_from_collector_elsewhere_says_how(lab: Lab, place: str) -> None:
    transform = RetrieveKL("from_collector", lab.wrapper(lab.ref_model, "ref_log_probs"))
    data = lab.data("RetrieveKL")
    env = make_env(lab.tokenizer, transform) if place == "env" else None
    what = "collector is not set" if env else "container is not set"
    with pytest.raises(ValueError, match=rf"The {what}.*append the transform to the env.*LLMCollector"):
        _ = env.rollout(1, lab.policy) if env else transform(data)
