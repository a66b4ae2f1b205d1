"""The defects of torchrl 0.14.1's Ray classes, one by one, are absent here."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.actor import ActorMethod
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from closeness import assert_near
from ray_lab import (
    BY_VALUE,
    COEFF,
    CPUS,
    GEN,
    REF,
    SERVED,
    SERVICE,
    TOKENIZER,
    VALUE,
    assert_same,
    collected,
    greedy_policy,
    local,
)
from remote_models import broken
from torchrl_llm_kl import FixedKLCoefficient, KLRewardTransform, RetrieveKL, RetrieveLogProb
from torchrl_llm_kl.service import (
    RayKLRewardTransform,
    RayRetrieveKL,
    RayRetrieveLogProb,
    ScoringService,
    ServiceConfigError,
)
from toy_rollouts import make_env
from waits import until

pytestmark = pytest.mark.usefixtures("transform_services")
SHARED: dict[str, Any] = {"actor_name": SERVICE, **SERVED}


def rows_of(td: Any, key: Any) -> list[Tensor]:
    """The rows of an entry with or without padding."""
    return [row[key] for row in td.unbind(0)]


def data(seed: int = 0) -> TensorDictBase:
    """Four responses of up to six tokens to prompts of three, with the policy's log-probs and a reward."""
    rng = torch.Generator().manual_seed(seed)
    full = torch.randint(200, (4, 9), generator=rng)
    attention = torch.arange(9) < torch.tensor([[9], [7], [5], [8]])
    return TensorDict(
        {
            "tokens": {"full": full, "prompt": full[:, :3].clone()},
            "masks": {"all_attention_mask": attention},
            "log_probs": {"full": -torch.rand(4, 9, generator=rng)},
            "next": TensorDict(reward=torch.tensor([[1.0], [0.0], [2.0], [-1.0]]), batch_size=[4]),
        },
        batch_size=[4],
    )


def named(prefix: str) -> list[str]:
    return [
        actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True) if actor["name"].startswith(prefix)
    ]


def assert_gone(prefix: str, *, within: float) -> None:
    """Wait until no actor has a name with this prefix."""
    until(lambda: not named(prefix), seconds=within)


# ------------------------------------------------------------------ 16, 17, 18: construction and first use


@pytest.mark.parametrize("make", [RayRetrieveKL, partial(RetrieveKL, service_backend="ray")], ids=["class", "argument"])
def test_defect_16_factories_beside_the_defaults(make: Callable[..., Any]) -> None:
    transform = make(gen_model_factory=GEN, ref_model_factory=REF, coeff=COEFF, **SHARED)
    assert [part.scorer.path for part in list(transform)[:2]] == ["remote", "remote"]
    assert_same(transform(data()), local("RetrieveKL")(data()))


@pytest.mark.parametrize("which", ["gen_model", "ref_model"])
def test_defect_16_a_model_and_a_factory_are_still_refused(which: str) -> None:
    made = set(named(""))
    models = {"gen_model": "from_collector", "ref_model": None, which: GEN()}
    with pytest.raises(ValueError, match=f"Cannot provide both '{which}' and '{which}_factory'"):
        RayRetrieveKL(**models, gen_model_factory=GEN, ref_model_factory=REF, **CPUS)
    assert set(named("")) == made, "no service is started for arguments that are refused"


def test_defect_17_a_model_by_value() -> None:
    transform = RayRetrieveLogProb(BY_VALUE(), **VALUE)
    assert_same(transform(data()), RetrieveLogProb(BY_VALUE())(data()))


def test_defect_18_from_collector_beside_a_served_reference() -> None:
    variant = RayRetrieveKL("from_collector", ref_model_factory=REF, coeff=COEFF, **SHARED)
    policy, gen = greedy_policy(), RayRetrieveLogProb(model_factory=GEN, **{**SHARED, "actor_name": f"{SERVICE}-gen"})
    before = gen.model.call(0, "stats")["requests"]
    found, expected = (
        collected(make_env(TOKENIZER, transform, turns=2), turns=4, policy=policy)
        for transform in (variant, local("from_collector"))
    )
    assert_same(found, expected)
    assert gen.model.call(0, "stats")["requests"] == before, "the policy is scored in its own process"


def test_defect_18_kl_reward_transform_again_and_again() -> None:
    variant, original = RayKLRewardTransform(ref_model_factory=REF, coef=COEFF, **SHARED), local("KLRewardTransform")
    for seed in range(3):
        assert_same(variant(data(seed)), original(data(seed)))


# ------------------------------------------------------------------ 19: errors of constructors


@pytest.mark.slow
def test_defect_19_errors_of_the_factory_are_raised_at_construction() -> None:
    with pytest.raises(OSError, match=r"^no such checkpoint: /nowhere$"):
        RayRetrieveKL(gen_model_factory=GEN, ref_model_factory=broken, actor_name="defects-broken", **CPUS)
    assert_gone("defects-broken", within=20)


