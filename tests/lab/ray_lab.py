"""Transforms with local and with remote models, and the places where they run."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import tensordict
import torch
from tensordict import lazy_stack
from torch import Tensor
from torchrl.collectors.llm import LLMCollector

from closeness import assert_near
from ray_parts import scoring_model
from torchrl_llm_kl import KLRewardTransform, RetrieveKL, RetrieveLogProb
from torchrl_llm_kl.service import RayKLRewardTransform, RayRetrieveKL, RayRetrieveLogProb
from toy_rollouts import leaves, make_env, make_model, make_policy, make_tokenizer, steps
from waits import wait_for_replicas

wait_for_replicas()  # at import, so that it applies in actors too
CPUS = {"num_cpus": 0.1}
COEFF = 0.3
SERVICE = "lab"  # the reference; f"{SERVICE}-gen" has the policy
SERVED = {"max_wait": 0.2, **CPUS}
NAMES = ["RetrieveLogProb", "RetrieveKL", "from_collector", "KLRewardTransform"]
TOKENIZER = make_tokenizer()


# In float64, since caches of a service would show in the last bit of float32.
GEN, REF, BY_VALUE = (partial(scoring_model, seed) for seed in (0, 1, 3))
VALUE = {"actor_name": f"{SERVICE}-value", **CPUS}


def local(name):
    """A transform with its models in this process."""
    if name == "RetrieveLogProb":
        return RetrieveLogProb(REF())
    if name == "KLRewardTransform":
        return KLRewardTransform(REF(), coef=COEFF)
    return RetrieveKL("from_collector" if name == "from_collector" else GEN(), REF(), coeff=COEFF)


def remote(name):
    """A transform with its reference behind ``SERVICE``, and its policy behind another service or in the collector."""
    options = {"actor_name": SERVICE, **SERVED}
    if name == "RetrieveLogProb":
        return RayRetrieveLogProb(model_factory=REF, **options)
    if name == "KLRewardTransform":
        return RayKLRewardTransform(ref_model_factory=REF, coef=COEFF, **options)
    if name == "from_collector":
        return RayRetrieveKL(ref_model_factory=REF, coeff=COEFF, **options)
    return RayRetrieveKL(gen_model_factory=GEN, ref_model_factory=REF, coeff=COEFF, **options)


def scorers(transform):
    """The scorers of a transform's models, but not the scorer of a collector's policy."""
    if isinstance(transform, RetrieveKL):
        return [part.scorer for part in list(transform)[:2] if hasattr(part, "model")]
    return [transform.scorer]


def chat_env(make_transforms, turns=2):
    """A chat env, as an env factory returns it."""
    return make_env(TOKENIZER, *make_transforms(), turns=turns)


def greedy_policy():
    """A policy that generates the same tokens in every process."""
    policy = make_policy(make_model(TOKENIZER, seed=0), TOKENIZER, pad_output=False)
    policy.generate_kwargs["do_sample"] = False
    return policy


def collected(env, turns=8, **policy):
    """All batches of an :class:`LLMCollector` with four turns each, and the same tokens at every call."""
    torch.manual_seed(0)
    collector = LLMCollector(env, **policy, dialog_turns_per_batch=4, total_dialog_turns=turns)
    batches = list(collector)
    collector.shutdown()
    return lazy_stack(batches)


FEATURES = ["reward", "feature_kl", "feature_ref"]


def variants(made_elsewhere):
    """One transform of each class. The last two are created with the env, and write to their own keys."""
    options = {"actor_name": SERVICE, **SERVED}
    return [
        made_elsewhere,
        RayRetrieveLogProb(model_factory=REF, log_probs_full_key=("again", "full"), **options),
        RayKLRewardTransform(ref_model_factory=REF, add_to_reward=False, out_keys=FEATURES, **options),
    ]


def local_variants():
    return [
        local("from_collector"),
        RetrieveLogProb(REF(), log_probs_full_key=("again", "full")),
        KLRewardTransform(REF(), add_to_reward=False, out_keys=FEATURES),
    ]


def in_worker(make_transforms):
    tensordict.set_list_to_stack(True).set()
    return chat_env(make_transforms)


def start_together(*calls):
    """Results of concurrent calls. Actors that start concurrently take little longer than one."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def assert_same(found, expected):
    """Check that every entry of every step is equal, numbers up to rounding."""
    assert found.shape == expected.shape
    for one, other in zip(steps(found), steps(expected), strict=True):
        got, want = leaves(one), leaves(other)
        assert set(got) == set(want)
        for key, value in want.items():
            if isinstance(value, Tensor):
                assert got[key].dtype == value.dtype
                assert not got[key].requires_grad
                assert_near(got[key], value, size=16, dtype=torch.float32, msg=str(key))
            else:
                assert got[key] == value, key


def assert_same_specs(found, expected):
    """Check that two envs declare the same entries."""
    for name in ("observation", "reward", "done", "action", "state"):
        assert getattr(found, f"full_{name}_spec") == getattr(expected, f"full_{name}_spec"), name


def assert_scored(data, *keys):
    """Check that each step has non-zero numbers under ``keys``, since equal zeros would prove nothing."""
    for step in steps(data):
        for key in keys:
            assert torch.count_nonzero(step[key]) > 1, key
