"""The requests of a call: one to each replica, sent again to others after a failure. With replicas that answer at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from torchrl_llm_kl import Ragged, Sampling
from torchrl_llm_kl.service._errors import ReplicaGone, ServiceBusy, ServiceTimeout
from torchrl_llm_kl.service._wire import Reply, Request, Settings
from torchrl_llm_kl.service.client import _remote
from torchrl_llm_kl.service.client._remote import RemoteScorer
from torchrl_llm_kl.service.client._router import Router

ray = pytest.importorskip("ray")


class Fakes:
    """Replicas whose log-prob of a token is its negative id; each answer may be replaced by the next of ``failures``."""

    def __init__(self, count: int) -> None:
        self.count, self.newest = count, 0
        self.spec = SimpleNamespace(name="fakes")
        self.requests: list[tuple[int, Request]] = []
        self.failures: dict[int, list[Exception]] = {}
        self.versions = [0] * count
        self.lost: set[int] = set()

    def saw(self, version: int, weights: str = "") -> None:
        self.newest = max(self.newest, version)

    def usable(self) -> list[int]:
        return [i for i in range(self.count) if i not in self.lost] or list(range(self.count))

    def handle(self, replica: int, *, timeout: float) -> Any:
        return SimpleNamespace(score=SimpleNamespace(remote=lambda packed, left: self.answer(replica, packed)))

    def lose(self, replica: int, error: Exception) -> None:
        self.lost.add(replica)

    def answer(self, replica: int, packed: bytes) -> bytes | Exception:
        request = Request.unpack(packed)
        self.requests.append((replica, request))
        if self.failures.get(replica):
            return self.failures[replica].pop(0)
        self.versions[replica] = max(self.versions[replica], request.newest)
        values = -request.tokens[request.flat_mask().numpy()].astype(np.float64)
        return Reply(values, None, self.versions[replica]).pack()

    def tokens(self) -> list[int]:
        """Of all requests, by replica."""
        return [sum(r.num_tokens for at, r in self.requests if at == replica) for replica in range(self.count)]


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get", lambda answer, timeout: answer)
    monkeypatch.setattr(ray, "cancel", lambda answer: None)


def scorer(fakes: Fakes, *, timeout: float = 5.0) -> RemoteScorer:
    return RemoteScorer(SimpleNamespace(replicas=fakes, router=Router(), version=None, timeout=timeout), Settings())


def prompts(count: int, responses: int = 8, length: int = 30) -> tuple[Ragged, torch.Tensor]:
    """Responses to prompts of 20 tokens, and the mask of the responses."""
    rng = torch.Generator().manual_seed(0)
    rows = [
        torch.cat([prompt, torch.randint(1, 1000, (int(torch.randint(length, (), generator=rng)),), generator=rng)])
        for prompt in torch.randint(1, 1000, (count, 20), generator=rng)
        for _ in range(responses)
    ]
    data = Ragged.from_list(rows)
    return data, data.positions >= 20


def assert_right(found: Ragged, data: Ragged, mask: torch.Tensor) -> None:
    assert torch.equal(found.values, torch.where(mask, -data.values, 0).double())


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("remember", [False, True])
def test_one_request_for_each_replica(count: int, remember: bool) -> None:
    data, mask = prompts(256)
    fakes = Fakes(count)
    assert_right(scorer(fakes).score(data, mask, remember=remember), data, mask)
    assert sorted(replica for replica, _ in fakes.requests) == list(range(count))
    assert max(fakes.tokens()) <= 1.25 * sum(fakes.tokens()) / count


def test_requests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence is never divided, even if it alone is beyond the bound."""
    monkeypatch.setattr(_remote, "_MOST_TOKENS", 200)
    data, mask = prompts(30, responses=2, length=40)
    for count in (1, 3):
        fakes = Fakes(count)
        assert_right(scorer(fakes).score(data, mask), data, mask)
        sizes = [request.num_tokens for _, request in fakes.requests]
        assert min(sizes) > 0
        assert max(sizes) <= 200 + 60
        assert len(sizes) <= data.values.shape[0] / 200 + count + 1
    monkeypatch.setattr(_remote, "_MOST_TOKENS", 10)
    fakes = Fakes(2)
    assert_right(scorer(fakes).score(data, mask), data, mask)
    assert all(len(request.lengths) == 1 for _, request in fakes.requests)


