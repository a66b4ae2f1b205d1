"""The service on a local Ray: the same numbers as a local scorer, whatever happens to the actor."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest
import ray
import torch
from remote_models import broken, model, slow
from torch.testing import assert_close

from torchrl_llm_kl import LogProbScorer, Ragged
from torchrl_llm_kl.service import (
    ScoringService,
    ServiceClosedError,
    ServiceConfigError,
    ServiceOverloaded,
    ServiceTimeout,
    WeightVersionError,
)

CPUS = {"num_cpus": 0.1}


def sequences(seed: int = 0, count: int = 5) -> Ragged:
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 12, (count,), generator=rng).tolist()
    return Ragged.from_list([torch.randint(97, (n,), generator=rng) for n in lengths])


@pytest.fixture(scope="module")
def service() -> Iterator[ScoringService]:
    with ScoringService(factory=model, name="shared", **CPUS) as found:
        yield found
        found.shutdown()


@pytest.fixture(scope="module")
def local() -> LogProbScorer:
    return LogProbScorer(model())


def same(found: Ragged, expected: Ragged) -> None:
    assert_close(found.values, expected.values, rtol=1e-6, atol=1e-6)


def kill(service: ScoringService, replica: int = 0) -> None:
    os.kill(service.stats()[replica]["pid"], signal.SIGKILL)


def test_the_same_numbers_as_locally(service: ScoringService, local: LogProbScorer) -> None:
    data = sequences()
    mask = torch.rand(data.values.shape[0], generator=torch.Generator().manual_seed(1)) < 0.5
    mask &= data.positions > 0
    remote = service.model.make_scorer()
    same(remote.score(data), local.score(data))
    same(remote.score(data, mask), local.score(data, mask))
    scores, expected = remote.evaluate(data, mask, entropy=True), local.evaluate(data, mask, entropy=True)
    same(scores.log_prob, expected.log_prob)
    same(scores.entropy, expected.entropy)
    same(service.model.make_scorer(temperature=0.5).score(data), LogProbScorer(model(), temperature=0.5).score(data))


def test_what_needs_the_model_here_is_refused(service: ScoringService, local: LogProbScorer) -> None:
    remote = service.model.make_scorer()
    with pytest.raises(ValueError, match="gives no gradient"):
        remote.score(sequences(), grad=True)
    with pytest.raises(ValueError, match="need the model in this process"):
        remote.evaluate(sequences(), reference=local)


def test_errors_of_a_request_come_back_as_they_are(service: ScoringService) -> None:
    with pytest.raises(ValueError, match=r"token id 500 at sequence 0, position 1 is outside the vocabulary"):
        service.model.make_scorer().score(Ragged.from_list([torch.tensor([1, 500])]))


def test_many_callers_each_get_their_own_in_few_batches(local: LogProbScorer) -> None:
    with ScoringService(factory=model, max_wait=0.2, **CPUS) as service:
        service.model.make_scorer().score(sequences())
        data = [sequences(seed=i) for i in range(8)]
        found: dict[int, Ragged] = {}

        def work(i: int) -> None:
            clone = pickle.loads(pickle.dumps(service.model))
            found[i] = clone.make_scorer().score(data[i])

        before = service.stats()[0]["batches"]
        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for i in range(8):
            same(found[i], local.score(data[i]))
        stats = service.stats()[0]
        assert stats["batches"] - before <= 3
        assert stats["largest_batch"] >= 4
        service.shutdown()


@ray.remote(num_cpus=0)
def _score_elsewhere(handle: bytes, seed: int) -> torch.Tensor:
    return pickle.loads(handle).make_scorer().score(sequences(seed)).values


def test_other_processes_find_it_by_name(service: ScoringService, local: LogProbScorer) -> None:
    handle = pickle.dumps(service.model)
    found = ray.get([_score_elsewhere.remote(handle, seed) for seed in range(4)])
    for seed, values in enumerate(found):
        assert_close(values, local.score(sequences(seed)).values, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_an_actor_that_is_killed_between_calls_and_within_one(local: LogProbScorer) -> None:
    with ScoringService(factory=model, **CPUS) as service:
        remote, data = service.model.make_scorer(), sequences()
        remote.score(data)
        kill(service)
        same(remote.score(data), local.score(data))
        answers: list[Ragged] = []
        thread = threading.Thread(target=lambda: answers.extend(remote.score(sequences(s)) for s in range(30)))
        thread.start()
        time.sleep(0.05)
        kill(service)
        thread.join(timeout=60)
        assert len(answers) == 30
        for seed, answer in enumerate(answers):
            same(answer, local.score(sequences(seed)))
        service.shutdown()


@pytest.mark.slow
def test_replicas_share_the_work_and_one_may_die(local: LogProbScorer) -> None:
    with ScoringService(factory=model, num_replicas=2, **CPUS) as service:
        remote, data = service.model.make_scorer(), sequences(count=24)
        same(remote.score(data), local.score(data))
        shares = [stats["tokens"] for stats in service.stats()]
        assert sum(shares) == data.values.shape[0]
        assert all(shares)
        same(remote.score(data), local.score(data))
        assert [stats["tokens"] for stats in service.stats()] == [2 * n for n in shares], (
            "the same ones go the same way"
        )
        kill(service, 1)
        same(remote.score(data), local.score(data))
        service.shutdown()


def test_errors_of_the_constructor_reach_the_caller() -> None:
    with pytest.raises(OSError, match="no such checkpoint: /nowhere"):
        ScoringService(factory=broken, **CPUS)
    with pytest.raises(ValueError, match="exactly one of them"):
        ScoringService()


def test_a_name_in_use_with_another_configuration_shows_the_difference(service: ScoringService) -> None:
    with pytest.raises(ServiceConfigError, match=r"'shared:0' is in use .*model: it has .*remote_models\.model"):
        ScoringService(factory=partial(model, seed=3), name="shared", **CPUS)
    same_again = ScoringService(factory=model, name="shared", **CPUS)
    assert same_again.stats()[0]["pid"] == service.stats()[0]["pid"]


def test_a_model_by_value(local: LogProbScorer) -> None:
    with ScoringService(model(), **CPUS) as service:
        same(service.model.make_scorer().score(sequences()), local.score(sequences()))
        service.shutdown()


def test_weights_have_a_version(local: LogProbScorer) -> None:
    with ScoringService(factory=model, num_replicas=2, **CPUS) as service:
        data, other = sequences(count=12), model(seed=5)
        service.update_weights(other.state_dict(), version=7)
        remote = service.model.make_scorer()
        same(remote.score(data), LogProbScorer(other).score(data))
        service.model.version = 7
        same(remote.score(data), LogProbScorer(other).score(data))
        service.model.version = 6
        with pytest.raises(WeightVersionError, match="version 6 of the weights was asked for, this replica holds 7"):
            remote.score(data)
        service.model.version = None
        service.update_weights(ray.put(model().state_dict()), version=8)
        service.model.version = 8
        same(remote.score(data), local.score(data))
        with pytest.raises(KeyError, match="has no weight 'nowhere'"):
            service.update_weights({"nowhere": torch.zeros(1)}, version=9)
        service.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:LogProbScorer takes the model's full forward")
def test_a_slow_model_times_out_and_a_full_queue_says_so() -> None:
    with ScoringService(factory=partial(slow, 0.6), max_queue=1, max_tokens=1, max_wait=0.0, **CPUS) as service:
        impatient = pickle.loads(pickle.dumps(service.model))
        impatient.timeout = 0.3
        impatient.replicas.handle(0, timeout=10)
        with pytest.raises(ServiceTimeout, match=r"took more than 0\.3 s"):
            impatient.make_scorer().score(sequences(count=1))
        errors: list[Exception] = []

        def work() -> None:
            try:
                patient = pickle.loads(pickle.dumps(service.model))
                patient.timeout = 1.5
                patient.make_scorer().score(sequences(count=1))
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors
        assert all(isinstance(error, (ServiceOverloaded, ServiceTimeout)) for error in errors)
        assert service.model.call(0, "health") is True
        service.shutdown()


def test_a_closed_service_says_so() -> None:
    service = ScoringService(factory=model, **CPUS)
    remote = service.model.make_scorer()
    service.shutdown()
    with pytest.raises(ServiceClosedError):
        remote.score(sequences())
