"""Faults while callers wait: each gets its own answer, or an error with the reason; and what errors of Ray mean."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module

import numpy as np
import pytest
import ray
import torch

from load import actor, all_up, assert_same, assert_scores, callers, clone, pid_of, pids, sequences
from remote_models import Slow, delayed, late, model, only_once
from torchrl_llm_kl import LogProbScorer, Ragged
from torchrl_llm_kl.service import ServiceOverloaded, ServiceTimeout
from torchrl_llm_kl.service.client._connection import failures
from waits import LONG, until


@pytest.mark.slow
def test_killed_while_weights_update(serve, local):
    new = [model(seed) for seed in (1, 2, 3)]
    service = serve(factory=partial(delayed, 0.02))
    with callers(service.model) as load:
        until(lambda: len(load.answers) >= 4)
        service.update_weights(new[0].state_dict(), version=1)
        killer = threading.Timer(0.01, os.kill, (pids(service)[0], signal.SIGKILL))
        killer.start()
        service.update_weights(new[1].state_dict(), version=2)
        killer.join()
        service.model.version = 2  # a versioned request never gets scores of other weights
        assert_scores(service.model, new[1])
        os.kill(pids(service)[0], signal.SIGKILL)
        service.update_weights(new[2].state_dict(), version=3)
        os.kill(pids(service)[0], signal.SIGKILL)
    load.assert_all_right(local, *map(LogProbScorer, new))
    service.model.version = None
    assert_scores(service.model, new[2])
    assert service.stats()[0]["version"] == 3


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
def test_a_slow_model_and_a_full_queue(serve):
    service = serve(factory=partial(Slow, 0.6), max_queue=1, max_tokens=60, max_wait=0.0)
    impatient = clone(service.model)
    impatient.call("stats")
    impatient.timeout = 0.3
    with pytest.raises(ServiceTimeout, match=r"took more than 0\.3 s"):
        impatient.make_scorer().score(sequences(count=1))
    start = time.monotonic()
    with callers(clone(service.model, timeout=2.5), count=8, calls=1) as load:
        pass
    assert time.monotonic() - start < 8
    assert len(load.answers) + len(load.errors) == 8
    assert load.answers
    assert load.errors
    assert all(isinstance(error, (ServiceOverloaded, ServiceTimeout)) for error in load.errors)
    for seed, answer in load.answers.items():
        data = sequences(seed)
        assert_same(answer, -(data.positions > 0).float() * float(np.log(97)))
    until(lambda: service.stats()[0]["queue"] == 0)  # requests of callers that gave up are dropped


@pytest.mark.slow
def test_object_store_pressure(shared, local):
    """Requests too large to be inlined in a call, while the object store is full."""
    room = ray.available_resources()["object_store_memory"]
    held = [ray.put(np.zeros(2**20, np.uint8)) for _ in range(int(0.97 * room / 2**20))]
    rng = torch.Generator().manual_seed(0)
    big = Ragged.from_list([torch.randint(97, (60,), generator=rng) for _ in range(600)])
    mask = torch.rand(big.values.shape[0], generator=rng) < 0.02
    mask &= big.positions > 0
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: clone(shared.model).make_scorer().score(big, mask).values, range(3)))
    del held
    for values in found:
        assert_same(values, local.score(big, mask).values)


@pytest.mark.slow
def test_missing_resources_are_an_error_and_the_name_is_free_again(serve):
    with pytest.raises(ServiceTimeout, match="GPU: 1 requested, 0 in the cluster"):
        serve(factory=model, name="gpu", num_gpus=1, timeout=2.0)
    assert serve(factory=model, name="gpu").model.call("stats")


@pytest.mark.slow
def test_a_model_may_take_long_to_load(serve):
    assert_scores(serve(factory=partial(late, 40.0)).model, model())


@pytest.mark.slow
def test_a_factory_that_fails_on_the_restart_and_works_later(serve, local, tmp_path):
    service = serve(factory=partial(only_once, str(tmp_path)))
    scorer = service.model.make_scorer()
    assert_same(scorer.score(sequences()).values, local.score(sequences()).values)
    os.kill(pids(service)[0], signal.SIGKILL)
    with pytest.raises(OSError, match="the disk is not there"):
        scorer.score(sequences())
    (tmp_path / "broken").unlink()
    assert_same(scorer.score(sequences()).values, local.score(sequences()).values)


class NotThere:
    """Unpickles in this process only."""

    def __reduce__(self):
        return import_module, ("a_module_that_is_not_installed",)


@ray.remote(num_cpus=0.1, max_restarts=-1, max_task_retries=0)
class Mortal:
    """Dies in every way that a replica does."""

    def __init__(self, _): ...

    async def pid(self):
        return os.getpid()


def error_of(actor, *, kill=False):
    """The error that a call raises once the actor is dead for good; ``kill`` kills it until then."""
    end = time.monotonic() + LONG
    while True:
        try:
            pid = ray.get(actor.pid.remote(), timeout=LONG)
            if kill:
                os.kill(pid, signal.SIGKILL)
        except ray.exceptions.ActorUnavailableError:
            pass  # about to restart, or to die
        except ray.exceptions.RayActorError as error:
            return error
        assert time.monotonic() < end
        time.sleep(0.3)


def test_a_crash_may_be_called_again_and_an_error_of_the_constructor_is_for_good():
    error = error_of(Mortal.options(max_restarts=0).remote(0), kill=True)
    assert isinstance(error, failures())
    assert not error.actor_init_failed
    broken = error_of(Mortal.remote(NotThere()))
    assert isinstance(broken, ray.exceptions.ActorDiedError)
    assert broken.actor_init_failed


def test_a_large_factory_is_no_argument_of_an_actor(serve, local):
    """Ray drops a large argument of a detached actor after its first start: a restart would fail."""
    ballast = np.zeros(2**17)
    service = serve(factory=lambda: model() if ballast.size else None)
    assert service.model.spec.factory is None
    scorer = service.model.make_scorer()
    for what in (0, "control", 0):
        os.kill(pid_of(actor(service, what)), signal.SIGKILL)
        assert_same(scorer.score(sequences()).values, local.score(sequences()).values)
