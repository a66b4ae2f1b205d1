"""Which errors of Ray mean what."""

import os
import signal
import time
from importlib import import_module

import numpy as np
import ray

from torchrl_llm_kl.service.client._replicas import _lost_arguments, failures
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


def test_lost_arguments_are_told_from_an_error_of_the_constructor():
    """Ray drops a large argument of a detached actor after its first start."""
    actor = Mortal.options(lifetime="detached", name="mortal", namespace="errors of Ray").remote(np.zeros(2**17))
    lost = error_of(actor, kill=True)
    assert isinstance(lost, failures())
    assert lost.actor_init_failed
    assert _lost_arguments(lost), lost
    broken = error_of(Mortal.remote(NotThere()))
    assert isinstance(broken, failures())
    assert broken.actor_init_failed
    assert not _lost_arguments(broken), broken


class NotThere:
    """Unpickles in this process only."""

    def __reduce__(self):
        return import_module, ("a_module_that_is_not_installed",)
