"""Clients in other processes: drivers that start and exit, fork, stop, connect again, or were never connected."""

import pickle
import signal
import subprocess
import sys
import time

import pytest
import ray

from drivers import LAB, handle_of
from load import assert_same, assert_scores, names, sequences
from remote_models import model
from torchrl_llm_kl.service import ServiceError
from waits import LONG, until


def total_of(scorer):
    return float(scorer.score(sequences()).values.sum())


@pytest.mark.parametrize("copied", ["remote", "copy.copy(remote)", "pickle.loads(pickle.dumps(remote))"])
def test_a_forked_child_gets_an_error_at_once(shared, drivers, copied):
    """Also with a copy of the model, which never was connected itself."""
    found = drivers().run(
        f"""
        import copy, pickle, signal
        remote = {handle_of(shared.model)}
        first = total(remote)
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            try:
                total({copied})
            except ServiceError as error:
                os.write(write, str(error).encode())
            os._exit(0)
        os.close(write)
        print(os.read(read, 10_000).decode(), first == total(remote))
        """
    )
    assert found.startswith("process")
    assert "was forked from one that was connected to Ray" in found
    assert "'spawn' or 'forkserver'" in found
    assert found.endswith("True")


def test_an_import_error_in_the_actor_is_raised_at_once(drivers):
    with pytest.raises(AssertionError, match="No module named 'remote_models'"):
        drivers(finds_lab=False).run("ScoringService(factory=model, num_cpus=0.1)")


@pytest.mark.slow
def test_drivers_with_the_same_name_and_with_another_configuration(drivers, local):
    """Two drivers agree and share one actor, the factory of the third differs; the actor ends with the last driver."""
    one, two, other = drivers(), drivers(), drivers()
    for each in (one, two):
        each.start(
            """
            service = ScoringService(factory=model, name="contested", num_cpus=0.1)
            print(service.stats()[0]["pid"], total(service.model))
            """
        )
    first, second = one.result(), two.result()
    assert first == second
    assert float(first.split()[1]) == pytest.approx(total_of(local), rel=1e-6)
    message = "'contested' is in use with another configuration: model: it has 'factory remote_models.model"
    with pytest.raises(AssertionError, match=f"ServiceConfigError: the name {message}"):
        other.run('ScoringService(factory=partial(model, seed=3), name="contested", num_cpus=0.1)')
    one.exit()
    assert names("contested:0")
    two.exit()
    until(lambda: not names("contested:0"))


@pytest.mark.slow
def test_a_detached_service_outlives_its_driver(drivers, serve):
    first, given = drivers(), {"name": "stays", "num_cpus": 0.1, "lifetime": "detached"}
    pid = first.run(f'print(ScoringService(factory=model, **{given}).stats()[0]["pid"])')
    first.exit()
    time.sleep(1)
    service = serve(factory=model, **given)
    assert service.stats()[0]["pid"] == int(pid)
    assert_scores(service.model, model())
    service.shutdown()
    until(lambda: not names("stays:0"))


@pytest.mark.slow
def test_a_service_ends_after_its_driver_was_killed(drivers):
    doomed = drivers()
    doomed.run('service = ScoringService(factory=model, name="orphan", num_cpus=0.1)')
    doomed.kill()
    assert names("orphan:0")
    until(lambda: not names("orphan:0"))


@pytest.mark.slow
def test_another_cluster_in_the_same_process(drivers):
    found = drivers().run(
        """
        options = dict(num_cpus=1, include_dashboard=False, object_store_memory=100 * 2**20, address="local")
        ray.shutdown()
        connect(**options)
        service = ScoringService(factory=model, num_cpus=0.1)
        first = total(service.model)
        ray.shutdown()
        connect(**options)
        print(first == total(service.model))
        """
    )
    assert found == "True"


@pytest.mark.slow
def test_a_process_that_ray_did_not_start(shared, local):
    """Such as one of multiprocessing: the pickled model holds the cluster's address."""
    script = f"""if True:
        import pickle, sys
        sys.path[:0] = [{LAB!r}]
        from drivers import total
        print(total({handle_of(shared.model)}))
    """
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LONG, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert float(ran.stdout) == pytest.approx(total_of(local), rel=1e-6)


KEPT = """
    service = ScoringService(factory=model, name="kept", num_cpus=0.1)
    service.update_weights(model(seed=1), 1)
    first = total(service.model), service.stats()[0]["pid"]
    {between}
    print(first == (total(service.model), service.stats()[0]["pid"]), service.version)
"""


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0, 10], ids=["at once", "after ten seconds"])
def test_a_client_that_connects_again_keeps_the_service(drivers, seconds):
    """Its handles ended with the old connection, the service and the pushed weights did not."""
    client = drivers()
    assert client.run(KEPT.format(between=f"ray.shutdown(); time.sleep({seconds}); connect()")) == "True 1"
    client.exit()
    until(lambda: not names("kept:"))


@pytest.mark.slow
def test_a_client_that_is_stopped_for_a_while_keeps_the_service(drivers):
    client = drivers()
    client.start(KEPT.format(between="time.sleep(5)"))
    until(lambda: names("kept:weights"))
    time.sleep(2)
    client.process.send_signal(signal.SIGSTOP)
    time.sleep(45)
    client.process.send_signal(signal.SIGCONT)
    assert client.result() == "True 1"
    client.exit()
    until(lambda: not names("kept:"))


@pytest.mark.slow
@pytest.mark.parametrize("lost", [False, True], ids=["a replica is killed", "all are killed"])
def test_a_model_by_value_after_the_process_that_passed_it(drivers, serve, local, lost):
    """It outlives that process; if all actors are lost too, the error says that nobody has it any more."""
    client, expected, name = drivers(), local.score(sequences()).values, f"given-{lost}"
    handle = client.run(
        f"""
        service = ScoringService(model(), name={name!r}, num_cpus=0.1, lifetime="detached")
        total(service.model)
        print(pickle.dumps(service.model).hex())
        """
    )
    remote = pickle.loads(bytes.fromhex(handle))
    client.exit()
    scorer, namespace = remote.make_scorer(), remote.spec.namespace
    assert_same(scorer.score(sequences()).values, expected)
    if not lost:
        for no_restart in (True, False):
            ray.kill(ray.get_actor(f"{name}:0", namespace=namespace), no_restart=no_restart)
            assert_same(scorer.score(sequences()).values, expected)
        remote.connection.end()
        return
    for actor in (f"{name}:control", f"{name}:0"):
        ray.kill(ray.get_actor(actor, namespace=namespace), no_restart=False)
    with pytest.raises(ServiceError, match=r"given by value, and is lost: .* construct ScoringService with it again"):
        scorer.score(sequences())
    assert_scores(serve(model(), name=name, lifetime="detached").model, model())