@pytest.mark.parametrize("lengths", [[0], [0, 0, 0], [0, 3, 0, 2]])
@pytest.mark.parametrize("count", [1, 3])
def test_empty_sequences(lengths: list[int], count: int) -> None:
    data = Ragged.from_list([torch.arange(1, n + 1) for n in lengths])
    assert_right(scorer(Fakes(count)).score(data), data, data.positions > 0)


def test_the_share_of_a_lost_replica_is_divided_among_the_others() -> None:
    data, mask = prompts(64)
    fakes = Fakes(4)
    fakes.failures = {2: [ReplicaGone("dead")]}
    assert_right(scorer(fakes).score(data, mask), data, mask)
    first, again = fakes.requests[:4], fakes.requests[4:]
    assert sorted(replica for replica, _ in first) == [0, 1, 2, 3]
    assert sorted(replica for replica, _ in again) == [0, 1, 3]
    lost = next(request for replica, request in first if replica == 2)
    assert sum(request.num_tokens for _, request in again) == lost.num_tokens


def test_all_replicas_are_lost_for_a_while() -> None:
    data, mask = prompts(16)
    fakes = Fakes(2)
    fakes.failures = {replica: [ReplicaGone("dead")] * 2 for replica in range(2)}
    assert_right(scorer(fakes).score(data, mask), data, mask)
    fakes.failures = {replica: [ReplicaGone("dead")] * 1000 for replica in range(2)}
    with pytest.raises(ServiceTimeout, match=r"no replica came back within 0\.3 s: dead"):
        scorer(fakes, timeout=0.3).score(data, mask)


def test_a_full_queue_is_tried_again_where_it_is() -> None:
    data, mask = prompts(16)
    fakes = Fakes(2)
    fakes.failures = {1: [ServiceBusy("full")]}
    assert_right(scorer(fakes).score(data, mask), data, mask)
    assert sorted(replica for replica, _ in fakes.requests) == [0, 1, 1]


def test_all_scores_of_a_call_come_from_one_version_after_a_failure_too() -> None:
    """The replica that takes over holds newer weights: the others are asked again, and catch up."""
    data, mask = prompts(64)
    fakes = Fakes(3)
    fakes.failures, fakes.versions = {0: [ReplicaGone("dead")]}, [3, 3, 4]
    assert_right(scorer(fakes).score(data, mask), data, mask)
    assert fakes.versions[1:] == [4, 4]
    assert fakes.newest == 4
    assert fakes.requests[-1][1].newest == 4


def test_a_sampler_set_later_travels_and_other_settings_are_fixed() -> None:
    fakes, data = Fakes(1), Ragged.from_list([torch.arange(1, 4)])
    remote = scorer(fakes)
    remote.temperature = 2
    remote.score(data)
    remote.sampling = Sampling(0.5, top_k=7, top_p=0.75, min_p=0.25)
    remote.score(data)
    remote.temperature = 0.75
    remote.score(data)
    remote.sampling = None
    remote.score(data)
    assert [request.settings.sampling for _, request in fakes.requests] == [
        Sampling(2.0),
        Sampling(0.5, top_k=7, top_p=0.75, min_p=0.25),
        Sampling(0.75, top_k=7, top_p=0.75, min_p=0.25),
        Sampling(0.75),
    ]
    for name in ("adapters", "dtype", "deterministic", "memory", "settings", "model", "path"):
        with pytest.raises(AttributeError, match=f"{name} of a RemoteScorer is fixed: build another"):
            setattr(remote, name, False)
    with pytest.raises(ValueError, match="temperature must be a positive number, got -1"):
        remote.temperature = -1
    assert (remote.temperature, remote.sampling) == (0.75, Sampling(0.75))


def test_errors_of_the_input_are_raised_before_anything_is_sent() -> None:
    fakes = Fakes(2)
    with pytest.raises(TypeError, match="mask must be boolean"):
        scorer(fakes).score(Ragged.from_list([torch.arange(3)]), torch.ones(3))
    assert not fakes.requests
