"""Which replica scores a sequence, and which errors of Ray mean what."""

from __future__ import annotations

import os
import signal
import time
from importlib import import_module

import numpy as np
import pytest
import ray

from torchrl_llm_kl.service._replicas import _lost_arguments, failures
from torchrl_llm_kl.service._router import Router


def rows(count: int, *, prefix: int = 0, length: int = 40, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    start = np.arange(prefix)
    return [np.concatenate([start, rng.integers(0, 1000, length)]) for _ in range(count)]


def test_a_growing_conversation_keeps_its_replica() -> None:
    """Each turn scores its own tokens, so that the prompt before them differs each time."""
    router = Router(5)
    talks = rows(50)
    first = [router.order(talk[:20], 12, goes_on=True) for talk in talks]
    for end, scored in ((30, 25), (40, 33)):
        assert [router.order(talk[:end], scored, goes_on=True) for talk in talks] == first
    assert [Router(5).order(talk[:20], 12) for talk in talks] == first, "as in another process"
    assert len({order[0] for order in first}) == 5


def test_the_oldest_sequences_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchrl_llm_kl.service._router._ROUTED", 3)
    router = Router(64)
    talks = rows(4)
    first = [router.order(talk[:20], 12, goes_on=True) for talk in talks]
    assert len(router._earlier) == 3
    assert sum(router._lengths.values()) == 3
    again = [router.order(talk, 33, goes_on=True) for talk in talks[1:]]
    assert again == first[1:]


@pytest.mark.parametrize("prefixes", [(0,), (100,), (30, 60), (10, 20, 30, 40)])
@pytest.mark.parametrize("scored", [1, 120], ids=["everything is scored", "the answer is scored"])
def test_the_work_spreads_for_any_system_prompts(prefixes: tuple[int, ...], scored: int) -> None:
    router = Router(4)
    router.order(np.zeros(0, np.int64), 0)  # an empty sequence changes nothing
    talks = [row for prefix in prefixes for row in rows(400 // len(prefixes), prefix=prefix, seed=prefix)]
    shares = np.bincount([router.order(talk, scored)[0] for talk in talks], minlength=4)
    assert shares.min() > 60, shares  # 100 on average, with a standard deviation of 8.7


def test_responses_to_one_prompt_go_to_one_replica() -> None:
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


def test_the_work_of_a_lost_replica_spreads() -> None:
    orders = [Router(4).order(talk, 1) for talk in rows(200)]
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
    second = [order[1] for order in orders if order[0] == 2]
    assert np.bincount(second, minlength=4)[[0, 1, 3]].min() > 5, "they spread over all others"


# ------------------------------------------------------------------ errors of Ray


@ray.remote(num_cpus=0.1, max_restarts=-1, max_task_retries=0)
class Mortal:
    """Dies in every way that a replica does."""

    def __init__(self, argument: object) -> None:
        self.argument = argument

    async def pid(self) -> int:
        return os.getpid()


def error_of(actor: object, *, kill: bool = False) -> Exception:
    """The error that a call raises once the actor is dead for good; ``kill`` kills it until then."""
    end = time.monotonic() + 60
    while True:
        try:
            pid = ray.get(actor.pid.remote(), timeout=60)  # type: ignore[attr-defined]
            if kill:
                os.kill(pid, signal.SIGKILL)
        except ray.exceptions.ActorUnavailableError:
            pass  # about to restart, or to die
        except ray.exceptions.RayActorError as error:
            return error
        assert time.monotonic() < end
        time.sleep(0.3)


def test_a_crash_may_be_called_again() -> None:
    error = error_of(Mortal.options(max_restarts=0).remote(0), kill=True)
    assert isinstance(error, failures())
    assert not error.actor_init_failed  # type: ignore[attr-defined]


def test_lost_arguments_are_told_from_an_error_of_the_constructor() -> None:
    """Ray drops a large argument of a detached actor after its first start."""
    actor = Mortal.options(lifetime="detached", name="mortal", namespace="errors of Ray").remote(np.zeros(2**17))
    lost = error_of(actor, kill=True)
    assert isinstance(lost, failures())
    assert lost.actor_init_failed  # type: ignore[attr-defined]
    assert _lost_arguments(lost), lost
    broken = error_of(Mortal.remote(NotThere()))
    assert isinstance(broken, failures())
    assert broken.actor_init_failed  # type: ignore[attr-defined]
    assert not _lost_arguments(broken), broken


class NotThere:
    """Unpickles in this process only."""

    def __reduce__(self) -> tuple[object, ...]:
        return import_module, ("a_module_that_is_not_installed",)
