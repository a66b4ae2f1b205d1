"""The client's count of replicas that died while they held a request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray.exceptions import ActorDiedError, GetTimeoutError

from torchrl_llm_kl.service import PoisonedRequest, ServiceTimeout
from torchrl_llm_kl.service._errors import ReplicaGone
from torchrl_llm_kl.service._wire import Request, Settings
from torchrl_llm_kl.service.client import _replicas
from torchrl_llm_kl.service.client._remote import Exchange, Part
from torchrl_llm_kl.service.client._router import Router
from waits import LONG

#: What becomes of a request: its replica dies while it runs, or before; says that it ends; or drops it after its timeout.
RUNS, WAITS, ENDS, DROPS = "runs", "waits", "ends", "drops"
#: Or the process dies before any trial; or seems to die while it runs and lives on.
EARLY, SAME = "early", "same"


class Method:
    """A method of an actor, whose result is computed by :func:`ray.get`."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def remote(self, *args: Any) -> Callable[[], Any]:
        return lambda: self.call(*args)


class Replicas:
    """Two replicas in this process. Each try of a request has the next of some fates, then an answer."""

    def __init__(self, fates: list[str]) -> None:
        self.fates, self.deaths, self.refused = iter(fates), [], []  # type: ignore[var-annotated]
        self.spec = SimpleNamespace(name="x", num_replicas=2, replica_name=lambda i: f"x:{i}")
        self.newest, self.next, self.active = 0, 0, [0, 1]
        self.fate, self.lives = "", 0

    def saw(self, version: int, weights: str = "") -> None:
        self.newest = max(self.newest, version)

    def usable(self) -> list[int]:
        self.next = 1 - self.next
        return [self.next]

    def handle(self, replica: int, *, timeout: float) -> Any:
        return SimpleNamespace(
            score=Method(self.score),
            settled=Method(self.settled),
            on_trial=Method(self.on_trial),
            quarantine=SimpleNamespace(remote=self.refused.append),
        )

    def lose(self, replica: int, error: Exception) -> None:
        pass

    def quarantine(self, digest: str) -> None:
        self.refused.append(digest)

    def score(self, packed: bytes, timeout: float) -> Any:
        self.deaths.append(Request.unpack(packed).deaths)
        self.fate = next(self.fates, "")
        if self.fate == ENDS:
            return ReplicaGone("it ends")
        if self.fate == DROPS:
            return ServiceTimeout("too late")
        if self.fate:
            raise ActorDiedError
        return LookupError("answered")  # stands for an answer

    def settled(self) -> bool:
        if self.fate == EARLY:
            raise GetTimeoutError
        return True

    def on_trial(self, digest: str, timeout: float) -> str:
        if self.fate in (WAITS, EARLY):
            raise GetTimeoutError
        self.lives += self.fate != SAME
        return f"process {self.lives}"


def part() -> Part:
    ids = torch.arange(4)
    sent = Request.of(ids, torch.tensor([4]), None, Settings(), version=None, caller="a")
    return Part(sent, torch.ones(4, dtype=torch.bool))


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are computed when they are asked for, and tries follow at once."""
    monkeypatch.setattr(ray, "get", lambda reference, timeout: reference())
    monkeypatch.setattr(_replicas, "_FIRST_PAUSE", 0.001)


@pytest.mark.parametrize(
    ("fates", "deaths"),
    [
        ([], [0]),
        ([ENDS, ENDS, ENDS, DROPS], [0, 0, 0, 0, 0]),
        ([WAITS], [0, 1]),  # unknown the first time: it may be to blame
        ([WAITS, WAITS, WAITS, WAITS, WAITS], [0, 1, 1, 1, 1, 1]),
        ([WAITS, RUNS, WAITS, ENDS, WAITS], [0, 1, 2, 2, 2, 2]),
        ([RUNS, RUNS, RUNS], [0, 1, 2, 3]),  # two trials ended by someone else, and an answer
        ([RUNS, RUNS, RUNS, WAITS, ENDS], [0, 1, 2, 3, 3, 3]),
        (
            [RUNS, RUNS, RUNS, EARLY, RUNS, RUNS],
            [0, 1, 2, 3, 1, 2, 3],
        ),  # processes die without it: the count starts over
        ([RUNS, EARLY, RUNS, RUNS], [0, 1, 1, 2, 3]),
        ([RUNS, RUNS, SAME, SAME, RUNS, SAME], [0, 1, 2, 2, 2, 3, 3]),  # one process that was out of reach dies once
    ],
    ids=str,
)
def test_only_deaths_on_trial_count_after_the_first(fates: list[str], deaths: list[int]) -> None:
    replicas: Any = Replicas(fates)
    with pytest.raises(LookupError, match="answered"):
        Exchange(replicas, Router(), part(), timeout=LONG).replies()
    assert replicas.deaths == deaths
    assert not replicas.refused


def test_after_three_trials_it_is_refused_everywhere() -> None:
    replicas: Any = Replicas([RUNS, WAITS, RUNS, ENDS, RUNS, RUNS, RUNS])
    text = r"4 replicas died while they scored a request of 1 sequences and 4 tokens \(x:1, x:1, x:1, x:0\)"
    with pytest.raises(PoisonedRequest, match=text):
        Exchange(replicas, Router(), part(), timeout=LONG).replies()
    assert replicas.deaths == [0, 1, 1, 2, 2, 3]
    assert replicas.refused == [part().request.digest()] * 3, "the control actor and both replicas"


def test_deaths_on_the_wire() -> None:
    """A request without deaths is as before, and has the digest of one with deaths."""
    plain = replace(part().request, settings=Settings(deterministic=True))
    sent = replace(plain, deaths=2)
    found = Request.unpack(sent.pack())
    assert (found.deaths, found.settings) == (2, plain.settings)
    assert Request.unpack(plain.pack()).deaths == 0
    assert found.digest() == plain.digest()
    assert found.digest() != replace(plain, settings=Settings(temperature=0.5)).digest()
    assert found.digest() != replace(plain, tokens=plain.tokens + 1).digest()
    assert found.digest() != replace(plain, lengths=np.array([2, 2])).digest()
