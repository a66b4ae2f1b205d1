"""Faults while callers wait: every caller gets its own answer, or an error with the reason."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import ray
import torch

from load import Client, Load, assert_same, callers, clone, sequences
from remote_models import delayed, late, model, only_once, slow
from torchrl_llm_kl import LogProbScorer, Ragged
from torchrl_llm_kl.service import ScoringService, ServiceClosedError, ServiceOverloaded, ServiceTimeout
from waits import LONG, until

CPUS = {"num_cpus": 0.1}


@pytest.fixture(scope="module")
def local() -> LogProbScorer:
    return LogProbScorer(model())


@pytest.fixture(scope="module")
def service() -> Iterator[ScoringService]:
    """A service with slow batches, so that a kill hits one."""
    with ScoringService(factory=partial(delayed, 0.05), name="faults", **CPUS) as found:
        yield found
        found.shutdown()


def pid(service: ScoringService, replica: int = 0) -> int:
    return int(service.stats()[replica]["pid"])


def log_lines(text: str) -> list[str]:
    """Lines of this package in the logs of Ray's workers."""
    folder = Path(ray._private.worker.global_worker.node.get_logs_dir_path())
    logs = "\n".join(path.read_text() for path in folder.glob("worker-*.err"))
    return [line for line in logs.splitlines() if "torchrl_llm_kl.service" in line and text in line]


def test_killed_mid_batch(service: ScoringService, local: LogProbScorer) -> None:
    with callers(service.model, calls=12) as load:
        until(lambda: len(load.answers) >= 6)
        before = service.stats()[0]
        os.kill(before["pid"], signal.SIGKILL)
    load.assert_all_right(local)
    assert load.asked == 48
    after = service.stats()[0]
    assert after["pid"] != before["pid"]
    until(lambda: service.stats()[0]["restarts"] == before["restarts"] + 1)
    assert log_lines(f"replica faults:0 started, pid {before['pid']}")
    assert log_lines(f"replica faults:0 restarted, pid {after['pid']}")


@pytest.mark.slow
def test_a_replica_killed_for_good_is_created_again(service: ScoringService, local: LogProbScorer) -> None:
    with callers(service.model, calls=5) as load:
        until(lambda: len(load.answers) >= 4)
        ray.kill(ray.get_actor("faults:0", namespace=service.model.spec.namespace), no_restart=True)
    load.assert_all_right(local)


@pytest.mark.slow
def test_killed_while_weights_update(local: LogProbScorer) -> None:
    new = [model(seed) for seed in (1, 2, 3)]
    with ScoringService(factory=partial(delayed, 0.02), **CPUS) as service:
        with callers(service.model) as load:
            until(lambda: len(load.answers) >= 4)
            service.update_weights(new[0].state_dict(), version=1)
            killer = threading.Timer(0.01, os.kill, (pid(service), signal.SIGKILL))
            killer.start()
            service.update_weights(new[1].state_dict(), version=2)
            killer.join()
            service.model.version = 2  # a versioned request never gets scores of other weights
            assert_same(
                service.model.make_scorer().score(sequences()).values, LogProbScorer(new[1]).score(sequences()).values
            )
            os.kill(pid(service), signal.SIGKILL)
            service.update_weights(new[2].state_dict(), version=3)
            os.kill(pid(service), signal.SIGKILL)
        load.assert_all_right(local, *map(LogProbScorer, new))
        service.model.version = None
        assert_same(
            service.model.make_scorer().score(sequences()).values, LogProbScorer(new[2]).score(sequences()).values
        )
        assert service.stats()[0]["version"] == 3
        service.shutdown()


def test_a_client_killed_mid_call(service: ScoringService, local: LogProbScorer) -> None:
    handle = pickle.dumps(service.model)
    doomed = Client.remote()
    ray.get(doomed.ask.remote(handle, [0]))
    unanswered = doomed.ask.remote(handle, list(range(100)))
    with callers(service.model, count=2, calls=6) as load:
        until(lambda: len(load.answers) >= 2)
        ray.kill(doomed)
    load.assert_all_right(local)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(unanswered)
    until(lambda: service.stats()[0]["queue"] == 0)


def test_bad_requests_beside_good_ones(service: ScoringService, local: LogProbScorer) -> None:
    """Callers keep the service busy, so that batches hold good and bad requests."""
    scorer = clone(service.model).make_scorer()
    failures = service.stats()[0]["failures"]
    with callers(service.model, count=3) as load:
        for _ in range(5):
            with pytest.raises(ValueError, match=r"token id 500 at sequence 0, position 1 is outside the vocabulary"):
                scorer.score(Ragged.from_list([torch.tensor([1, 500])]))
            with pytest.raises(ValueError, match="sequence 0 has 70 tokens but the model's configuration allows 64"):
                scorer.score(Ragged.from_list([torch.zeros(70, dtype=torch.long)]))
            with pytest.raises(ValueError, match="token id -3 at sequence 0"):
                scorer.score(Ragged.from_list([torch.tensor([1, -3])]))
        with pytest.raises(TypeError, match="token ids must be whole numbers"):
            scorer.score(Ragged.from_list([torch.tensor([1.5, 2.5])]))
        with pytest.raises(TypeError, match="mask must be boolean"):
            scorer.score(sequences(), torch.ones(sequences().values.shape[0]))
        with pytest.raises(ValueError, match=r"float7"):
            scorer.model.make_scorer(dtype="float7").score(sequences())  # type: ignore[arg-type]
        weights = model().state_dict()
        weights["lm_head.weight"][0, 0] = torch.nan
        with pytest.raises(ValueError, match=r"lm_head\.weight holds values that are not finite"):
            service.update_weights(weights, version=1)
    load.assert_all_right(local)
    assert service.stats()[0]["failures"] >= failures + 15
    assert service.stats()[0]["version"] == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:LogProbScorer takes the model's full forward")
