"""The service on a local Ray cluster: the numbers of a local scorer, even if an actor dies."""

from __future__ import annotations

import os
import pickle
import signal
from functools import partial

import pytest
import ray
import torch

from load import assert_same, sequences
from remote_models import broken, model
from torchrl_llm_kl import LogProbScorer, Ragged
from torchrl_llm_kl.service import ScoringService, ServiceConfigError

CPUS = {"num_cpus": 0.1}


@pytest.fixture(scope="module")
def local() -> LogProbScorer:
    return LogProbScorer(model())


def assert_same_scores(found: Ragged, expected: Ragged) -> None:
    assert_same(found.values, expected.values)


def kill(service: ScoringService, replica: int = 0) -> None:
    os.kill(service.stats()[replica]["pid"], signal.SIGKILL)


def test_the_same_numbers_as_locally(shared: ScoringService, local: LogProbScorer) -> None:
    data = sequences()
    mask = torch.rand(data.values.shape[0], generator=torch.Generator().manual_seed(1)) < 0.5
    mask &= data.positions > 0
    remote = shared.model.make_scorer()
    assert_same_scores(remote.score(data), local.score(data))
    assert_same_scores(remote.score(data, mask), local.score(data, mask))
    scores, expected = remote.evaluate(data, mask, entropy=True), local.evaluate(data, mask, entropy=True)
    assert_same_scores(scores.log_prob, expected.log_prob)
    assert_same_scores(scores.entropy, expected.entropy)
    assert_same_scores(
        shared.model.make_scorer(temperature=0.5).score(data), LogProbScorer(model(), temperature=0.5).score(data)
    )


def test_requests_that_need_a_local_model_are_refused(shared: ScoringService, local: LogProbScorer) -> None:
    remote = shared.model.make_scorer()
    with pytest.raises(ValueError, match="returns no gradient"):
        remote.score(sequences(), grad=True)
    with pytest.raises(ValueError, match="needs the models in this process"):
        remote.evaluate(sequences(), reference=local)
    with pytest.raises(ValueError, match="needs the models in this process"):
        remote.evaluate(sequences(), moments=True)
    for option in ({"routing": torch.zeros(1, 1, 1)}, {"record_routing": True}):
        with pytest.raises(ValueError, match="routing is recorded and replayed by a model in this process"):
            remote.evaluate(sequences(), **option)


def test_errors_of_a_request_keep_type_and_message(shared: ScoringService) -> None:
    with pytest.raises(ValueError, match=r"token id 500 at sequence 0, position 1 is outside the vocabulary"):
        shared.model.make_scorer().score(Ragged.from_list([torch.tensor([1, 500])]))


@ray.remote(num_cpus=0)
def _score_elsewhere(handle: bytes, seed: int) -> torch.Tensor:
    return pickle.loads(handle).make_scorer().score(sequences(seed)).values


def test_other_processes_find_it_by_name(shared: ScoringService, local: LogProbScorer) -> None:
    handle = pickle.dumps(shared.model)
    found = ray.get([_score_elsewhere.remote(handle, seed) for seed in range(2)])
    for seed, values in enumerate(found):
        assert_same(values, local.score(sequences(seed)).values)


@pytest.mark.slow
def test_replicas_share_the_work_and_one_may_die(local: LogProbScorer) -> None:
    with ScoringService(factory=model, num_replicas=2, **CPUS) as service:
        remote, data = service.model.make_scorer(), sequences(count=24)
        assert_same_scores(remote.score(data), local.score(data))
        shares = [stats["tokens"] for stats in service.stats()]
        assert sum(shares) == data.values.shape[0]
        assert all(shares)
        assert_same_scores(remote.score(data), local.score(data))
        assert [stats["tokens"] for stats in service.stats()] == [2 * n for n in shares], (
            "each sequence goes to the same replica again"
        )
        kill(service, 1)
        assert_same_scores(remote.score(data), local.score(data))
        service.shutdown()


def test_errors_of_the_constructor_reach_the_caller() -> None:
    with pytest.raises(OSError, match="no such checkpoint: /nowhere"):
        ScoringService(factory=broken, **CPUS)
    with pytest.raises(ValueError, match="exactly one of them"):
        ScoringService()


def test_a_name_in_use_with_another_configuration_shows_the_difference(shared: ScoringService) -> None:
    with pytest.raises(ServiceConfigError, match=r"'shared:0' is in use .*model: it has .*remote_models\.model"):
        ScoringService(factory=partial(model, seed=3), name="shared", **CPUS)
    same_again = ScoringService(factory=model, name="shared", **CPUS)
    assert same_again.stats()[0]["pid"] == shared.stats()[0]["pid"]


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
        ({"name": ""}, "name must be a string"),
        ({"name": "a:b"}, "name must be a string without ':'"),
        ({"name": 5}, "name must be a string"),
        ({"namespace": None}, "namespace must be a string"),
    ],
    ids=str,
)
def test_invalid_arguments_are_refused_before_actors_start(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScoringService(factory=model, **arguments)  # type: ignore[arg-type]
