"""Clients in other processes, and drivers that start and exit."""

from __future__ import annotations

import pickle
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator

import pytest
import ray

from load import Client, assert_same, sequences
from project import PROJECT
from remote_models import model
from torchrl_llm_kl import LogProbScorer
from torchrl_llm_kl.service import RemoteModel, ScoringService
from waits import LONG, until

CPUS = {"num_cpus": 0.1}
PATHS = [str(PROJECT / "tests" / "lab")]


def names() -> set[str]:
    return {entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True)}


@pytest.mark.slow
def test_eight_processes_at_once_share_one_batch() -> None:
    local = LogProbScorer(model())
    clients = [Client.remote() for _ in range(8)]
    with ScoringService(factory=model, max_wait=2.0, **CPUS) as service:
        handle = pickle.dumps(service.model)
        ray.get([client.ask.remote(handle, [0]) for client in clients])  # now they are recent callers
        before = service.stats()[0]
        at = time.time() + 1.0
        seeds = [[i, 100 + i, 200 + i] for i in range(8)]
        found = ray.get([client.ask.remote(handle, mine, at=at) for client, mine in zip(clients, seeds, strict=True)])
        after = service.stats()[0]
        service.shutdown()
    for mine, answers in zip(seeds, found, strict=True):
        for seed, answer in zip(mine, answers, strict=True):
            assert_same(answer, local.score(sequences(seed)).values)
    assert after["requests"] - before["requests"] == 24
    assert after["batches"] - before["batches"] == 3
    assert after["largest_batch"] == 8


def driver(body: str) -> subprocess.Popen[str]:
    """A script that joins the cluster, in another process."""
    address = ray.get_runtime_context().gcs_address
    head = f"""
        import os, sys, time, pickle
        sys.path[:0] = {PATHS!r}
        import ray
        paths = os.pathsep.join({PATHS!r})
        ADDRESS = {address!r}
        ray.init(
            address=ADDRESS,
            log_to_driver=False,
            runtime_env=dict(env_vars=dict(PYTHONPATH=paths, OMP_NUM_THREADS="1")),
        )
        from functools import partial
        from remote_models import model, delayed
        from load import sequences
        from torchrl_llm_kl.service import ScoringService, ServiceConfigError
        from waits import wait_for_replicas
        wait_for_replicas()
    """
    script = textwrap.dedent(head) + textwrap.dedent(body)
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_an_import_error_in_the_actor_is_raised_at_once(drivers: list[subprocess.Popen[str]]) -> None:
    drivers.append(
        driver(
            """
            ray.shutdown()
            ray.init(address=ADDRESS, log_to_driver=False)
            start = time.monotonic()
            try:
                ScoringService(factory=model, num_cpus=0.1)
            except Exception as error:
                print(time.monotonic() - start < 60, error)
            """
        )
    )
    found = output(drivers[0])
    assert found.startswith("True ")
    assert "No module named 'remote_models'" in found


def stranger(remote: RemoteModel) -> subprocess.Popen[str]:
    """A process that Ray did not start, such as one of multiprocessing: the pickled model holds the cluster's address."""
    script = f"""
        import pickle, sys
        sys.path[:0] = {PATHS!r}
        from load import sequences
        remote = pickle.loads(bytes.fromhex({pickle.dumps(remote).hex()!r}))
        print(float(remote.make_scorer().score(sequences()).values.sum()))
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture
def drivers() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def output(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=LONG)
    assert process.returncode == 0, err[-2000:]
    return out.strip()


@pytest.mark.slow
def test_drivers_with_the_same_name_and_with_another_configuration(drivers: list[subprocess.Popen[str]]) -> None:
    """Two drivers agree and share one actor, the factory of the third differs; the actor ends with the last driver."""
    same = """
        service = ScoringService(factory=model, name="contested", num_cpus=0.1)
        print(service.stats()[0]["pid"], float(service.model.make_scorer().score(sequences()).values.sum()))
        time.sleep(3)
    """
    other = """
        while "contested:0" not in [entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True)]:
            time.sleep(0.1)
        try:
            ScoringService(factory=partial(model, seed=3), name="contested", num_cpus=0.1)
        except ServiceConfigError as error:
            print(error)
    """
    drivers += [driver(same), driver(same), driver(other)]
    first, second, third = map(output, drivers)
    assert first == second
    expected = float(LogProbScorer(model()).score(sequences()).values.sum())
    assert float(first.split()[1]) == pytest.approx(expected, rel=1e-6)
    assert "'contested:0' is in use with another configuration: model: it has 'factory remote_models.model" in third
    until(lambda: "contested:0" not in names())


@pytest.mark.slow
def test_a_detached_service_outlives_its_driver(drivers: list[subprocess.Popen[str]]) -> None:
    make = 'print(ScoringService(factory=model, name="stays", num_cpus=0.1, lifetime="detached").stats()[0]["pid"])'
    drivers.append(driver(make))
    pid = output(drivers[0])
    time.sleep(1)
    with ScoringService(factory=model, name="stays", lifetime="detached", **CPUS) as service:
        assert service.stats()[0]["pid"] == int(pid)
        assert_same(
            service.model.make_scorer().score(sequences()).values, LogProbScorer(model()).score(sequences()).values
        )
        service.shutdown()
    until(lambda: "stays:0" not in names())


@pytest.mark.slow
def test_the_lease_of_a_killed_driver_expires(drivers: list[subprocess.Popen[str]]) -> None:
    drivers.append(
        driver('service = ScoringService(factory=model, name="orphan", num_cpus=0.1); os.kill(os.getpid(), 9)')
    )
    drivers[0].wait(timeout=LONG)
    assert "orphan:0" in names()
    until(lambda: "orphan:0" not in names(), seconds=60)


@pytest.mark.slow
def test_the_service_ends_with_its_last_client() -> None:
    service = ScoringService(factory=model, name="shortlived", **CPUS)
    other = pickle.loads(pickle.dumps(service.model))
    other.call(0, "health")
    service.close()
    time.sleep(1)
    assert "shortlived:0" in names(), "another client uses it"
    assert other.call(0, "health")
    del other
    until(lambda: "shortlived:0" not in names(), seconds=10)


@pytest.mark.slow
def test_another_cluster_in_the_same_process(drivers: list[subprocess.Popen[str]]) -> None:
    drivers.append(
        driver(
            """
            ray.shutdown()
            local = dict(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
            local["runtime_env"] = dict(env_vars=dict(PYTHONPATH=paths, OMP_NUM_THREADS="1"))
            ray.init(address="local", **local)
            service = ScoringService(factory=model, num_cpus=0.1)
            first = float(service.model.make_scorer().score(sequences()).values.sum())
            ray.shutdown()
            ray.init(address="local", **local)
            print(first == float(service.model.make_scorer().score(sequences()).values.sum()))
            """
        )
    )
    assert output(drivers[0]).endswith("True")
