"""Every transform in every place that TorchRL runs one, padded and nested, against the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase, lazy_stack
from torch import Tensor
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
        self.scores: dict[Any, Any] = {}

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

    def plain(self, step: TensorDictBase) -> tuple[Tensor, Tensor]:
        ids = (len(step["tokens", "prompt"]), *step["tokens", "full"].tolist())
        if ids not in self.scores:
            self.scores[ids] = tuple(response_log_probs(m, step) for m in (self.policy_model, self.ref_model))
        return self.scores[ids]

    def check(self, name: str, step: TensorDictBase, outcome: float) -> None:
        """Compare a step with numbers from one plain forward for each model."""
        gen, ref = self.plain(step)
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


def in_layouts(first: bool) -> pytest.MarkDecorator:
    """Each transform in one of the layouts; half of the places have the others."""
    pairs = [(name, (i % 2 == 0) == first) for i, name in enumerate(NAMES)]
    ids = [f"{name}-{'padded' if padded else 'nested'}" for name, padded in pairs]
    return pytest.mark.parametrize(("name", "padded"), pairs, indirect=["padded"], ids=ids)


BATCHES: dict[str, tuple[Callable[[TensorDictBase], TensorDictBase], list[float]]] = {
    "no batch dimension": (lambda td: td[1, 0], [OUTCOMES[1]]),
    "one": (lambda td: td[:, 0], [*OUTCOMES[:2]]),
    "two": (lambda td: td, [OUTCOMES[0]] * 2 + [OUTCOMES[1]] * 2),
    "three": (lambda td: td[:, None], [OUTCOMES[0]] * 2 + [OUTCOMES[1]] * 2),
    "three, of a lazy stack of lazy stacks": (
        lambda td: lazy_stack([td, td.clone()]),
        ([OUTCOMES[0]] * 2 + [OUTCOMES[1]] * 2) * 2,
    ),
}


@in_layouts(True)
def test_defect_27_a_direct_call_on_any_number_of_batch_dimensions(lab: Lab, name: str) -> None:
    rollout = lab.data(name, envs=2, turns=2)
    for reshape, outcomes in BATCHES.values():
        data = reshape(rollout.clone())
        before = [leaves(step) for step in steps(data)]
        result = lab.make(name)(data)
        assert result.shape == data.shape
        for step, was, outcome in zip(steps(result), before, outcomes, strict=True):
            lab.check(name, step, outcome)
            assert same_leaves(was, step, except_for=WRITTEN[name])


@in_layouts(False)
def test_chat_env(lab: Lab, name: str) -> None:
    """Each turn is charged its own tokens alone."""
    torch.manual_seed(0)
    env = make_env(lab.tokenizer, *lab.before(name), lab.make(name), envs=3, turns=3)
    rollout = env.rollout(3, lab.policy)
    assert rollout.shape == (3, 3)
    for outcome, turns in zip(OUTCOMES, rollout.unbind(0), strict=False):
        for step in turns.unbind(0):
            lab.check(name, step, outcome)


def check_collected(lab: Lab, name: str, collector: LLMCollector) -> None:
    seen = 0
    for batch in collector:
        for outcome, turns in zip(OUTCOMES, batch.unbind(0), strict=False):
            for step in turns.unbind(0):
                lab.check(name, step, outcome)
                seen += 1
    collector.shutdown()
    assert seen == 8


BATCHED = {"dialog_turns_per_batch": 4, "total_dialog_turns": 8}


@in_layouts(True)
def test_collector(lab: Lab, name: str) -> None:
    env = make_env(lab.tokenizer, *lab.before(name), lab.make(name), envs=2, turns=2)
    check_collected(lab, name, LLMCollector(env, policy=lab.policy, **BATCHED))


@in_layouts(True)
def test_defect_25_26_replay_buffer_on_extend(lab: Lab, name: str) -> None:
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


@in_layouts(False)
def test_defect_25_26_replay_buffer_on_sample(lab: Lab, name: str) -> None:
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


def settings_of(policy: Any) -> dict[str, Any]:
    kinds = (dict, list, bool, str, tuple, int)
    return {key: copy.copy(v) for key, v in vars(policy).items() if isinstance(v, kinds) and key != "collector"}


@pytest.mark.parametrize(
    ("padded", "given"), [(True, "policy"), (False, "policy_factory")], indirect=["padded"], ids=["padded", "factory"]
)
def test_defect_05_09_from_collector(lab: Lab, given: str) -> None:
    """It starts, its specs are known before any collector is, and the policy is never changed."""
    transform = RetrieveKL("from_collector", lab.wrapper(lab.ref_model, "ref_log_probs"), coeff=COEFF)
    env = make_env(lab.tokenizer, transform, envs=2, turns=2)
    assert env.full_observation_spec["kl_penalty"].shape == (2, -1)
    settings = settings_of(lab.policy)
    policy = {given: lab.policy if given == "policy" else lambda: lab.policy}
    check_collected(lab, "RetrieveKL", LLMCollector(env, **policy, **BATCHED))
    assert settings_of(lab.policy) == settings


@pytest.mark.parametrize("padded", [True], indirect=True)
def test_from_collector_elsewhere_says_how(lab: Lab) -> None:
    transform = RetrieveKL("from_collector", lab.wrapper(lab.ref_model, "ref_log_probs"))
    data = lab.data("RetrieveKL")
    with pytest.raises(ValueError, match=r"The container is not set.*append the transform to the env.*LLMCollector"):
        transform(data)
    env = make_env(lab.tokenizer, transform)
    with pytest.raises(ValueError, match=r"The collector is not set.*append the transform to the env.*LLMCollector"):
        env.rollout(1, lab.policy)
