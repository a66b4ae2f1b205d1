"""Requests that kill or hang the replicas that score them, beside other callers."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import ray
import torch

from load import Load, clone, sequences
from remote_models import ENDLESS, POISON, SLOW, deadly, model, reporting
from torchrl_llm_kl import LogProbScorer, Ragged
from torchrl_llm_kl.service import PoisonedRequest, RemoteModel, ScoringService, ServiceTimeout
from torchrl_llm_kl.service._wire import Request, Settings
from waits import LONG, until

pytestmark = pytest.mark.slow
HANG_AFTER = 2.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("replicas")


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[ScoringService]:
    settings = {"num_replicas": 2, "num_cpus": 0.1, "hang_after": HANG_AFTER, "timeout": 300.0}
    with ScoringService(factory=partial(deadly, str(folder)), **settings) as made:
        yield made
        made.shutdown()


@contextmanager
def neighbours(remote: RemoteModel) -> Iterator[tuple[Load, list[float]]]:
    """Six callers, and the seconds that their calls take."""
    load, waits = Load(), []

    def run() -> None:
        scorer = clone(remote).make_scorer()
        while not load.stop.is_set():
            seed, start = load.next_seed(), time.monotonic()
            try:
                load.answers[seed] = scorer.score(sequences(seed)).values
            except Exception as error:
                load.errors.append(error)
            waits.append(time.monotonic() - start)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(6)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: len(waits) > 20)
        yield load, waits
        after = len(waits)
        until(lambda: len(waits) > after + 20, seconds=240)
    finally:
        load.stop.set()
        for thread in threads:
            thread.join(timeout=LONG)


def all_up(service: ScoringService, folder: Path, lives: int) -> None:
    """Wait until so many processes have been started in all, and the last two are up."""
    until(lambda: len(list(folder.iterdir())) >= lives, seconds=240)
    for replica in range(2):
        assert service.model.call(replica, "health")


def test_a_request_that_kills_its_replica_is_refused_after_three_trials(service: ScoringService, folder: Path) -> None:
    scorer = clone(service.model).make_scorer()
    before = len(list(folder.iterdir()))
    with neighbours(service.model) as (load, waits):
        with pytest.raises(
            PoisonedRequest, match=r"4 replicas died while they scored a request of 1 sequences and 6 tokens"
        ):
            scorer.score(Ragged.from_list([torch.tensor(POISON)]))
        all_up(service, folder, before + 4)
    load.assert_all_right(LogProbScorer(model()))
    assert len(list(folder.iterdir())) == before + 4
    assert max(waits) < 120

    # A request that one replica was told to refuse.
    bad = Request.of(torch.tensor(POISON), torch.tensor([6]), None, Settings(), version=None, caller="")
    handle = service.model.replicas.handle(0, timeout=60.0)
    ray.get(handle.quarantine.remote(bad.digest()))
    found = ray.get(handle.score.remote(bad.pack(), 5.0))
    assert isinstance(found, PoisonedRequest)
    assert "replicas died of this request before" in str(found)


@pytest.mark.parametrize("replicas", [1, 2])
def test_outside_kills_do_not_condemn_a_request(tmp_path: Path, replicas: int) -> None:
    """The process that scores it is killed three times: while it is first tried, and in two trials by itself."""
    killed: list[int] = []
    done = threading.Event()

    def kill() -> None:
        while len(killed) < 3 and not done.is_set():
            for path in tmp_path.glob("scores-*"):
                pid = int(path.name.removeprefix("scores-"))
                if pid not in killed:
                    killed.append(pid)
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    killer = threading.Thread(target=kill, daemon=True)
    factory = partial(reporting, str(tmp_path), 1.0)
    with ScoringService(factory=factory, num_replicas=replicas, num_cpus=0.1, timeout=LONG) as service:
        killer.start()
        try:
            found = service.model.make_scorer().score([SLOW])
        finally:
            done.set()
            killer.join()
        service.shutdown()
    assert len(killed) == 3
    torch.testing.assert_close(found.values, LogProbScorer(model()).score([SLOW]).values, rtol=1e-6, atol=1e-6)


def test_a_replica_that_hangs_is_replaced(service: ScoringService, folder: Path) -> None:
    """Requests that wait there go to the other replica at once; the one that hangs is tried alone."""
    before = len(list(folder.iterdir()))
    with neighbours(service.model) as (load, _):
        impatient = clone(service.model, timeout=HANG_AFTER + 3).make_scorer()
        with pytest.raises(ServiceTimeout):
            impatient.score(Ragged.from_list([torch.tensor(ENDLESS)]))
        all_up(service, folder, before + 1)
    load.assert_all_right(LogProbScorer(model()))
