"""The defects of torchrl 0.14.1's Ray classes, one by one, are absent here."""

import os
import pickle
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import ray
import torch
from tensordict import TensorDict

import ray_lab
from closeness import assert_near
from load import names
from ray_lab import BY_VALUE, COEFF, CPUS, GEN, REF, SERVED, SERVICE, VALUE, assert_same, local, remote
from remote_models import broken
from torchrl_llm_kl import ExactKL, FixedKLCoefficient, RetrieveKL, RetrieveLogProb, Sampling
from torchrl_llm_kl.scoring import ScoreOptions
from torchrl_llm_kl.service import (
    RayKLRewardTransform,
    RayRetrieveKL,
    RayRetrieveLogProb,
    ScoringService,
    ServiceConfigError,
)
from torchrl_llm_kl.service._connection import Connection
from toy_rollouts import make_env
from waits import until

pytestmark = pytest.mark.usefixtures("transform_services")
SHARED = {"actor_name": SERVICE, **SERVED}
FACTORIES = {"gen_model_factory": GEN, "ref_model_factory": REF}


def rows_of(td, key):
    """The rows of an entry with or without padding."""
    return [row[key] for row in td.unbind(0)]


def data(seed=0):
    """Four responses of up to six tokens to prompts of three, with the policy's log-probs and a reward."""
    rng = torch.Generator().manual_seed(seed)
    full = torch.randint(200, (4, 9), generator=rng)
    tokens = {"full": full, "prompt": full[:, :3].clone()}
    masks = {"all_attention_mask": torch.arange(9) < torch.tensor([[9], [7], [5], [8]])}
    after = TensorDict(reward=torch.tensor([[1.0], [0.0], [2.0], [-1.0]]), batch_size=[4])
    log_probs = {"full": -torch.rand(4, 9, generator=rng)}
    return TensorDict({"tokens": tokens, "masks": masks, "log_probs": log_probs, "next": after}, batch_size=[4])


@pytest.mark.parametrize("make", [RayRetrieveKL, partial(RetrieveKL, service_backend="ray")], ids=["class", "argument"])
def test_defect_16_factories_beside_the_defaults(make):
    transform = make(**FACTORIES, coeff=COEFF, **SHARED)
    assert [part.scorer.path for part in list(transform)[:2]] == ["remote", "remote"]
    assert_same(transform(data()), local("RetrieveKL")(data()))


def test_defect_18_from_collector_beside_a_served_reference():
    """The policy is scored in its own process: no service of it is asked."""
    variant = RayRetrieveKL("from_collector", ref_model_factory=REF, coeff=COEFF, **SHARED)
    policy = ray_lab.greedy_policy()
    found, expected = (
        ray_lab.collected(make_env(ray_lab.TOKENIZER, transform, turns=2), turns=4, policy=policy)
        for transform in (variant, local("from_collector"))
    )
    assert_same(found, expected)


@pytest.mark.slow
def test_defect_19_errors_of_the_factory_are_raised_at_construction():
    with pytest.raises(OSError, match=r"^no such checkpoint: /nowhere$"):
        RayRetrieveKL(gen_model_factory=GEN, ref_model_factory=broken, actor_name="defects-broken", **CPUS)
    until(lambda: not names("defects-broken"))


REFUSED = {
    "Cannot provide both 'gen_model' and 'gen_model_factory'": [partial(RayRetrieveKL, GEN(), **FACTORIES)],
    "Cannot provide both 'ref_model' and 'ref_model_factory'": [partial(RayRetrieveKL, ref_model=GEN(), **FACTORIES)],
    "an exact KL needs the models in this": [
        partial(RayRetrieveKL, GEN(), ref_model_factory=REF, estimator="exact"),
        partial(RayRetrieveLogProb, model_factory=REF, extras=[ExactKL(GEN())]),
    ],
    "returns no gradient": [
        partial(RayRetrieveKL, GEN(), ref_model_factory=REF, detach=False),
        partial(RayRetrieveLogProb, model_factory=REF, detach=False),
    ],
}


AS_LOCAL = {
    "ref_model cannot be None": [RayRetrieveKL],
    "Must provide exactly one of 'ref_model' or 'ref_model_factory'": [RayKLRewardTransform],
    "reward_placement must be one": [partial(RayRetrieveKL, ref_model_factory=REF, reward_placement="first")],
    "scope must be 'turn' or 'full'": [partial(RayRetrieveLogProb, model_factory=REF, scope="word")],
    "Only one in_key/out_key": [partial(RayKLRewardTransform, ref_model_factory=REF, in_keys=["a", "b"])],
}


def test_defect_16_19_arguments_are_refused_at_construction():
    """What a service cannot do is refused, and what the local class refuses too. No service starts, and none ends."""
    made = set(names(""))
    assert made >= {SERVICE, f"{SERVICE}-gen"}
    for table, settings in ((REFUSED, CPUS), (AS_LOCAL, SHARED)):
        for message, calls in table.items():
            for make in calls:
                with pytest.raises(ValueError, match=message):
                    make(**settings)
    assert set(names("")) == made


ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not find this folder


