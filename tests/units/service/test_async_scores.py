"""``ascore`` and ``aevaluate``: the event loop goes on, cancelled calls withdraw their requests."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest
import ray
import torch

from load import assert_same, sequences
from remote_models import model
from torchrl_llm_kl import LogProbScorer
from torchrl_llm_kl.scoring import Scores
from torchrl_llm_kl.service import RemoteModel, RemoteScorer, ServiceTimeout
from torchrl_llm_kl.service._errors import ReplicaGone
from torchrl_llm_kl.service._wire import Reply, Request
from torchrl_llm_kl.service.control._spec import ServiceSpec
from torchrl_llm_kl.service.engines._engine import TransformersEngine
from torchrl_llm_kl.service.replica._core import ScoringCore
from waits import LONG, until


class Answer:
    """What stands for a reference to a reply."""

    def __init__(self) -> None:
        self.arrived: Future[Any] = Future()
        self.withdrawn = False

    def future(self) -> Future[Any]:
        return self.arrived


class Service:
    """Replicas of one process: answers arrive ``delay`` seconds after the request; None for never."""

    def __init__(self, *, delay: float | None = 0.0, connecting: float = 0.0) -> None:
        self.core, self.delay, self.connecting = ScoringCore(TransformersEngine(model())), delay, connecting
        self.spec, self.newest, self.lost = ServiceSpec("name", model, "source", {"max_tokens": 1000}), 0, 0
        self.answers: list[Answer] = []
        self.packed: list[bytes] = []
        self.failing = 0  # number of requests that the replica dies of
        self._lock = threading.Lock()

    def saw(self, version: int, weights: str = "") -> None:
        self.newest = max(self.newest, version)

    def usable(self) -> list[int]:
        return [0]

    def handle(self, replica: int, *, timeout: float) -> Any:
        time.sleep(self.connecting)
        return self

    def lose(self, replica: int, error: Exception) -> None:
        self.lost += 1

    @property
    def score(self) -> Any:
        return self

    def remote(self, packed: bytes, timeout: float) -> Answer:
        answer = Answer()
        self.answers.append(answer)
        self.packed.append(packed)
        if self.delay is not None:
            threading.Timer(self.delay, self.reply, [answer, packed]).start()
        return answer

    def reply(self, answer: Answer, packed: bytes) -> None:
        with self._lock:
            if self.failing > 0:
                self.failing -= 1
                answer.arrived.set_result(ReplicaGone("it ended"))
                return
            (found,) = self.core.score([Request.unpack(packed)])
        if not answer.arrived.done():
            answer.arrived.set_result(found.pack() if isinstance(found, Reply) else found)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    def get(answer: Answer, *, timeout: float) -> Any:
        try:
            return answer.arrived.result(timeout)
        except TimeoutError:
            raise ray.exceptions.GetTimeoutError from None

    def cancel(answer: Answer) -> None:
        answer.withdrawn = True

    def scorer(timeout: float = LONG, **options: Any) -> tuple[RemoteScorer, Service]:
        service = Service(**options)
        monkeypatch.setattr(ray, "get", get)
        monkeypatch.setattr(ray, "cancel", cancel)
        remote = RemoteModel(service.spec, timeout=timeout)
        remote.replicas = service  # type: ignore[assignment]
        return remote.make_scorer(), service

    return scorer


LOCAL = partial(LogProbScorer, probe=False)


def test_the_loop_goes_on(make: Any) -> None:
    """Others run while it connects and while it waits: the answer is sent by one of them."""
    scorer, service = make(delay=None, connecting=0.2)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while not service.answers:
            ticks += 1
            await asyncio.sleep(0.005)
        service.reply(service.answers[0], service.packed[0])

    async def both() -> Any:
        return await asyncio.gather(scorer.aevaluate(sequences(), top_k=3, entropy=True), tick())

    found, _ = asyncio.run(both())
    assert isinstance(found, Scores)
    expected = LOCAL(model()).evaluate(sequences(), top_k=3, entropy=True)
    for name in ("log_prob", "entropy"):
        assert_same(getattr(found, name).values, getattr(expected, name).values)
    for name in ("top_log_probs", "tail_log_prob"):  # float32 for any model
        assert_same(getattr(found, name).values, getattr(expected, name).values.float())
    assert torch.equal(found.top_indices.values, expected.top_indices.values)
    assert ticks > 1


def test_waiting_takes_no_thread(make: Any) -> None:
    """Fifty calls wait at once: each is sent before the first one is answered."""
    scorer, service = make(delay=None)
    local = LOCAL(model())

    async def all_of_them() -> list[Any]:
        calls = asyncio.gather(*(scorer.ascore(sequences(seed)) for seed in range(50)))
        while len(service.answers) < 50:
            await asyncio.sleep(0.01)
        for answer, packed in zip(service.answers, service.packed, strict=True):
            service.reply(answer, packed)
        return await calls

    found = asyncio.run(all_of_them())
    for seed, one in enumerate(found):
        assert_same(one.values, local.score(sequences(seed)).values)
    assert len(service.answers) == 50


@pytest.mark.parametrize("stage", ["connecting", "waiting"])
def test_a_cancelled_call_withdraws_its_requests(make: Any, stage: str, caplog: pytest.LogCaptureFixture) -> None:
    scorer, service = make(delay=None, connecting=0.3 if stage == "connecting" else 0.0)

    async def cancelled() -> None:
        task = asyncio.create_task(scorer.ascore(sequences()))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, LONG)
        assert bool(service.answers) == (stage == "waiting"), "it ends at once"

    asyncio.run(cancelled())
    until(lambda: service.answers and all(answer.withdrawn for answer in service.answers))
    if not service.answers[0].arrived.done():
        service.answers[0].arrived.set_result(b"late")  # the loop is closed
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_deadlines_of_the_caller_and_of_the_service(make: Any) -> None:
    scorer, service = make(delay=None)

    async def hurried() -> None:
        await asyncio.wait_for(scorer.ascore(sequences()), 0.1)

    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(hurried())
    until(lambda: all(answer.withdrawn for answer in service.answers))
    scorer, service = make(delay=None, timeout=0.2)
    with pytest.raises(ServiceTimeout, match=r"scoring on 'name' took more than 0.2 s"):
        asyncio.run(scorer.ascore(sequences()))
    assert all(answer.withdrawn for answer in service.answers)


def test_errors_and_lost_replicas(make: Any) -> None:
    scorer, service = make(delay=0.01)
    with pytest.raises(ValueError, match="token id 97 at sequence 0, position 1 is outside the vocabulary"):
        asyncio.run(scorer.ascore([[3, 97]]))
    with pytest.raises(ValueError, match="returns no gradient"):
        asyncio.run(scorer.ascore([[3, 97]], grad=True))
    with pytest.raises(ValueError, match="an exact KL needs the models in this process"):
        asyncio.run(scorer.aevaluate([[3, 97]], reference=scorer))
    service.failing = 2
    found = asyncio.run(scorer.ascore(sequences()))
    assert_same(found.values, LOCAL(model()).score(sequences()).values)
    assert service.lost == 2
