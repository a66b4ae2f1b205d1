"""The controller on a Ray cluster: its loss, the end of a service, replicas that stand still, missing resources."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import ray
import torch

from load import Client, actor, assert_same, assert_scores, callers, clone, names, pid_of, pids, sequences
from project import PROJECT
from remote_models import delayed, from_file, model, quits
from torchrl_llm_kl.service import ScoringService, ServiceClosedError, ServiceError
from torchrl_llm_kl.service._controller import READY
from waits import LONG, until

pytestmark = pytest.mark.slow


def controlled():
    """The service of this file, or another client of it."""
    settings = {"num_replicas": 2, "num_cpus": 0.1, "hang_after": 3.0, "lifetime": "detached"}
    return ScoringService(factory=partial(delayed, 0.02), name="controlled", **settings)


@pytest.fixture(scope="module")
def service():
    """Two replicas that are started again after three silent seconds."""
    found = controlled()
    yield found
    found.shutdown()


def states(service):
    return ray.get(actor(service, "control").table.remote())["states"]


def test_the_loss_of_the_controller_harms_nobody(service, local):
    """It is killed under load, then a replica is: no request is lost or wrong, and the table comes back."""
    fingerprint = service.fingerprint
    with callers(service.model, calls=30) as load:
        until(lambda: len(load.answers) > 4)
        before = pids(service)
        ray.kill(actor(service, "control"), no_restart=False)
        os.kill(before[0], signal.SIGKILL)
    load.assert_all_right(local)
    assert service.fingerprint == fingerprint
    until(lambda: states(service) == [READY, READY])
    assert pids(service)[1] == before[1]


def test_a_service_without_its_controller_has_ended():
    """Somebody killed it for good: calls say so, and the replica ends by itself."""
    with ScoringService(factory=model, name="headless", num_cpus=0.1) as service:
        remote = clone(service.model)
        ray.kill(actor(service, "control"), no_restart=True)
        until(lambda: names("headless:control") == [])
        with pytest.raises(ServiceClosedError, match="'headless' was shut down, or ended with its last client"):
            remote.make_scorer().score(sequences())
        until(lambda: names("headless:") == [], seconds=120)


def test_a_checkpoint_that_changed_is_not_loaded_by_a_restarted_replica(tmp_path, serve, local):
    torch.save(model().state_dict(), tmp_path / "weights")
    service = serve(factory=partial(from_file, str(tmp_path / "weights")), name="changes")
    scorer = service.model.make_scorer()
    assert_same(scorer.score(sequences()).values, local.score(sequences()).values)
    torch.save(model(seed=1).state_dict(), tmp_path / "weights")
    os.kill(pids(service)[0], signal.SIGKILL)
    with pytest.raises(ServiceError, match="loaded other weights"):
        scorer.score(sequences())


def test_a_shutdown_during_a_long_batch_is_not_undone(serve, tmp_path):
    """Callers whose batch outlasts the shutdown used to make the service again."""
    service = serve(factory=partial(delayed, 14.0, path=str(tmp_path / "slow")), name="ends")
    (tmp_path / "slow").touch()
    handles = [clone(service.model) for _ in range(3)]

    def call(remote):
        with pytest.raises(ServiceClosedError):
            remote.make_scorer().score(sequences())

    with ThreadPoolExecutor(3) as pool:
        calls = pool.map(call, handles, timeout=LONG)
        time.sleep(3)
        service.shutdown()
        list(calls)
    time.sleep(2)
    assert names("ends:") == []
    unused = clone(service.model)
    with pytest.raises(ServiceClosedError, match="the service 'ends' was shut down"):
        unused.make_scorer().score(sequences())
    new = serve(factory=model, name="ends")
    assert new.model.spec.id != service.model.spec.id
    call(clone(handles[0]))
    before = pids(new)
    service.shutdown()  # again: the name is another service's now
    unused.connection.end()
    assert pids(new) == before
    assert_scores(new.model, model())


def test_a_factory_that_ends_its_process_is_an_error_with_the_cause(serve, tmp_path):
    with pytest.raises(ServiceError, match=r"failed to start 3 times within \d+ s: its process ended before the model"):
        serve(factory=partial(quits, str(tmp_path)), name="quits")
    assert len(list(tmp_path.iterdir())) == 3
    until(lambda: names("quits:") == [])
    assert serve(factory=model, name="quits").stats()[0]["restarts"] == 0


def test_a_stopped_replica_blocks_nobody_and_is_started_again(service, local):
    before = pids(service)
    with callers(service.model, calls=30) as load:
        until(lambda: len(load.answers) > 4)
        os.kill(before[1], signal.SIGSTOP)
        found = service.stats()
        assert found[0]["pid"] == before[0]
        assert found[1].get("pid") != before[1]
        controlled().close()
    load.assert_all_right(local)
    until(lambda: states(service) == [READY, READY])
    after = pids(service)
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_a_model_by_value_outlives_all_actors_at_once(serve, local):
    """Controller and replica are killed together: a process that passed the model hands it in again."""
    service = serve(model(), name="handed")
    scorer = service.model.make_scorer()
    assert_same(scorer.score(sequences()).values, local.score(sequences()).values)
    ids = [pid_of(actor(service, what)) for what in ("control", 0)]
    for pid in ids:
        os.kill(pid, signal.SIGKILL)
    assert_same(scorer.score(sequences(1)).values, local.score(sequences(1)).values)
    assert pids(service)[0] not in ids


def test_a_missing_resource_is_named_at_once_and_looked_for_while_waiting(serve, caplog):
    total, free = ray.cluster_resources()["CPU"], int(ray.available_resources()["CPU"])
    hog = Client.options(num_cpus=free).remote()
    ray.get(hog.__ray_ready__.remote())
    with ThreadPoolExecutor(1) as pool, caplog.at_level(logging.WARNING, logger="torchrl_llm_kl.service"):
        made = pool.submit(serve, factory=model, name="waits", num_cpus=1)
        until(lambda: "waits:0 waits" in caplog.text, seconds=30)
        assert f"CPU: 1 requested, {total:g} in the cluster" in caplog.text
        assert "free some, or add a node" in caplog.text
        ray.kill(hog)
        made.result(LONG)


def test_a_node_is_killed_and_another_added_under_load():
    """Four nodes in a process of their own, because this one is connected to a cluster."""
    script = str(PROJECT / "tests" / "lab" / "nodes.py")
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=LONG, check=False)
    lines = [line for line in ran.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, ran.stderr[-3000:]
    found = json.loads(lines[0].removeprefix("RESULT "))
    print(found)
    assert (found["lost"], found["errors"], found["wrong"]) == (0, [], 0), found
    assert found["requests"] > 30
    assert found["moved"] == len(found["actors on the killed node"]) > 0
    assert found["replicas on the new node"]
