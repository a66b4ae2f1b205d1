"""Which errors of Ray mean what."""

import os
import signal
import time
from importlib import import_module

import numpy as np
import ray

from load import actor, assert_same, pid_of, sequences
from remote_models import model
from torchrl_llm_kl.service import ScoringService
from torchrl_llm_kl.service.client._connection import failures
from waits import LONG


@ray.remote(num_cpus=0.1, max_restarts=-1, max_task_retries=0)
class Mortal:
    """Dies in every way that a replica does."""

    def __init__(self, argument):
        self.argument = argument

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


def test_a_crash_may_be_called_again():
    error = error_of(Mortal.options(max_restarts=0).remote(0), kill=True)
    assert isinstance(error, failures())
    assert not error.actor_init_failed


def test_a_large_factory_is_no_argument_of_an_actor(local):
    """Ray drops a large argument of a detached actor after its first start: a restart would fail."""
    ballast = np.zeros(2**17)
    with ScoringService(factory=lambda: model() if ballast.size else None, num_cpus=0.1) as service:
        assert service.model.spec.factory is None
        scorer = service.model.make_scorer()
        for what in (0, "control", 0):
            os.kill(pid_of(actor(service, what)), signal.SIGKILL)
            assert_same(scorer.score(sequences()).values, local.score(sequences()).values)
        service.shutdown()


def test_an_error_of_the_constructor_is_for_good():
    broken = error_of(Mortal.remote(NotThere()))
    assert isinstance(broken, ray.exceptions.ActorDiedError)
    assert broken.actor_init_failed


class NotThere:
    """Unpickles in this process only."""

    def __reduce__(self):
        return import_module, ("a_module_that_is_not_installed",)