@ray.remote(num_cpus=0)
def _create(name, meeting, parties):
    """Create or find the service at the same moment as other processes; pids here and there, and the scores."""
    place = Path(meeting)
    (place / str(os.getpid())).touch()
    until(lambda: len(list(place.iterdir())) >= parties)
    service = ScoringService(factory=REF, name=name, **CPUS)
    found = RetrieveLogProb(service.model)(data())
    return os.getpid(), service.replicas()[0].pid, rows_of(found, ("next", "ref_log_probs", "full"))


@pytest.mark.slow
def test_defect_20_21_all_creators_get_the_same_actor_and_shutdown_leaves_none(tmp_path):
    creators = ray.get([_create.remote("defects-race", str(tmp_path), 2) for _ in range(2)])
    service = ScoringService(factory=REF, name="defects-race", **CPUS)
    assert len({process for process, _, _ in creators}) == 2
    assert len({replica for _, replica, _ in creators}) == 1
    expected = rows_of(RetrieveLogProb(REF())(data()), ("next", "ref_log_probs", "full"))
    for _, _, found in creators:
        assert_near(found, expected, size=16, dtype=torch.float32)
    assert len(service.replicas()) == 1
    service.shutdown()
    until(lambda: not names("defects-race"))


def test_defect_20_a_name_with_another_configuration_shows_the_difference():
    others = {
        r"model: .*wrapper": {"model_factory": BY_VALUE},
        r"max_wait: it has 0\.2, requested 0\.7": {"model_factory": REF, "max_wait": 0.7},
        r"memory: it has \d+, requested 5": {"model_factory": REF, "memory": 5},
    }
    for shows, other in others.items():
        with pytest.raises(ServiceConfigError, match=rf"'{SERVICE}.*in use with another configuration.*{shows}"):
            RayRetrieveLogProb(**{**SHARED, **other})


def test_defect_17_21_a_model_by_value_whose_actor_is_killed_comes_back():
    transform, original = RayRetrieveLogProb(BY_VALUE(), **VALUE), RetrieveLogProb(BY_VALUE())
    assert_same(transform(data()), original(data()))
    before = transform.model.call("state").pid
    os.kill(before, signal.SIGKILL)
    assert_same(transform(data()), original(data()))
    assert transform.model.call("state").pid != before
    assert_same(transform(data(1)), original(data(1)))


@pytest.mark.slow
def test_defect_21_a_service_ends_with_its_last_client():
    first, second = (RayRetrieveLogProb(model_factory=REF, actor_name="defects-last", **CPUS) for _ in "ab")
    first.model.close()
    time.sleep(6)
    assert_same(second(data()), RetrieveLogProb(REF())(data()))
    second.model.close()
    until(lambda: not names("defects-last"), seconds=45)


def test_defect_22_concurrent_calls_and_a_bad_request_fails_alone():
    transform, original = RayRetrieveLogProb(model_factory=REF, **SHARED), RetrieveLogProb(REF())
    callers = [pickle.loads(pickle.dumps(transform)) for _ in range(6)]
    requests = [data(seed) for seed in range(6)]
    requests[2]["tokens", "full"][1, 5] = 5000
    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(caller, request.clone()) for caller, request in zip(callers, requests, strict=True)]
    for i in (0, 1, 3, 4, 5):
        assert_same(answers[i].result(), original(requests[i].clone()))
    with pytest.raises(ValueError, match="token id 5000 at sequence 1, position 5"):
        answers[2].result()
    assert_same(callers[2](data(2)), original(data(2)))


REWARD = {"reward_placement": "broadcast"}
WRITES = {"options": ScoreOptions(Sampling(0.5)), "assistant_only": False}
ATTRIBUTES = {
    "RetrieveLogProb": WRITES,
    "RetrieveKL": {**WRITES, "coeff": FixedKLCoefficient(0.7), **REWARD},
    "KLRewardTransform": {**WRITES, "coef": 0.7, **REWARD},
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_defect_18_23_attributes(name):
    """An attribute written on the client can be read there, and changes the results as in the local class."""
    for attribute, value in ATTRIBUTES[name].items():
        variant, original = remote(name), local(name)
        was = variant(data())
        for transform in (variant, original):
            setattr(transform, attribute, value)
        assert getattr(variant, attribute) == value or isinstance(getattr(variant, attribute), torch.nn.Module)
        found = variant(data())
        assert_same(found, original(data()))
        numbers = [(rows_of(found, key), rows_of(was, key)) for key in found.keys(True, True) if key[0] == "next"]
        assert any(not torch.equal(a, b) for now, before in numbers for a, b in zip(now, before, strict=True))
    variant = remote(name)
    variant.note = "mine"
    assert pickle.loads(pickle.dumps(variant)).note == "mine"
    assert name != "RetrieveKL" or variant.coeff() == pytest.approx(COEFF)


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_defect_24_an_unrelated_entry_is_not_sent(name, monkeypatch):
    transform, sizes, send = remote(name), [], Connection.send

    def weigh(connection, method, *args):
        sizes.append(len(pickle.dumps(args)))
        return send(connection, method, *args)

    transform(data())  # connected
    monkeypatch.setattr(Connection, "send", weigh)
    transform(data())
    small, large = sum(sizes), data()
    sizes.clear()
    large["pixels"] = torch.zeros(4, 2**19)
    large["next", "pixels"] = torch.zeros(4, 2**19)
    transform(large)
    assert 0 < small < 4096 * (2 if name == "RetrieveKL" else 1)
    assert abs(sum(sizes) - small) < 64