UNSUPPORTED = {
    "an exact KL needs the models in this": [
        partial(RayRetrieveKL, GEN(), ref_model_factory=REF, estimator="exact"),
        partial(RayRetrieveLogProb, model_factory=REF, reference=GEN()),
    ],
    "returns no gradient": [
        partial(RayRetrieveKL, GEN(), ref_model_factory=REF, detach=False),
        partial(RayRetrieveLogProb, model_factory=REF, detach=False),
    ],
}


def test_defect_19_unsupported_arguments_are_refused_at_construction() -> None:
    made = set(named(""))
    for message, calls in UNSUPPORTED.items():
        for make in calls:
            with pytest.raises(ValueError, match=message):
                make(**CPUS)
    assert set(named("")) == made


AS_LOCAL: dict[str, Callable[..., Any]] = {
    "ref_model cannot be None": RayRetrieveKL,
    "Must provide exactly one of 'ref_model' or 'ref_model_factory'": RayKLRewardTransform,
    "reward_placement must be one": partial(RayRetrieveKL, ref_model_factory=REF, reward_placement="first"),
    "scope must be 'turn' or 'full'": partial(RayRetrieveLogProb, model_factory=REF, scope="word"),
    "Only one in_key/out_key": partial(RayKLRewardTransform, ref_model_factory=REF, in_keys=["a", "b"]),
}


def test_defect_19_errors_of_the_local_class_are_unchanged() -> None:
    for message, make in AS_LOCAL.items():
        with pytest.raises(ValueError, match=message):
            make(**SHARED)
    assert set(named(SERVICE)) >= {f"{SERVICE}:0", f"{SERVICE}-gen:0"}, "a service that others use stays alive"


# ------------------------------------------------------------------ 20: concurrent creation


@ray.remote(num_cpus=0)
def _create(name: str, meeting: str, parties: int) -> tuple[int, int, list[Tensor]]:
    """Create or find the service at the same moment as other processes; pids here and there, and the scores."""
    place = Path(meeting)
    (place / str(os.getpid())).touch()
    until(lambda: len(list(place.iterdir())) >= parties)
    service = ScoringService(factory=REF, name=name, **CPUS)
    found = RetrieveLogProb(service.model)(data())
    return os.getpid(), service.stats()[0]["pid"], rows_of(found, ("next", "ref_log_probs", "full"))


Race = tuple[list[tuple[int, int, list[Tensor]]], ScoringService]


@pytest.fixture(scope="module")
def race(tmp_path_factory: pytest.TempPathFactory) -> Race:
    """Results of each creator, and the service."""
    meeting = str(tmp_path_factory.mktemp("race"))
    found = ray.get([_create.remote("defects-race", meeting, 2) for _ in range(2)])
    return found, ScoringService(factory=REF, name="defects-race", **CPUS)


@pytest.mark.slow
def test_defect_20_all_creators_get_the_same_actor(race: Race) -> None:
    creators, _ = race
    assert len({process for process, _, _ in creators}) == 2
    assert len({replica for _, replica, _ in creators}) == 1
    expected = rows_of(RetrieveLogProb(REF())(data()), ("next", "ref_log_probs", "full"))
    for _, _, found in creators:
        assert_near(found, expected, size=16, dtype=torch.float32)


def test_defect_20_a_name_with_another_configuration_shows_the_difference() -> None:
    others: dict[str, dict[str, Any]] = {
        r"model: .*wrapper": {"model_factory": BY_VALUE},
        r"max_wait: it has 0\.2, requested 0\.7": {"model_factory": REF, "max_wait": 0.7},
        r"memory: it has \d+, requested 5": {"model_factory": REF, "memory": 5},
    }
    for shows, other in others.items():
        with pytest.raises(ServiceConfigError, match=rf"'{SERVICE}.*in use with another configuration.*{shows}"):
            RayRetrieveLogProb(**{**SHARED, **other})


# ------------------------------------------------------------------ 21: crash and shutdown


def test_defect_21_a_killed_actor_comes_back() -> None:
    transform, original = RayRetrieveLogProb(BY_VALUE(), **VALUE), RetrieveLogProb(BY_VALUE())
    before = transform.model.call(0, "stats")["pid"]
    os.kill(before, signal.SIGKILL)
    assert_same(transform(data()), original(data()))
    assert transform.model.call(0, "stats")["pid"] != before
    assert_same(transform(data(1)), original(data(1)))


@pytest.mark.slow
def test_defect_21_shutdown_leaves_no_named_actor(race: Race) -> None:
    _, service = race
    assert sorted(named("defects-race")) == ["defects-race:0", "defects-race:control"]
    service.shutdown()
    assert_gone("defects-race", within=5)


@pytest.mark.slow
def test_defect_21_a_service_ends_with_its_last_client() -> None:
    first, second = (RayRetrieveLogProb(model_factory=REF, actor_name="defects-last", **CPUS) for _ in "ab")
    first.model.close()
    time.sleep(12)
    assert_same(second(data()), RetrieveLogProb(REF())(data()))
    second.model.close()
    assert_gone("defects-last", within=45)


