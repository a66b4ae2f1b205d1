"""Faults while callers wait: every caller gets its own answer, or an error with the reason."""

import os
import signal
import threading
import time
from functools import partial

import numpy as np
import pytest
import ray
import torch

from load import Load, all_up, assert_same, callers, clone, pids, sequences
from remote_models import Slow, delayed, late, model, only_once
from torchrl_llm_kl import LogProbScorer, Ragged
from torchrl_llm_kl.service import ScoringService, ServiceOverloaded, ServiceTimeout
from waits import until

CPUS = {"num_cpus": 0.1}


@pytest.mark.slow
def test_killed_while_weights_update(local):
    new = [model(seed) for seed in (1, 2, 3)]
    with ScoringService(factory=partial(delayed, 0.02), **CPUS) as service:
        with callers(service.model) as load:
            until(lambda: len(load.answers) >= 4)
            service.update_weights(new[0].state_dict(), version=1)
            killer = threading.Timer(0.01, os.kill, (pids(service)[0], signal.SIGKILL))
            killer.start()
            service.update_weights(new[1].state_dict(), version=2)
            killer.join()
            service.model.version = 2  # a versioned request never gets scores of other weights
            assert_same(
                service.model.make_scorer().score(sequences()).values, LogProbScorer(new[1]).score(sequences()).values
            )
            os.kill(pids(service)[0], signal.SIGKILL)
            service.update_weights(new[2].state_dict(), version=3)
            os.kill(pids(service)[0], signal.SIGKILL)
        load.assert_all_right(local, *map(LogProbScorer, new))
        service.model.version = None
        assert_same(
            service.model.make_scorer().score(sequences()).values, LogProbScorer(new[2]).score(sequences()).values
        )
        assert service.stats()[0]["version"] == 3
        service.shutdown()


def test_bad_requests_beside_good_ones(shared, local):
    """Callers keep the service busy, so that batches hold good and bad requests."""
    all_up(shared)

    def failures():
        return sum(stats["failures"] for stats in shared.stats())

    nan = model().state_dict()
    nan["lm_head.weight"][0, 0] = torch.nan
    scorer, before, version = clone(shared.model).make_scorer(), failures(), shared.version
    bad = {
        r"token id 500 at sequence 0, position 1 is outside the vocabulary": lambda: scorer.score([[1, 500]]),
        "sequence 0 has 70 tokens but the model's configuration allows 64": lambda: scorer.score([[0] * 70]),
        "token id -3 at sequence 0": lambda: scorer.score([[1, -3]]),
        "token ids must be a flat integer tensor": lambda: scorer.score(Ragged.from_list([torch.tensor([1.5, 2.5])])),
        "mask must be boolean": lambda: scorer.score(sequences(), torch.ones(sequences().values.shape[0])),
        "has no PEFT adapters": lambda: scorer.score(sequences(), adapters="nobody"),
        r"lm_head\.weight holds values that are not finite": lambda: shared.update_weights(nan, version=version + 1),
    }
    with callers(shared.model, count=3) as load:
        for message, call in [*bad.items(), *[*bad.items()][:3] * 2]:
            with pytest.raises((ValueError, TypeError), match=message):
                call()
    load.assert_all_right(local)
    assert failures() >= before + 9
    assert [stats["version"] for stats in shared.stats()] == [version, version]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:LogProbScorer takes the model's full forward")
def test_a_slow_model_and_a_full_queue():
    with ScoringService(factory=partial(Slow, 0.6), max_queue=1, max_tokens=60, max_wait=0.0, **CPUS) as service:
        impatient = clone(service.model)
        impatient.call("stats")
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
def test_object_store_pressure(shared, local):
    """Requests too large to be inlined in a call, while the object store is full."""
    room = ray.available_resources()["object_store_memory"]
    held = [ray.put(np.zeros(2**20, np.uint8)) for _ in range(int(0.97 * room / 2**20))]
    rng = torch.Generator().manual_seed(0)
    big = Ragged.from_list([torch.randint(97, (60,), generator=rng) for _ in range(600)])
    mask = torch.rand(big.values.shape[0], generator=rng) < 0.02
    mask &= big.positions > 0
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(clone(shared.model).make_scorer().score(big, mask).values))
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
def test_missing_resources_are_an_error_and_the_name_is_free_again():
    with pytest.raises(ServiceTimeout, match="GPU: 1 requested, 0 in the cluster"):
        ScoringService(factory=model, name="gpu", num_cpus=0.1, num_gpus=1, timeout=2.0)
    with ScoringService(factory=model, name="gpu", **CPUS) as service:
        assert service.model.call("stats")
        service.shutdown()


@pytest.mark.slow
def test_a_model_may_take_long_to_load(local):
    with ScoringService(factory=partial(late, 40.0), **CPUS) as service:
        assert_same(service.model.make_scorer().score(sequences()).values, local.score(sequences()).values)
        service.shutdown()


@pytest.mark.slow
def test_a_factory_that_fails_on_the_restart_and_works_later(local, tmp_path):
    with ScoringService(factory=partial(only_once, str(tmp_path)), **CPUS) as service:
        scorer = service.model.make_scorer()
        assert_same(scorer.score(sequences()).values, local.score(sequences()).values)
        os.kill(pids(service)[0], signal.SIGKILL)
        with pytest.raises(OSError, match="the disk is not there"):
            scorer.score(sequences())
        (tmp_path / "broken").unlink()
        assert_same(scorer.score(sequences()).values, local.score(sequences()).values)
        service.shutdown()
