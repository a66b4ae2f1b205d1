"""Several drivers create, share and leave a service. Forks, and processes that Ray did not start."""

import subprocess
import sys
import time

import pytest

from drivers import LAB, handle_of
from load import assert_scores, names, sequences
from remote_models import model
from waits import LONG, until


def total_of(scorer):
    return float(scorer.score(sequences()).values.sum())


def test_a_forked_child_gets_an_error_at_once(shared, drivers):
    """Also with a copy of the model, which never was connected itself."""
    found = drivers().run(
        f"""
        import copy, pickle, signal
        remote = {handle_of(shared.model)}
        first = total(remote)
        for copied in (remote, pickle.loads(pickle.dumps(remote))):
            read, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                signal.alarm(20)
                try:
                    total(copied)
                except ServiceError as error:
                    os.write(write, str(error).encode())
                os._exit(0)
            os.close(write)
            print(os.read(read, 10_000).decode())
        print(first == total(remote))
        """
    )
    assert found.count("was forked from a process that was connected to Ray") == 2
    assert found.count("'spawn' or 'forkserver'") == 2
    assert found.endswith("True")


@pytest.mark.slow
def test_drivers_with_the_same_name_and_with_another_configuration(drivers, local):
    """Two drivers start at once and share one replica. A third with another factory is refused. The last one ends it."""
    one, two, other = drivers(), drivers(), drivers()
    for each in (one, two):
        each.start(
            """
            service = ScoringService(factory=model, name="contested", num_cpus=0.1)
            print(service.replicas()[0].pid, total(service.model))
            """
        )
    first, second = one.result(), two.result()
    assert first == second
    assert float(first.split()[1]) == pytest.approx(total_of(local), rel=1e-6)
    message = "'contested' is in use with another configuration: model: it has 'factory remote_models.model"
    with pytest.raises(AssertionError, match=f"ServiceConfigError: the name {message}"):
        other.run('ScoringService(factory=partial(model, seed=3), name="contested", num_cpus=0.1)')
    one.exit()
    time.sleep(10)
    assert two.run("print(total(service.model))") == first.split()[1]
    two.kill()
    until(lambda: not names("contested"))


@pytest.mark.slow
def test_a_detached_service_outlives_its_driver(drivers, serve):
    """With a model given by value."""
    first, given = drivers(), {"name": "stays", "num_cpus": 0.1, "lifetime": "detached"}
    pid = first.run(f"print(ScoringService(model(), **{given}).replicas()[0].pid)")
    first.exit()
    time.sleep(5)
    service = serve(model(), **given)
    assert service.replicas()[0].pid == int(pid)
    assert_scores(service.model, model())
    service.shutdown()
    until(lambda: not names("stays"))


@pytest.mark.slow
def test_a_client_that_connects_again_finds_a_detached_service(drivers):
    """Its handles ended with the old connection, the service and the pushed weights did not."""
    client = drivers()
    found = client.run(
        """
        service = ScoringService(factory=model, name="kept", num_cpus=0.1, lifetime="detached")
        service.update_weights(model(seed=1), 1)
        first = total(service.model)
        ray.shutdown()
        connect()
        print(first == total(service.model), service.version)
        service.shutdown()
        """
    )
    assert found == "True 1"
    until(lambda: not names("kept"))


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