# ------------------------------------------------------------------ 22: many callers


def test_defect_22_one_batch_and_a_bad_request_fails_alone() -> None:
    transform, original = RayRetrieveLogProb(model_factory=REF, **SHARED), RetrieveLogProb(REF())
    callers = [pickle.loads(pickle.dumps(transform)) for _ in range(6)]
    requests = [data(seed) for seed in range(6)]
    requests[2]["tokens", "full"][1, 5] = 5000
    busy = data().repeat(400)
    before = transform.model.call(0, "stats")
    with ThreadPoolExecutor(7) as pool:
        first = pool.submit(transform, busy)
        time.sleep(0.1)
        answers = [pool.submit(caller, request.clone()) for caller, request in zip(callers, requests, strict=True)]
    first.result()
    after = transform.model.call(0, "stats")
    assert after["requests"] - before["requests"] == 7
    assert after["batches"] - before["batches"] <= 3, "requests that came while the model was busy share a batch"
    for i in (0, 1, 3, 4, 5):
        assert_same(answers[i].result(), original(requests[i].clone()))
    with pytest.raises(ValueError, match="token id 5000 at sequence 1, position 5"):
        answers[2].result()
    assert_same(callers[2](data(2)), original(data(2)))


# ------------------------------------------------------------------ 23: attributes


def assert_written(variant: Any, original: Any, name: str, value: Any) -> None:
    """An attribute written on the client can be read there, and changes the results as in the local class."""
    was = variant(data())
    for transform in (variant, original):
        setattr(transform, name, value)
    assert getattr(variant, name) == value or isinstance(getattr(variant, name), torch.nn.Module)
    found = variant(data())
    assert_same(found, original(data()))
    numbers = [(rows_of(found, key), rows_of(was, key)) for key in found.keys(True, True) if key[0] == "next"]
    assert any(not torch.equal(a, b) for now, before in numbers for a, b in zip(now, before, strict=True))


WRITES = [("temperature", 0.5), ("assistant_only", False)]


def test_defect_23_attributes_of_retrieve_log_prob() -> None:
    for name, value in WRITES:
        assert_written(RayRetrieveLogProb(model_factory=REF, **SHARED), RetrieveLogProb(REF()), name, value)


@pytest.mark.parametrize("name", ["temperature", "assistant_only", "coeff", "reward_placement"])
def test_defect_23_attributes_of_retrieve_kl(name: str) -> None:
    variant = RayRetrieveKL(gen_model_factory=GEN, ref_model_factory=REF, coeff=COEFF, **SHARED)
    value = {**dict(WRITES), "coeff": FixedKLCoefficient(0.7), "reward_placement": "broadcast"}[name]
    assert_written(variant, local("RetrieveKL"), name, value)


def test_defect_23_attributes_of_kl_reward_transform() -> None:
    for name, value in [*WRITES, ("coef", 0.7), ("reward_placement", "broadcast")]:
        variant = RayKLRewardTransform(ref_model_factory=REF, coef=COEFF, **SHARED)
        assert_written(variant, KLRewardTransform(REF(), coef=COEFF), name, value)


def test_defect_23_an_adaptive_coefficient_and_a_user_attribute() -> None:
    variant = RayRetrieveKL(gen_model_factory=GEN, ref_model_factory=REF, coeff=COEFF, **SHARED)
    assert variant.coeff() == pytest.approx(COEFF)
    variant.note = "mine"
    assert pickle.loads(pickle.dumps(variant)).note == "mine"


# ------------------------------------------------------------------ 24: bytes on the wire


@pytest.mark.parametrize("name", ["RetrieveLogProb", "RetrieveKL", "KLRewardTransform"])
def test_defect_24_an_unrelated_entry_is_not_sent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transform: Any = {
        "RetrieveLogProb": partial(RayRetrieveLogProb, model_factory=REF),
        "RetrieveKL": partial(RayRetrieveKL, gen_model_factory=GEN, ref_model_factory=REF),
        "KLRewardTransform": partial(RayKLRewardTransform, ref_model_factory=REF),
    }[name](**SHARED)
    sizes: list[int] = []
    send = ActorMethod.remote

    def weigh(method: ActorMethod, *args: Any, **kwargs: Any) -> Any:
        if method._method_name == "score":
            sizes.append(len(ray.cloudpickle.dumps((args, kwargs))))
        return send(method, *args, **kwargs)

    transform(data())  # connected
    monkeypatch.setattr(ActorMethod, "remote", weigh)
    transform(data())
    small, large = sum(sizes), data()
    sizes.clear()
    large["pixels"] = torch.zeros(4, 2**19)
    large["next", "pixels"] = torch.zeros(4, 2**19)
    transform(large)
    assert 0 < small < 4096 * (2 if name == "RetrieveKL" else 1)
    assert abs(sum(sizes) - small) < 64
