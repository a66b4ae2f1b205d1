"""The Ray variants in every place where TorchRL runs a transform: they write what the local classes write, to 1e-6."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import ray
import torch
from ray import cloudpickle
from tensordict import TensorDictBase, lazy_stack
from torchrl.collectors.llm import RayLLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs import EnvBase, EnvCreator, Transform

from ray_lab import (
    GEN,
    NAMES,
    REF,
    SERVED,
    SERVICE,
    TOKENIZER,
    assert_same,
    assert_same_specs,
    assert_scored,
    chat_env,
    collected,
    greedy_policy,
    in_worker,
    local,
    local_variants,
    remote,
    scorers,
    variants,
)
from torchrl_llm_kl import RetrieveLogProb
from torchrl_llm_kl.service import RayRetrieveLogProb
from toy_rollouts import collect, flat, make_env, make_model, make_policy, steps

pytestmark = pytest.mark.usefixtures("transform_services")
NEXT_WRITTEN = {
    "RetrieveLogProb": [("next", "ref_log_probs", "full")],
    "RetrieveKL": [("next", "log_probs", "full"), ("next", "ref_log_probs", "full"), ("next", "kl_penalty")],
    "KLRewardTransform": [("next", "kl_penalty"), ("next", "ref_log_probs"), ("next", "reward")],
}
NEXT_WRITTEN["from_collector"] = NEXT_WRITTEN["RetrieveKL"]
WITH_MODELS = [name for name in NAMES if name != "from_collector"]


@pytest.fixture(params=[False, True], ids=["nested", "padded"])
def policy(request: pytest.FixtureRequest) -> Any:
    return make_policy(make_model(TOKENIZER, seed=0), TOKENIZER, pad_output=request.param)


def both(name: str) -> list[Transform]:
    """The Ray variant and the local class."""
    variant = remote(name)
    assert all(scorer.path == "remote" for scorer in scorers(variant))
    return [variant, local(name)]


def before(name: str) -> list[Transform]:
    """Transforms whose output ``name`` reads."""
    return [RetrieveLogProb(GEN())] if name == "KLRewardTransform" else []


def data(policy: Any, name: str, envs: int = 2, turns: int = 1) -> TensorDictBase:
    return collect(TOKENIZER, policy, *before(name), envs=envs, turns=turns)


BATCHES: dict[str, Callable[[TensorDictBase], TensorDictBase]] = {
    "no batch dimension": lambda td: td[1, 0],
    "one": lambda td: td[:, 0],
    "two": lambda td: td,
    "three": lambda td: lazy_stack([td.clone(), td[:, [1, 0]].clone()]),
}


@pytest.mark.parametrize("name", WITH_MODELS)
def test_direct_call(policy: Any, name: str) -> None:
    """On any number of batch dimensions, and without ``"next"``."""
    rollout = data(policy, name, turns=2)
    transforms = both(name)
    for select in BATCHES.values():
        found, expected = (transform(select(rollout).clone()) for transform in transforms)
        assert_scored(found, *NEXT_WRITTEN[name])
        assert_same(found, expected)
    given = rollout.exclude("next")
    if name == "KLRewardTransform":
        for step, whole in zip(steps(given), steps(rollout), strict=True):
            step["log_probs", "full"] = whole["next", "log_probs", "full"]
    found, expected = (transform(given.clone()) for transform in transforms)
    assert found.get("next", None) is None
    assert_scored(found, *[key[1:] for key in NEXT_WRITTEN[name]])
    assert_same(found, expected)


def rollouts(envs: list[EnvBase], policy: Any, turns: int) -> list[TensorDictBase]:
    assert_same_specs(*envs)
    return [(torch.manual_seed(0), env.rollout(turns, policy))[1] for env in envs]


@pytest.mark.parametrize("name", WITH_MODELS)
def test_chat_env(policy: Any, name: str) -> None:
    envs = [make_env(TOKENIZER, *before(name), transform, envs=3, turns=3) for transform in both(name)]
    found, expected = rollouts(envs, policy, 3)
    assert found.shape == (3, 3)
    assert_scored(found, *NEXT_WRITTEN[name])
    assert_same(found, expected)


@pytest.mark.parametrize("policy", [False], ids=["nested"], indirect=True)
@pytest.mark.parametrize(("name", "factory"), [*((name, False) for name in NAMES), ("from_collector", True)])
def test_collector(policy: Any, name: str, factory: bool) -> None:
    given = {"policy_factory": lambda: policy} if factory else {"policy": policy}
    found, expected = (
        collected(make_env(TOKENIZER, *before(name), transform, turns=2), **given) for transform in both(name)
    )
    assert found.shape == (2, 2, 2)
    assert_scored(found, *NEXT_WRITTEN[name])
    assert_same(found, expected)


@pytest.mark.parametrize("name", WITH_MODELS)
def test_replay_buffer(policy: Any, name: str) -> None:
    """On extend, and on sample."""
    given = flat(data(policy, name, envs=3))
    stored, samples = [], []
    for transform in both(name):
        buffer = ReplayBuffer(storage=LazyStackStorage(8), batch_size=3)
        buffer.append_transform(transform, invert=True)
        buffer.extend(given.clone())
        stored.append(lazy_stack([buffer._storage[i] for i in range(3)]))
        buffer = ReplayBuffer(storage=LazyStackStorage(8), batch_size=4)
        buffer.extend(given.clone())
        buffer.append_transform(transform.clone())
        torch.manual_seed(1)
        samples.append(lazy_stack([buffer.sample(), buffer.sample()]))
    for found, expected in (stored, samples):
        assert_scored(found, *NEXT_WRITTEN[name])
        assert_same(found, expected)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "clone": lambda transform: transform.clone(),
    "pickle": lambda transform: pickle.loads(pickle.dumps(transform)),
}


@pytest.mark.parametrize("policy", [False], ids=["nested"], indirect=True)
@pytest.mark.parametrize("name", WITH_MODELS)
def test_copies(policy: Any, name: str) -> None:
    given = data(policy, name)
    variant, original = both(name)
    expected = original(given.clone())
    variant(given.clone())  # connected: a copy must work from then on too
    for how in COPIES.values():
        found = how(variant)
        assert type(found) is type(variant)
        assert type(how(original)) is type(original)
        assert all(scorer.path == "remote" for scorer in scorers(found))
        assert_same(found(given.clone()), expected)


class Pickled:
    """An env factory as another process receives it."""

    def __init__(self, factory: Callable[[], EnvBase]) -> None:
        self.factory = cloudpickle.loads(cloudpickle.dumps(factory))

    def __call__(self) -> EnvBase:
        return self.factory()


@pytest.mark.parametrize("policy", [False], ids=["nested"], indirect=True)
@pytest.mark.parametrize("name", WITH_MODELS)
def test_pickled_env_factory(policy: Any, name: str) -> None:
    envs = [Pickled(partial(chat_env, partial(list, [*before(name), transform])))() for transform in both(name)]
    found, expected = rollouts(envs, policy, 2)
    assert_scored(found, *NEXT_WRITTEN[name])
    assert_same(found, expected)


@pytest.mark.parametrize("name", ["RetrieveLogProb", "RetrieveKL"])
def test_env_creator(name: str) -> None:
    """EnvCreator takes a step with a random action, of which only text can be scored."""
    policy = make_policy(make_model(TOKENIZER, seed=0), TOKENIZER, pad_output=False, input_mode="text")
    envs = []
    for transform in both(name):
        creator = EnvCreator(partial(chat_env, partial(list, [transform]), input_mode="text"))
        envs.append((pickle.loads(pickle.dumps(creator)) if name == "RetrieveKL" else creator)())
    found, expected = rollouts(envs, policy, 2)
    assert_scored(found, *NEXT_WRITTEN[name])
    assert_same(found, expected)


def test_ray_collector() -> None:
    collector = RayLLMCollector(
        partial(in_worker, partial(variants, remote("from_collector"))),
        policy_factory=greedy_policy,
        dialog_turns_per_batch=4,
        total_dialog_turns=8,
        remote_config={"num_cpus": 0.2},
    )
    found = lazy_stack([collector.next(), collector.next()])
    collector.shutdown()
    ray.kill(collector._collector)
    expected = collected(chat_env(local_variants), policy=greedy_policy())
    assert_scored(found, *NEXT_WRITTEN["from_collector"], ("next", "again", "full"), ("next", "feature_kl"))
    assert_same(found, expected)


class MyVariant(RayRetrieveLogProb):
    """A user's subclass of a Ray variant."""


def test_subclasses() -> None:
    variant = MyVariant(model_factory=REF, service_backend="ray", actor_name=SERVICE, **SERVED)
    assert type(variant) is MyVariant
    assert variant.scorer.path == "remote"