def test_a_slow_model_and_a_full_queue() -> None:
    with ScoringService(factory=partial(slow, 0.6), max_queue=1, max_tokens=60, max_wait=0.0, **CPUS) as service:
        impatient = clone(service.model)
        impatient.call(0, "health")
        impatient.timeout = 0.3
        with pytest.raises(ServiceTimeout, match=r"took more than 0\.3 s"):
            impatient.make_scorer().score(sequences(count=1))
        load = Load()
        patient = clone(service.model, timeout=2.5)
        threads = [threading.Thread(target=load.run, args=(patient, 1)) for _ in range(8)]
        for thread in threads:
            thread.start()
        start = time.monotonic()
        for thread in threads:
            thread.join()
        assert time.monotonic() - start < 8
        assert len(load.answers) + len(load.errors) == 8
        assert load.answers
        assert load.errors
        assert all(isinstance(error, (ServiceOverloaded, ServiceTimeout)) for error in load.errors)
        for seed, answer in load.answers.items():
            data = sequences(seed)
            assert_same(answer, -(data.positions > 0).float() * float(np.log(97)))
        until(lambda: service.stats()[0]["queue"] == 0)  # requests of callers that gave up are dropped
        service.shutdown()


@pytest.mark.slow
def test_object_store_pressure(service: ScoringService, local: LogProbScorer) -> None:
    """Requests too large to be inlined in a call, while the object store is full."""
    room = ray.available_resources()["object_store_memory"]
    held = [ray.put(np.zeros(2**20, np.uint8)) for _ in range(int(0.97 * room / 2**20))]
    rng = torch.Generator().manual_seed(0)
    big = Ragged.from_list([torch.randint(97, (60,), generator=rng) for _ in range(600)])
    mask = torch.rand(big.values.shape[0], generator=rng) < 0.02
    mask &= big.positions > 0
    found: list[torch.Tensor] = []
    threads = [
        threading.Thread(target=lambda: found.append(clone(service.model).make_scorer().score(big, mask).values))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    del held
    assert len(found) == 3
    for values in found:
        assert_same(values, local.score(big, mask).values)


@pytest.mark.slow
def test_shut_down_while_callers_wait(local: LogProbScorer) -> None:
    service = ScoringService(factory=partial(delayed, 0.1), **CPUS)
    load = Load()
    threads = [threading.Thread(target=load.run, args=(service.model, None)) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: len(load.answers) >= 3)
    service.shutdown()
    assert log_lines(f"replica {service.name}:0 drains")
    load.stop.set()
    for thread in threads:
        thread.join(timeout=LONG)
    assert load.errors
    assert all(isinstance(error, ServiceClosedError) for error in load.errors), load.errors
    for seed, answer in load.answers.items():
        assert_same(answer, local.score(sequences(seed)).values)
    with pytest.raises(ServiceClosedError):
        service.model.make_scorer().score(sequences())


@pytest.mark.slow
def test_missing_resources_are_an_error_and_the_name_is_free_again() -> None:
    with pytest.raises(ServiceTimeout, match=r"no node of the cluster has \{'CPU': 0.1, 'GPU': 1\}"):
        ScoringService(factory=model, name="gpu", num_cpus=0.1, num_gpus=1, timeout=2.0)
    with ScoringService(factory=model, name="gpu", **CPUS) as service:
        assert service.model.call(0, "health")
        service.shutdown()


@pytest.mark.slow
def test_a_model_may_take_longer_than_a_lease_to_load(local: LogProbScorer) -> None:
    with ScoringService(factory=partial(late, 40.0), **CPUS) as service:
        assert_same(service.model.make_scorer().score(sequences()).values, local.score(sequences()).values)
        service.shutdown()


@pytest.mark.slow
def test_a_factory_that_fails_on_the_restart_and_works_later(local: LogProbScorer, tmp_path: Path) -> None:
    with ScoringService(factory=partial(only_once, str(tmp_path)), **CPUS) as service:
        scorer = service.model.make_scorer()
        assert_same(scorer.score(sequences()).values, local.score(sequences()).values)
        os.kill(pid(service), signal.SIGKILL)
        with pytest.raises(OSError, match="the disk is not there"):
            scorer.score(sequences())
        (tmp_path / "broken").unlink()
        assert_same(scorer.score(sequences()).values, local.score(sequences()).values)
        service.shutdown()


@pytest.mark.slow
def test_one_replica_is_enough_if_the_other_cannot_restart(local: LogProbScorer) -> None:
    with ScoringService(model(), num_replicas=2, **CPUS) as service:
        elsewhere = clone(service.model)  # without the model, which is given by value
        data = sequences(count=24)
        assert_same(elsewhere.make_scorer().score(data).values, local.score(data).values)
        ray.kill(ray.get_actor(f"{service.name}:0", namespace=service.model.spec.namespace), no_restart=True)
        assert_same(elsewhere.make_scorer().score(data).values, local.score(data).values)
        service.shutdown()


@pytest.mark.slow
def test_the_same_name_in_two_namespaces() -> None:
    with (
        ScoringService(factory=model, name="twin", namespace="A", **CPUS) as one,
        ScoringService(factory=model, name="twin", namespace="B", **CPUS) as other,
    ):
        pids = pid(one), pid(other)
        time.sleep(45)
        assert (pid(one), pid(other)) == pids
        one.shutdown()
        other.shutdown()
