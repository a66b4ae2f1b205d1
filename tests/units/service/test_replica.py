"""A replica without Ray: its health, pushes that come late or were lost, and requests on trial."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from remote_models import model
from torchrl_llm_kl import LogProbScorer
from torchrl_llm_kl.scoring import ScoreRequest
from torchrl_llm_kl.service import EngineLost, PoisonedRequest, WeightVersionError, _replica
from torchrl_llm_kl.service._core import Batcher, ScoringCore
from torchrl_llm_kl.service._errors import VersionPending
from torchrl_llm_kl.service._keeper import Held
from torchrl_llm_kl.service._messages import PROTOCOL, Message
from torchrl_llm_kl.service._replica import Replica
from torchrl_llm_kl.service._spec import ServiceSpec, Settings
from torchrl_llm_kl.service.engines._engine import TransformersEngine
from waits import LONG

pytest.importorskip("ray")


class Exited(BaseException):
    """The process of the replica ended."""


class FakeKeeper:
    """Answers with one push and a number of trials."""

    def __init__(self):
        self.held, self.trials = Held(0, [], 0), 0

    def __getattr__(self, method):
        async def answer():
            return {"newest": self.held, "begin_trial": self.trials}.get(method)

        return SimpleNamespace(remote=lambda *args: asyncio.ensure_future(answer()))


@pytest.fixture
def replica(monkeypatch):
    """A replica without Ray, whose pushes hold the weights of ``model(1)``."""
    made = object.__new__(Replica)
    made._spec, made._name = ServiceSpec("name", "source", Settings()), "a"
    made._keeper = FakeKeeper()
    made._core = ScoringCore(TransformersEngine(model()))
    made._newest, made._following, made._has_probe = 0, None, True
    made._batcher = Batcher(made._core.score, max_tokens=1000, max_wait=0.0)
    made._catching_up, made._on_trial, made._began = asyncio.Lock(), asyncio.Lock(), 0.0
    monkeypatch.setattr(Replica, "_fetch", lambda self, chunks: model(1).state_dict())
    return made


def message(rows=((3, 4, 5),), *, version=None, tries=0):
    arrays = ScoreRequest.of(rows).to_arrays()
    fields = {"service": "", "options": {}, "newest": 0, "caller": "c", "version": version, "tries": tries}
    return Message(protocol=PROTOCOL, id="request", arrays=arrays, **fields)


async def test_a_check_of_the_health_does_not_wait_for_weights(replica):
    """They wait for the batch that runs."""
    running, go_on = threading.Event(), threading.Event()
    batch = asyncio.ensure_future(replica._batcher.in_thread(lambda: (running.set(), go_on.wait(LONG))))
    while not running.is_set():
        await asyncio.sleep(0.01)
    replica._keeper.held = Held(3, ["chunk"], 3)
    for _ in range(3):
        await asyncio.wait_for(replica.check_health(), LONG)
        await asyncio.sleep(0.05)
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
async def test_a_replica_without_an_engine_ends(replica, when, monkeypatch):
    def lost(*args, **kwargs):
        raise EngineLost("the gang is lost")

    def ends(status):
        raise Exited(status)

    monkeypatch.setattr(_replica.os, "_exit", ends)
    replica._core = ScoringCore(replica._core.engine, replica._exit)
    replica._batcher = Batcher(replica._core.score, max_tokens=1000, max_wait=0.0)
    replica._core.engine.run = replica._core.engine.update_weights = lost
    if when == "push":
        replica._keeper.held = Held(3, ["chunk"], 3)
    replica._batcher.last_answer -= LONG
    with pytest.raises(Exited):
        await (replica.check_health() if when == "probe" else replica._catch_up(3))


async def test_a_request_does_not_wait_for_a_version_that_is_not_pushed(replica):
    assert isinstance(await replica.score(message(version=3)), VersionPending)
    replica._keeper.held = Held(3, ["chunk"], 3)
    assert (await replica.score(message(version=3)))["version"] == 3


async def test_weights_that_are_lost_while_a_replica_runs(replica):
    """Another replica holds version 5, which this one never got: it answers nothing until all weights are pushed again."""
    assert (await replica.score(message()))["version"] == 0
    replica._keeper.held = Held(0, [], 5)
    await replica.check_health()
    for _ in range(2):
        error = await replica.score(message())
        assert isinstance(error, WeightVersionError)
        assert "were lost with the actor that kept them" in str(error)
    replica._keeper.held = Held(6, ["chunk"], 6)
    reply = await replica.score(message())
    want = LogProbScorer(model(1)).score([[3, 4, 5]]).values[1:]
    assert reply["version"] == 6
    assert reply["columns"]["log_prob"].tolist() == pytest.approx(want.tolist(), abs=1e-6)
    replica._keeper.held = Held(0, [], 5)  # lost again: this replica holds the latest ones
    await replica.check_health()
    assert (await replica.score(message()))["version"] == 6


async def test_a_request_that_ended_three_replicas_is_refused(replica):
    replica._keeper.trials = 3
    assert (await replica.score(message(tries=1)))["version"] == 0
    replica._keeper.trials = 4
    assert (await replica.score(message()))["version"] == 0, "no replica ended while it held this one"
    assert isinstance(await replica.score(message(tries=1)), PoisonedRequest)
