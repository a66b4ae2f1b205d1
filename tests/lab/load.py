"""Callers that keep a service busy and check every answer."""

import itertools
import os
import pickle
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from torchrl_llm_kl import LogProbScorer, Ragged
from torchrl_llm_kl.head import Kept
from torchrl_llm_kl.scoring import ScoreOptions, ScoreRequest
from torchrl_llm_kl.service import RemoteModel, ScoringService
from torchrl_llm_kl.service._keeper import keeper_of
from torchrl_llm_kl.service._messages import Job
from waits import LONG, until


def sequences(seed: int = 0, count: int = 5, vocab: int = 97, longest: int = 12) -> Ragged:
    """Sequences that differ between seeds, so that each answer fits only one request."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, longest, (count,), generator=rng).tolist()
    return Ragged.from_list([torch.randint(vocab, (n,), generator=rng) for n in lengths])


def job_of(rows: Sequence[Sequence[int]], mask: Any = None, *, records: Any = None, **given: Any) -> Job:
    """A request as a replica reads it. ``given`` holds options and other fields of :class:`Job`."""
    version, caller = given.pop("version", None), given.pop("caller", "")
    return Job(ScoreRequest.of(rows, mask, **(records or {})), ScoreOptions().but(**given), version, caller)


def record_of(rows: Sequence[Sequence[int] | Tensor], seed: int = 0, most: int = 9, vocab: int = 97) -> Kept:
    """Up to ``most`` distinct tokens for each token, in any order, including the token itself."""
    rng = torch.Generator().manual_seed(seed)
    ids = []
    for token in (int(token) for row in rows for token in row):
        others = torch.randperm(vocab, generator=rng)[: int(torch.randint(most, (), generator=rng))]
        some = torch.tensor(sorted({token, *others.tolist()}))
        ids.append(some[torch.randperm(len(some), generator=rng)])
    return Kept(torch.cat(ids), torch.tensor([0, *map(len, ids)]).cumsum(0))


def assert_same(found: Any, expected: Any) -> None:
    assert_close(found, expected, rtol=1e-6, atol=1e-6)


def assert_scores(served: RemoteModel, made: nn.Module, data: Ragged | None = None) -> None:
    """Check that a new scorer of a served model gives the numbers of ``made``."""
    data = sequences() if data is None else data
    assert_same(served.make_scorer().score(data).values, LogProbScorer(made).score(data).values)


def all_up(service: ScoringService, count: int = 2) -> None:
    """Wait until so many replicas answer."""
    until(lambda: len(pids(service)) == count, seconds=240.0)


def names(prefix: str = "") -> list[str]:
    """The names of all actors on the cluster that contain a text."""
    every = ray.util.list_named_actors(all_namespaces=True)
    return sorted(entry["name"] for entry in every if prefix in entry["name"])


def pids(service: ScoringService) -> list[int]:
    """The processes of the replicas that answer."""
    return [state.pid for state in service.replicas()]


def pid_of(handle: ray.actor.ActorHandle) -> int:
    """The process of any actor."""
    return int(ray.get(handle.__ray_call__.remote(lambda self: os.getpid())))


def keeper_pid(service: ScoringService) -> int:
    """The process of the actor that keeps the weights of a service."""
    return pid_of(keeper_of(service.name))


def clone(remote: RemoteModel, *, timeout: float | None = None) -> RemoteModel:
    """A copy as another process receives it."""
    found: RemoteModel = pickle.loads(pickle.dumps(remote))
    found.timeout = found.timeout if timeout is None else timeout
    return found


@dataclass
class Load:
    """Results of the callers: answers by seed, and errors."""

    answers: dict[int, Tensor] = field(default_factory=dict)
    errors: list[Exception] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)
    _seeds: Iterator[int] = field(default_factory=itertools.count)  # next() is atomic

    @property
    def asked(self) -> int:
        """The number of calls that ended."""
        return len(self.answers) + len(self.errors)

    def run(self, remote: RemoteModel, calls: int | None) -> None:
        scorer = clone(remote).make_scorer()
        for seed in itertools.islice(self._seeds, calls):
            if self.stop.is_set():
                break
            try:
                self.answers[seed] = scorer.score(sequences(seed)).values
            except Exception as error:
                self.errors.append(error)

    def assert_all_right(self, *scorers: LogProbScorer) -> None:
        """Check that every request has its own answer, from one of the given models."""
        assert not self.errors, self.errors[0]
        assert self.answers
        for seed, answer in self.answers.items():
            expected = [scorer.score(sequences(seed)).values for scorer in scorers]
            assert any(torch.allclose(answer, one, rtol=1e-6, atol=1e-6) for one in expected), f"request {seed}"


@contextmanager
def callers(remote: RemoteModel, count: int = 4, calls: int | None = None) -> Iterator[Load]:
    """Threads that call repeatedly, until the block ends or each has made its calls."""
    load = Load()
    threads = [threading.Thread(target=load.run, args=(remote, calls), daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        if calls is None:
            load.stop.set()
        for thread in threads:
            thread.join(timeout=LONG)
        assert not any(thread.is_alive() for thread in threads), "a caller hangs"


@ray.remote(num_cpus=0)
class Client:
    """A caller in another process."""

    def ask(self, handle: bytes, seeds: list[int]) -> list[Tensor]:
        """Scores of the sequences of each seed."""
        scorer = pickle.loads(handle).make_scorer()
        return [scorer.score(sequences(seed)).values for seed in seeds]
