"""The Ray variants write the numbers of the local classes, to 1e-6, in every place where TorchRL runs a transform."""

import copy
import pickle
from functools import partial

import pytest
import ray
import torch
from ray import cloudpickle
from tensordict import lazy_stack
from torchrl.collectors.llm import RayLLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer

import ray_lab
from ray_lab import TOKENIZER, assert_same, chat_env, collected, greedy_policy, local, remote, scorers
from torchrl_llm_kl import RetrieveLogProb
from toy_rollouts import collect, flat, make_env, make_model, make_policy, steps

pytestmark = pytest.mark.usefixtures("transform_services")
KL = [("next", "log_probs", "full"), ("next", "ref_log_probs", "full"), ("next", "kl_penalty")]
NEXT_WRITTEN = {
    "RetrieveLogProb": [("next", "ref_log_probs", "full")],
    "RetrieveKL": KL,
    "KLRewardTransform": [("next", "kl_penalty"), ("next", "ref_log_probs"), ("next", "reward")],
    "from_collector": KL,
}
with_models = pytest.mark.parametrize("name", [name for name in ray_lab.NAMES if name != "from_collector"])


@pytest.fixture(params=[False, True], ids=["nested", "padded"])
def policy(request):
    return make_policy(make_model(TOKENIZER, seed=0), TOKENIZER, pad_output=request.param)


nested = pytest.mark.parametrize("policy", [False], ids=["nested"], indirect=True)


def both(name):
    """The Ray variant and the local class."""
    variant = remote(name)
    assert all(scorer.path == "remote" for scorer in scorers(variant))
    return [variant, local(name)]


def before(name):
    """Transforms whose output ``name`` reads."""
    return [RetrieveLogProb(ray_lab.GEN())] if name == "KLRewardTransform" else []


def data(policy, name, envs=2, turns=1):
    return collect(TOKENIZER, policy, *before(name), envs=envs, turns=turns)


def assert_alike(name, found, expected, *more, keys=None):
    ray_lab.assert_scored(found, *(NEXT_WRITTEN[name] if keys is None else keys), *more)
    assert_same(found, expected)


@with_models
def test_direct_call(policy, name):
    """On any number of batch dimensions, and without ``"next"``."""
    rollout, transforms = data(policy, name, turns=2), both(name)
    several = lazy_stack([rollout.clone(), rollout[:, [1, 0]].clone()])
    for given in (rollout[1, 0], rollout[:, 0], rollout, several):
        assert_alike(name, *(transform(given.clone()) for transform in transforms))
    given = rollout.exclude("next")
    if name == "KLRewardTransform":
        for step, whole in zip(steps(given), steps(rollout), strict=True):
            step["log_probs", "full"] = whole["next", "log_probs", "full"]
    found, expected = (transform(given.clone()) for transform in transforms)
    assert found.get("next", None) is None
    assert_alike(name, found, expected, keys=[key[1:] for key in NEXT_WRITTEN[name]])


def assert_rollouts(name, envs, policy, turns):
    ray_lab.assert_same_specs(*envs)
    found, expected = [(torch.manual_seed(0), env.rollout(turns, policy))[1] for env in envs]
    assert found.shape[1] == turns
    assert_alike(name, found, expected)


@nested
@pytest.mark.parametrize(("name", "factory"), [*((name, False) for name in ray_lab.NAMES), ("from_collector", True)])
def test_collector(policy, name, factory):
    given = {"policy_factory": lambda: policy} if factory else {"policy": policy}
    envs = [make_env(TOKENIZER, *before(name), transform, turns=2) for transform in both(name)]
    found, expected = (collected(env, **given) for env in envs)
    assert found.shape == (2, 2, 2)
    assert_alike(name, found, expected)


@with_models
def test_replay_buffer(policy, name):
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
    assert_alike(name, *stored)
    assert_alike(name, *samples)


def pickled(thing):
    return pickle.loads(pickle.dumps(thing))


@with_models
def test_copies_and_pickled_env_factories(policy, name):
    given = data(policy, name)
    variant, original = both(name)
    expected = original(given.clone())
    variant(given.clone())  # connected: a copy must work from then on too
    for how in (copy.deepcopy, lambda transform: transform.clone(), pickled):
        found = how(variant)
        assert type(found) is type(variant)
        assert type(how(original)) is type(original)
        assert all(scorer.path == "remote" for scorer in scorers(found))
        assert_same(found(given.clone()), expected)
    factories = [partial(chat_env, partial(list, [*before(name), each]), turns=3) for each in (variant, original)]
    assert_rollouts(name, [cloudpickle.loads(cloudpickle.dumps(factory))() for factory in factories], policy, 3)


def test_ray_collector():
    collector = RayLLMCollector(
        partial(ray_lab.in_worker, partial(ray_lab.variants, remote("from_collector"))),
        policy_factory=greedy_policy,
        dialog_turns_per_batch=4,
        total_dialog_turns=8,
        remote_config={"num_cpus": 0.2},
    )
    found = lazy_stack([collector.next(), collector.next()])
    collector.shutdown()
    ray.kill(collector._collector)
    expected = collected(chat_env(ray_lab.local_variants), policy=greedy_policy())
    assert_alike("from_collector", found, expected, ("next", "again", "full"), ("next", "feature_kl"))
