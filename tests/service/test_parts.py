"""What the service is made of, without Ray: what travels, who scores it, what a model was made from."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
import torch
from remote_models import model, slow
from tensordict import TensorDict
from torch import nn

from torchrl_llm_kl import LogProbScorer, Ragged, RetrieveKL
from torchrl_llm_kl.rollouts import ModelInterface
from torchrl_llm_kl.scoring import Scores
from torchrl_llm_kl.service import RayRetrieveLogProb, RemoteModel, ScoringService
from torchrl_llm_kl.service._batcher import BatchRecord
from torchrl_llm_kl.service._core import ScoringCore
from torchrl_llm_kl.service._errors import ServiceError, ServiceOverloaded, WeightVersionError, portable
from torchrl_llm_kl.service._lifecycle import HeldModel, ServiceSpec
from torchrl_llm_kl.service._metrics import RayMetrics
from torchrl_llm_kl.service._routing import Router
from torchrl_llm_kl.service._source import describe_source
from torchrl_llm_kl.service._state_dict import state_dict_of
from torchrl_llm_kl.service._stats import ReplicaStats
from torchrl_llm_kl.service._wire import Reply, Request, Settings

# ---------------------------------------------------------------------- what travels


@pytest.mark.parametrize("top", [96, 2**31 - 1, 2**40])
@pytest.mark.parametrize("masked", [True, False])
def test_requests_arrive_as_they_were_sent(top: int, masked: bool) -> None:
    tokens, lengths = torch.tensor([5, 0, top, 7, 1, 2]), torch.tensor([3, 0, 1, 2])
    mask = torch.tensor([False, True, True, False, False, True]) if masked else None
    settings = Settings(0.5, False, "bfloat16", True, True)
    packed = Request.of(tokens, lengths, mask, settings, version=3, caller="me").pack()
    assert type(packed) is bytes
    found = Request.unpack(packed)
    assert torch.equal(torch.cat(found.rows()), tokens)
    assert [len(row) for row in found.rows()] == lengths.tolist()
    assert found.flat_mask().tolist() == (mask.tolist() if masked else [False, True, True, False, False, True])
    assert (found.settings, found.version, found.caller, found.num_tokens) == (settings, 3, "me", 6)


def test_a_request_is_as_small_as_its_tokens() -> None:
    """4 bytes for a token, 8 for a sequence, a bit for the mask, and less than 200 for all else."""
    tokens = torch.arange(4096) % 97
    packed = Request.of(tokens, torch.full((8,), 512), tokens > 3, Settings(), version=None, caller="me").pack()
    assert len(packed) < 4 * 4096 + 8 * 8 + 4096 // 8 + 200


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_replies_arrive_as_they_were_sent(dtype: type) -> None:
    reply = Reply(np.array([-0.1, -2.5], dtype), np.array([1.5, 0.0], dtype), 4)
    packed = reply.pack()
    assert type(packed) is bytes
    found = Reply.unpack(packed)
    assert found.log_prob.dtype == dtype
    assert found.log_prob.tolist() == reply.log_prob.tolist()
    assert found.entropy is not None
    assert found.entropy.tolist() == [1.5, 0.0]
    assert found.version == 4
    assert Reply.unpack(Reply(reply.log_prob, None, 0).pack()).entropy is None


@pytest.mark.parametrize(
    ("tokens", "mask", "message"),
    [
        (torch.tensor([1.5, 2.0]), None, "token ids must be whole numbers"),
        (torch.tensor([True, False]), None, "token ids must be whole numbers"),
        (torch.tensor([1, 2]), torch.ones(2), "the mask must be boolean"),
    ],
)
def test_what_is_no_request(tokens: torch.Tensor, mask: torch.Tensor | None, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Request.of(tokens, torch.tensor([2]), mask, Settings(), version=None, caller="")


class Unpicklable(ValueError):
    def __init__(self, message: str, *, where: object) -> None:
        super().__init__(message)
        self.where = where


def test_errors_that_cannot_travel_keep_their_words() -> None:
    assert isinstance(portable(ServiceOverloaded("full")), ServiceOverloaded)
    found = portable(Unpicklable("too long", where=lambda: None))
    assert type(found) is ServiceError
    assert str(found) == "Unpicklable: too long"


# ---------------------------------------------------------------------- who scores it


def rows(count: int, *, prefix: int = 0, length: int = 40, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    start = np.arange(prefix)
    return [np.concatenate([start, rng.integers(0, 1000, length)]) for _ in range(count)]


def test_a_conversation_stays_where_it_is_as_it_grows() -> None:
    """Each turn asks for its own tokens, so that the prompt before them is another one each time."""
    router = Router(5)
    talks = rows(50)
    first = [router.order(talk[:20], 12, goes_on=True) for talk in talks]
    for end, scored in ((30, 25), (40, 33)):
        assert [router.order(talk[:end], scored, goes_on=True) for talk in talks] == first
    assert [Router(5).order(talk[:20], 12) for talk in talks] == first, "the same in another process"
    assert len({order[0] for order in first}) == 5


def test_what_was_remembered_longest_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchrl_llm_kl.service._routing._REMEMBERED", 3)
    router = Router(64)
    talks = rows(4)
    first = [router.order(talk[:20], 12, goes_on=True) for talk in talks]
    assert len(router._earlier) == 3
    assert sum(router._lengths.values()) == 3
    again = [router.order(talk, 33, goes_on=True) for talk in talks[1:]]
    assert again == first[1:]


@pytest.mark.parametrize("prefixes", [(0,), (100,), (30, 60), (10, 20, 30, 40)])
@pytest.mark.parametrize("scored", [1, 120], ids=["everything is scored", "the answer is scored"])
def test_the_work_spreads_whatever_the_system_prompts(prefixes: tuple[int, ...], scored: int) -> None:
    router = Router(4)
    router.order(np.zeros(0, np.int64), 0)  # an empty sequence changes nothing
    talks = [row for prefix in prefixes for row in rows(400 // len(prefixes), prefix=prefix, seed=prefix)]
    shares = np.bincount([router.order(talk, scored)[0] for talk in talks], minlength=4)
    assert shares.min() > 60, shares  # 100 each but for chance: 8.7 is one standard deviation


def test_answers_to_one_prompt_stay_together_in_every_process() -> None:
    prompts = rows(20, prefix=30, length=30)
    found = np.array(
        [
            [
                Router(4).order(np.concatenate([prompt, tail]), 60)[0]
                for tail in rows(8, length=25, seed=int(prompt[-1]))
            ]
            for prompt in prompts
        ]
    )
    assert (found == found[:, :1]).all()
    assert len(set(found[:, 0])) == 4


def test_a_replica_less_moves_only_its_own() -> None:
    orders = [Router(4).order(talk, 1) for talk in rows(200)]
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
    second = [order[1] for order in orders if order[0] == 2]
    assert np.bincount(second, minlength=4)[[0, 1, 3]].min() > 5, "they spread over all others"


# ---------------------------------------------------------------------- what a model was made from


def make_another() -> nn.Module:
    return model(seed=1)


def closure(seed: int) -> object:
    return lambda: model(seed=seed)


class Loader:
    def __init__(self, seed: int) -> None:
        self.seed = seed

    def load(self) -> nn.Module:
        return model(self.seed)

    def __call__(self) -> nn.Module:
        return self.load()


def of_array(values: np.ndarray) -> nn.Module:
    return model(int(values.sum()))


def test_factories_differ_by_name_code_and_arguments() -> None:
    long = np.zeros(5000)
    other = long.copy()
    other[2500] = 1
    factories = [
        Loader(0).load,
        Loader(1).load,
        Loader(0),
        Loader(1),
        partial(of_array, long),
        partial(of_array, other),
        model,
        make_another,
        partial(model, seed=1),
        partial(model, seed=2),
        partial(slow, 0.1),
        closure(1),
        closure(2),
        lambda: model(seed=1),
        lambda: model(seed=2),
    ]
    described = [describe_source(None, factory) for factory in factories]
    assert len(set(described)) == len(factories), described
    assert "remote_models.model" in described[6]
    assert describe_source(None, partial(model, seed=1)) == described[8]
    assert describe_source(None, closure(1)) == described[11]
    assert describe_source(None, Loader(1).load) == described[1]
    assert describe_source(None, partial(of_array, long.copy())) == described[4]
    assert not any(" at 0x" in text for text in described)


def test_models_differ_by_their_weights() -> None:
    one = model()
    assert describe_source(one, None) == describe_source(model(), None)
    assert describe_source(one, None) != describe_source(model(seed=1), None)
    swapped = model()
    weight = swapped.lm_head.weight
    with torch.no_grad():
        weight[[0, 1]] = weight[[1, 0]].clone()  # the same sum
    assert describe_source(one, None) != describe_source(swapped, None)


def test_a_model_by_value_stays_at_home() -> None:
    def spec(make: object) -> ServiceSpec:
        return ServiceSpec("name", make, "source", {"max_tokens": 1})  # type: ignore[arg-type]

    held, made = RemoteModel(spec(HeldModel(model()))), RemoteModel(spec(model))
    assert len(pickle.dumps(held)) < 2000 < len(pickle.dumps(model()))
    assert pickle.loads(pickle.dumps(held)).spec.make_model is None
    assert pickle.loads(pickle.dumps(made)).spec.make_model is model
    assert copy.deepcopy(held).spec.make_model is held.spec.make_model


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'torchrl-llm-kl\[ray\]'"):
        ScoringService(factory=model)


# ---------------------------------------------------------------------- weights


class Wrapper(nn.Module):
    input_mode = "tokens"

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.model = inner


def test_weights_by_whatever_name() -> None:
    inner = model(seed=3)
    expected = inner.state_dict()
    wrapper = Wrapper(inner)
    core = ScoringCore(model())
    for version, weights in enumerate(
        [inner, wrapper, TensorDict.from_module(wrapper), wrapper.state_dict(), expected], start=1
    ):
        core.update_weights({name: torch.zeros_like(value) for name, value in expected.items()}, version)
        core.update_weights(state_dict_of(weights), version)
        found = core.model.state_dict()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    with pytest.raises(TypeError, match="weights are a module, a TensorDict or a mapping"):
        state_dict_of([1])


def test_weights_that_do_not_fit_change_nothing() -> None:
    core = ScoringCore(model())
    before = {name: value.clone() for name, value in core.model.state_dict().items()}
    good = {name: value + 1 for name, value in before.items()}
    name = "lm_head.weight"
    bad = {
        "holds values that are not finite": good[name].clone().fill_(torch.inf),
        "the model has shape": torch.zeros(2),
        "weights travel as tensors, got list": [1.0],
    }
    for message, value in bad.items():
        with pytest.raises((TypeError, ValueError), match=message):
            core.update_weights({**good, name: value}, 1)
    with pytest.raises(KeyError, match="no weight 'nowhere'"):
        core.update_weights({**good, "nowhere": torch.zeros(1)}, 1)
    assert core.version == 0
    core.update_weights(before, 3)
    with pytest.raises(WeightVersionError, match="version 2 of the weights came after version 3"):
        core.update_weights(good, 2)
    assert core.version == 3
    assert all(torch.equal(core.model.state_dict()[key], value) for key, value in before.items())


def test_scores_that_are_nan_are_an_error_of_their_request() -> None:
    made = model()
    with torch.no_grad():
        made.model.embed_tokens.weight[13] = torch.nan
    core = ScoringCore(made)

    def request(*tokens: int) -> Request:
        return Request.of(torch.tensor(tokens), torch.tensor([len(tokens)]), None, Settings(), version=None, caller="")

    good, bad, other = core.score([request(1, 2, 3), request(1, 13, 3), request(4, 5)])
    assert isinstance(good, Reply)
    assert isinstance(other, Reply)
    assert isinstance(bad, ValueError)
    assert "gives token 13 at sequence 0, position 1 the log-prob nan" in str(bad)


# ---------------------------------------------------------------------- two models


class Elsewhere:
    """A model in another process, as the transforms see one."""

    interface = ModelInterface()

    def __init__(self, events: list[str]) -> None:
        self.events, self.scorer = events, LogProbScorer(model(seed=1))

    def make_scorer(self, **settings: object) -> Elsewhere:
        return self

    def begin(self, tokens: Ragged, mask: torch.Tensor, **settings: object) -> Callable[[], Scores]:
        self.events.append("reference is asked")

        def finish() -> Scores:
            self.events.append("reference is waited for")
            return self.scorer.evaluate(tokens, mask)

        return finish


def test_the_reference_works_while_the_policy_is_scored_here() -> None:
    events: list[str] = []
    policy = model()
    transform = RetrieveKL(policy, Elsewhere(events), coeff=0.5)
    policy.register_forward_pre_hook(lambda *_: events.append("policy is scored"))
    policy.model.register_forward_pre_hook(lambda *_: events.append("policy is scored"))
    full = torch.randint(97, (2, 6), generator=torch.Generator().manual_seed(0))

    def data() -> TensorDict:
        return TensorDict(
            {
                "tokens": {"full": full, "prompt": full[:, :2].clone()},
                "masks": {"all_attention_mask": torch.ones_like(full, dtype=torch.bool)},
                "next": TensorDict({"reward": torch.zeros(2, 1)}, [2]),
            },
            [2],
        )

    found = transform(data())
    assert events[0] == "reference is asked"
    assert events[-1] == "reference is waited for"
    assert events[1:-1]
    assert set(events[1:-1]) == {"policy is scored"}
    expected = RetrieveKL(model(), model(seed=1), coeff=0.5)(data())
    for key in (("next", "kl_penalty"), ("next", "reward")):
        assert torch.allclose(found[key], expected[key], atol=1e-6)


# ---------------------------------------------------------------------- metrics


class Metric:
    """Keeps what it is told, by name."""

    told: ClassVar[dict[str, list[float]]] = {}

    def __init__(self, name: str, *_: object, tag_keys: tuple[str, ...] = ()) -> None:
        assert tag_keys == ("replica",)
        self.name = name.removeprefix("torchrl_llm_kl_")

    def record(self, value: float, tags: dict[str, str]) -> None:
        assert tags == {"replica": "x:0"}
        self.told.setdefault(self.name, []).append(value)

    set = inc = observe = record


def test_metrics_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(f"ray.util.metrics.{name}", Metric)
    monkeypatch.setattr(Metric, "told", {})
    metrics = RayMetrics("x:0")
    metrics.started(again=True)
    metrics.update(BatchRecord(2, 300, 0.5, (0.6, 0.7)), waiting=3, recalled=40)
    metrics.update(BatchRecord(1, 100, 0.25, (0.3,)), waiting=0, recalled=100)
    assert Metric.told == {
        "queue_length": [0, 3, 0],
        "restarts": [1],
        "batch_requests": [2, 1],
        "batch_tokens": [300, 100],
        "tokens": [300, 100],
        "tokens_recalled": [40, 60],
        "busy_seconds": [0.5, 0.25],
        "latency_seconds": [0.6, 0.7, 0.3],
    }


def test_statistics_of_a_replica() -> None:
    stats = ReplicaStats()
    assert stats.snapshot()["latency_p99"] == 0.0
    for i in range(100):
        stats.add(BatchRecord(1, 10, 0.5, ((i + 1) / 100,)))
    found = stats.snapshot()
    assert (found["requests"], found["batches"], found["tokens"], found["busy"]) == (100, 100, 1000, 50.0)
    assert found["tokens_per_second"] == 20.0
    assert found["latency_p50"] == pytest.approx(0.51)
    assert found["latency_p99"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_replicas": 0}, "num_replicas must be a whole number of at least 1, got 0"),
        ({"num_replicas": 1.5}, "num_replicas must be a whole number"),
        ({"num_replicas": True}, "num_replicas must be a whole number"),
        ({"max_tokens": 0}, "max_tokens must be a whole number of at least 1"),
        ({"max_queue": "4"}, "max_queue must be a whole number"),
        ({"max_wait": -1.0}, "max_wait must be a number of seconds"),
        ({"timeout": "5"}, "timeout must be a number of seconds"),
        ({"timeout": float("inf")}, "timeout must be a number of seconds"),
        ({"timeout": 0}, "timeout must be a number of seconds greater than 0"),
        ({"tokens_per_batch": 0}, "tokens_per_batch must be at least 1"),
        ({"memory": -1}, "memory must be a number of bytes"),
        ({"lifetime": "long"}, "lifetime must be 'detached' or None, got 'long'"),
        ({"name": ""}, "name must be a text"),
        ({"name": "a:b"}, "name must be a text without ':'"),
        ({"name": 5}, "name must be a text"),
        ({"namespace": None}, "namespace must be a text"),
    ],
    ids=str,
)
def test_arguments_out_of_range_are_refused_before_anything_starts(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScoringService(factory=model, **arguments)  # type: ignore[arg-type]


def test_arguments_of_a_service_that_is_not_made_are_refused() -> None:
    there = RemoteModel(ServiceSpec("name", model, "source", {"max_tokens": 1}))
    with pytest.raises(ValueError, match="actor_name, num_replicas would be ignored"):
        RayRetrieveLogProb(there, num_replicas=7, actor_name="x")
    with pytest.raises(ValueError, match="there is nothing to serve, take the local class"):
        RetrieveKL("from_collector", "base", use_ray_service=True)
    with pytest.raises(ValueError, match="take the local class"):
        RayRetrieveLogProb(model(), use_ray_service=False)
