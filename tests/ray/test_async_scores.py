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
from remote_models import delayed, model
from torchrl_llm_kl import LogProbScorer
from torchrl_llm_kl.scoring import Scores
from torchrl_llm_kl.service import RemoteModel, RemoteScorer, ScoringService, ServiceTimeout
from torchrl_llm_kl.service._errors import ReplicaGone
from torchrl_llm_kl.service._wire import Reply, Request
from torchrl_llm_kl.service.control._spec import ServiceSpec
from torchrl_llm_kl.service.engines._engine import TransformersEngine
from torchrl_llm_kl.service.replica._core import ScoringCore
from waits import until


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

    def scorer(timeout: float = 20.0, **options: Any) -> tuple[RemoteScorer, Service]:
        service = Service(**options)
        monkeypatch.setattr(ray, "get", get)
        monkeypatch.setattr(ray, "cancel", cancel)
        remote = RemoteModel(service.spec, timeout=timeout)
        remote.replicas = service  # type: ignore[assignment]
        return remote.make_scorer(), service

    return scorer


LOCAL = partial(LogProbScorer, probe=False)


async def ticks_during(call: Any) -> tuple[Any, int, float]:
    """The result of a coroutine, and how often the loop ran meanwhile, with its longest pause in seconds."""
    count, longest, done = 0, 0.0, False

    async def tick() -> None:
        nonlocal count, longest
        while not done:
            start = time.perf_counter()
            await asyncio.sleep(0.005)
            count, longest = count + 1, max(longest, time.perf_counter() - start)

    ticker = asyncio.create_task(tick())
    found = await call
    done = True
    await ticker
    return found, count, longest


def test_the_loop_goes_on(make: Any) -> None:
    scorer, _ = make(delay=0.5, connecting=0.5)
    found, count, longest = asyncio.run(ticks_during(scorer.aevaluate(sequences(), top_k=3, entropy=True)))
    assert isinstance(found, Scores)
    expected = LOCAL(model()).evaluate(sequences(), top_k=3, entropy=True)
    for name in ("log_prob", "entropy"):
        assert_same(getattr(found, name).values, getattr(expected, name).values)
    for name in ("top_log_probs", "tail_log_prob"):  # float32 for any model
        assert_same(getattr(found, name).values, getattr(expected, name).values.float())
    assert torch.equal(found.top_indices.values, expected.top_indices.values)
    assert count > 30
    assert longest < 0.3


def test_waiting_takes_no_thread(make: Any) -> None:
    """A hundred calls wait at once: each is sent before the first one is answered."""
    scorer, service = make(delay=None, timeout=60.0)
    local = LOCAL(model())

    async def all_of_them() -> list[Any]:
        calls = asyncio.gather(*(scorer.ascore(sequences(seed)) for seed in range(100)))
        while len(service.answers) < 100:
            await asyncio.sleep(0.01)
        for answer, packed in zip(service.answers, service.packed, strict=True):
            service.reply(answer, packed)
        return await calls

    found = asyncio.run(all_of_them())
    for seed, one in enumerate(found):
        assert_same(one.values, local.score(sequences(seed)).values)
    assert len(service.answers) == 100


@pytest.mark.parametrize("stage", ["connecting", "waiting"])
def test_a_cancelled_call_withdraws_its_requests(make: Any, stage: str, caplog: pytest.LogCaptureFixture) -> None:
    scorer, service = make(delay=None, connecting=0.5 if stage == "connecting" else 0.0)

    async def cancelled() -> float:
        task = asyncio.create_task(scorer.ascore(sequences()))
        await asyncio.sleep(0.2)
        start = time.perf_counter()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return time.perf_counter() - start

    assert asyncio.run(cancelled()) < 0.1
    until(lambda: service.answers and all(answer.withdrawn for answer in service.answers), seconds=5)
    if not service.answers[0].arrived.done():
        service.answers[0].arrived.set_result(b"late")  # the loop is closed
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_deadline_of_the_caller(make: Any) -> None:
    scorer, service = make(delay=None)

    async def hurried() -> None:
        await asyncio.wait_for(scorer.ascore(sequences()), 0.2)

    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(hurried())
    until(lambda: all(answer.withdrawn for answer in service.answers), seconds=5)


def test_the_timeout_of_the_service(make: Any) -> None:
    scorer, service = make(delay=None, timeout=0.4)
    start = time.perf_counter()
    with pytest.raises(ServiceTimeout, match=r"scoring on 'name' took more than 0.4 s"):
        asyncio.run(scorer.ascore(sequences()))
    assert time.perf_counter() - start < 2.0
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


# ------------------------------------------------------------------ with Ray


@pytest.mark.slow
def test_with_ray() -> None:
    """One forward takes a second; of two calls, one is cancelled while the other runs."""
    with ScoringService(factory=partial(delayed, 1.0), num_cpus=0) as service:
        scorer = service.model.make_scorer()

        async def calls() -> Any:
            first = asyncio.create_task(scorer.ascore(sequences(0)))
            await asyncio.sleep(0.3)  # it runs
            second = asyncio.create_task(scorer.ascore(sequences(1)))
            await asyncio.sleep(0.3)  # it waits
            second.cancel()
            with pytest.raises(asyncio.CancelledError):
                await second
            return await first

        asyncio.run(scorer.ascore(sequences(2)))  # connected
        found, count, longest = asyncio.run(ticks_during(calls()))
        assert_same(found.values, LOCAL(model()).score(sequences(0)).values)
        assert count > 50
        assert longest < 0.5
        until(lambda: service.stats()[0]["queue"] == 0, seconds=20)
        assert service.stats()[0]["requests"] == 2, "the cancelled call was not scored"
