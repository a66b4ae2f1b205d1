"""A replica without Ray: its health, pushes that come late or were lost, and requests on trial."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from remote_models import model
from torchrl_llm_kl import LogProbScorer
from torchrl_llm_kl.scoring import ScoreRequest
from torchrl_llm_kl.service import EngineLost, PoisonedRequest, WeightVersionError, _replica
from torchrl_llm_kl.service._batcher import Batcher
from torchrl_llm_kl.service._core import ScoringCore, Watchdog
from torchrl_llm_kl.service._errors import VersionPending
from torchrl_llm_kl.service._keeper import Held
from torchrl_llm_kl.service._messages import PROTOCOL, Message
from torchrl_llm_kl.service._replica import Replica
from torchrl_llm_kl.service.engines._engine import TransformersEngine
from waits import LONG

pytest.importorskip("ray")


class Exited(Exception):
    """The process of the replica ended."""


class FakeKeeper:
    """Answers with one push and a number of trials."""

    def __init__(self):
        self.held, self.trials = Held(0, [], lost=False), 0

    def __getattr__(self, method):
        async def answer():
            return {"newest": self.held, "begin_trial": self.trials}.get(method)

        return SimpleNamespace(remote=lambda *args: asyncio.ensure_future(answer()))


@pytest.fixture
def replica(monkeypatch):
    """A replica whose pushes hold the weights of ``model(1)``; its process does not end."""
    made = object.__new__(Replica)
    made._spec, made._name, made._keeper = SimpleNamespace(name="name", id=""), "a", FakeKeeper()
    made._core, made._lost, made._following, made._has_probe = (
        ScoringCore(TransformersEngine(model())),
        None,
        None,
        True,
    )
    made._batcher = Batcher(made._score, max_tokens=1000, max_wait=0.0)
    made._watchdog = Watchdog(made._core, LONG)
    made._catching_up, made._on_trial = asyncio.Lock(), asyncio.Lock()
    monkeypatch.setattr(Replica, "_fetch", lambda self, chunks: model(1).state_dict())
    monkeypatch.setattr(_replica, "_PENDING", 0.05)

    def ends(self, error):
        raise Exited(str(error))

    monkeypatch.setattr(Replica, "_exit", ends)
    return made


def message(rows=((3, 4, 5),), *, version=None, tries=0):
    arrays = ScoreRequest.of(rows).to_arrays()
    fields = {"service": "", "options": {}, "newest": 0, "caller": "c", "version": version, "tries": tries}
    return Message(protocol=PROTOCOL, arrays=arrays, **fields)


async def test_a_check_of_the_health_does_not_wait_for_weights(replica, monkeypatch):
    """They wait for the batch that runs."""
    running, go_on = threading.Event(), threading.Event()
    batch = asyncio.ensure_future(replica._batcher.in_thread(lambda: (running.set(), go_on.wait(LONG))))
    while not running.is_set():
        await asyncio.sleep(0.01)
    replica._keeper.held = Held(3, ["chunk"], lost=False)
    wait = asyncio.wait
    monkeypatch.setattr(asyncio, "wait", lambda tasks, timeout: wait(tasks, timeout=timeout / 100))
    for _ in range(3):
        await asyncio.wait_for(replica.check_health(), LONG)
    first = replica._following
    assert replica._core.version == 0
    go_on.set()
    await batch
    assert (await first).version == replica._core.version == 3
    await replica.check_health()
    assert replica._following is first


async def test_a_model_that_fails_all_requests_is_probed(replica):
    def broken(*args):
        raise RuntimeError("device-side assert")

    replica._core.engine.run = broken
    replica._batcher.last_answer -= LONG
    assert isinstance(await replica.score(message()), RuntimeError)
    with pytest.raises(RuntimeError, match="device-side assert"):
        await replica.check_health()


@pytest.mark.parametrize("when", ["probe", "push"])
async def test_a_replica_without_an_engine_ends(replica, when):
    def lost(*args, **kwargs):
        raise EngineLost("the gang is lost")

    if when == "probe":
        replica._core.engine.run = lost
        replica._batcher.last_answer -= LONG
        with pytest.raises(Exited, match="the gang is lost"):
            await replica.check_health()
    else:
        replica._core.engine.update_weights = lost
        replica._keeper.held = Held(3, ["chunk"], lost=False)
        with pytest.raises(Exited, match="the gang is lost"):
            await replica._catch_up(3)


async def test_a_request_waits_only_a_moment_for_a_version_that_is_not_pushed(replica):
    assert isinstance(await replica.score(message(version=3)), VersionPending)
    replica._keeper.held = Held(3, ["chunk"], lost=False)
    assert (await replica.score(message(version=3)))["version"] == 3


async def test_weights_that_are_lost_while_a_replica_runs(replica):
    """Another replica holds version 5, which this one never got: it answers nothing until all weights are pushed again."""
    assert (await replica.score(message()))["version"] == 0
    replica._keeper.held = Held(0, [], lost=True)
    await replica.check_health()
    for _ in range(2):
        error = await replica.score(message())
        assert isinstance(error, WeightVersionError)
        assert "are lost, with the actor that kept them" in str(error)
    replica._keeper.held = Held(6, ["chunk"], lost=False)
    reply = await replica.score(message())
    want = LogProbScorer(model(1)).score([[3, 4, 5]]).values[1:]
    assert reply["version"] == 6
    assert reply["columns"]["log_prob"].tolist() == pytest.approx(want.tolist(), abs=1e-6)
    replica._keeper.held = Held(0, [], lost=True)  # lost again: this replica holds the latest ones
    await replica.check_health()
    assert (await replica.score(message()))["version"] == 6


async def test_a_client_that_gives_up_while_lost_weights_arrive_leaves_a_replica_that_answers(replica):
    replica._lost, replica._keeper.held = WeightVersionError("lost"), Held(6, ["chunk"], lost=False)
    running, go_on, update = threading.Event(), threading.Event(), replica._core.update_weights

    def slow(weights, version):
        running.set()
        go_on.wait(LONG)
        update(weights, version)

    replica._core.update_weights = slow
    asked = asyncio.ensure_future(replica.score(message()))
    while not running.is_set():
        await asyncio.sleep(0.01)
    asked.cancel()
    await asyncio.wait([asked])
    go_on.set()
    await replica._batcher.in_thread(lambda: None)
    assert (await replica.score(message()))["version"] == 6


async def test_equal_requests_on_trial_in_many_replicas_are_not_refused(replica):
    replica._keeper.trials = 9
    assert (await replica.score(message(tries=1)))["version"] == 0
    assert isinstance(await replica.score(message(tries=2)), PoisonedRequest)
