"""Replicas that are killed, hang, or end by a request, full queues, deadlines and factories that fail."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import ray

from load import all_up, assert_same, assert_scores, callers, clone, keeper_pid, names, pid_of, pids, sequences
from remote_models import ENDLESS, POISON, broken, deadly, delayed, from_file, model
from torchrl_llm_kl import LogProbScorer
from torchrl_llm_kl.service import (
    PoisonedRequest,
    ScoringService,
    ServiceClosedError,
    ServiceError,
    ServiceOverloaded,
    ServiceTimeout,
)
from waits import LONG, until


def test_a_full_queue_and_a_deadline_are_errors_of_their_own(serve, local):
    service = serve(factory=partial(delayed, 0.5), max_ongoing_requests=1, max_queued_requests=2, max_wait=0.0)
    remote = clone(service.model, timeout=LONG)
    remote.make_scorer().score(sequences())
    errors = []

    def ask(seed):
        try:
            return remote.make_scorer().score(sequences(seed)).values
        except ServiceOverloaded as error:
            errors.append(error)

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, range(12), timeout=LONG))
    for seed, answer in enumerate(answers):
        if answer is not None:
            assert_same(answer, local.score(sequences(seed)).values)
    assert 0 < len(errors) < 12
    assert "has max_queued_requests waiting calls" in str(errors[0])
    with pytest.raises(ServiceTimeout, match=r"took more than 0.1 s. Raise timeout="):
        clone(service.model, timeout=0.1).make_scorer().score(sequences())
    until(lambda: service.replicas()[0].waiting == 0)
    assert_scores(remote, model())


@pytest.mark.slow
def test_a_request_that_ends_its_replicas_is_refused_and_its_neighbours_are_answered(serve, tmp_path):
    service = serve(factory=partial(deadly, str(tmp_path)), num_replicas=2, timeout=LONG)
    with callers(service.model, count=6) as load:
        until(lambda: len(load.answers) > 20)
        with pytest.raises(PoisonedRequest, match="3 replicas ended while they scored only this request, of 6 tokens"):
            service.model.make_scorer().score([POISON])
        after = len(load.answers)
        until(lambda: len(load.answers) > after + 20, seconds=240.0)
    load.assert_all_right(LogProbScorer(model()))
    assert len(list(tmp_path.iterdir())) >= 2 + 3, "three replicas that ended in trials, beside the first ones"
    with pytest.raises(ServiceError):
        clone(service.model, timeout=LONG).make_scorer().score([POISON])


@pytest.mark.slow
def test_a_replica_that_hangs_is_replaced(serve, tmp_path):
    service = serve(factory=partial(deadly, str(tmp_path)), num_replicas=2, health_check_timeout_s=3.0)
    before = set(pids(service))
    with callers(service.model, count=4) as load:
        until(lambda: len(load.answers) > 10)
        with pytest.raises(ServiceTimeout):
            clone(service.model, timeout=5.0).make_scorer().score([ENDLESS])
        until(lambda: len(set(pids(service)) - before) == 1 and len(pids(service)) == 2, seconds=240.0)
    load.assert_all_right(LogProbScorer(model()))


@pytest.mark.slow
def test_the_controller_of_serve_and_the_keeper_are_killed_during_load(shared, local):
    all_up(shared)
    with callers(shared.model, count=4) as load:
        until(lambda: len(load.answers) > 5)
        os.kill(pid_of(ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")), signal.SIGKILL)
        os.kill(keeper_pid(shared), signal.SIGKILL)
        after = len(load.answers)
        until(lambda: len(load.answers) > after + 40)
        os.kill(pids(shared)[0], signal.SIGKILL)  # started again by the new controller
        until(lambda: len(pids(shared)) == 2, seconds=240.0)
    load.assert_all_right(local)
    assert ScoringService(**shared_arguments()).name == "shared", "the keeper still knows the configuration"


def shared_arguments():
    from remote_models import SHARED

    return SHARED


def test_missing_resources_are_an_error_and_the_name_is_free_again(serve):
    with pytest.raises(ServiceTimeout, match=r"each replica needs .*'num_gpus': 1.*, the cluster has .*'CPU': 4"):
        serve(factory=model, name="gpu", num_gpus=1, timeout=10.0)
    until(lambda: not names("gpu"))


def test_an_error_of_the_factory_is_raised_unchanged():
    with pytest.raises(OSError, match=r"^no such checkpoint: /nowhere$"):
        ScoringService(factory=broken, name="broken", num_cpus=0.1)
    until(lambda: not names("broken"))


@pytest.mark.slow
def test_a_checkpoint_that_changed_is_not_loaded_by_a_replica_that_starts_later(serve, tmp_path):
    import torch

    path = tmp_path / "weights.pt"
    torch.save(model().state_dict(), path)
    service = serve(factory=partial(from_file, str(path)))
    assert_scores(service.model, model())
    torch.save(model(1).state_dict(), path)
    os.kill(pids(service)[0], signal.SIGKILL)
    with pytest.raises(ServiceTimeout):
        clone(service.model, timeout=20.0).make_scorer().score(sequences())
    torch.save(model().state_dict(), path)
    assert_scores(service.model, model())


@pytest.mark.slow
def test_a_shutdown_during_load_ends_all_calls(serve):
    service = serve(factory=partial(delayed, 0.1), name="ending")
    ends = []

    def work(seed):
        scorer = clone(service.model).make_scorer()
        try:
            while True:
                scorer.score(sequences(seed))
        except Exception as error:
            ends.append(error)

    with ThreadPoolExecutor(4) as pool:
        done = [pool.submit(work, seed) for seed in range(4)]
        time.sleep(1.0)
        service.shutdown()
        for each in done:
            each.result(LONG)
    assert [type(error) for error in ends] == [ServiceClosedError] * 4
    assert not names("ending")
    again = serve(factory=model, name="ending")
    stale = clone(again.model)
    stale.connection.service = "of an earlier service"
    with pytest.raises(ServiceClosedError, match="a new one has its name"):
        stale.make_scorer().score(sequences())


def test_names_and_configurations_that_go_wrong(serve):
    """A configuration that Serve refuses leaves the name free, and the application of somebody else stays as it is."""
    from ray import serve as ray_serve

    @ray_serve.deployment(ray_actor_options={"num_cpus": 0.1})
    class Chat:
        pass

    ray_serve.run(Chat.bind(), name="taken", route_prefix=None)
    with pytest.raises(ServiceError, match="Serve has another application with the name 'taken'"):
        ScoringService(factory=model, name="taken", num_cpus=0.1)
    until(lambda: "taken" not in names())
    assert ray_serve.status().applications["taken"].status == "RUNNING"
    ray_serve.delete("taken")
    with pytest.raises(Exception, match="min_replica"):
        ScoringService(factory=model, name="mended", num_cpus=0.1, autoscaling_config={"min_replicas": -1})
    scaling = {"min_replicas": 0, "max_replicas": 1}
    service = serve(factory=model, name="mended", autoscaling_config=scaling)  # its first request starts a replica
    assert_scores(service.model, model())
    old = clone(service.model)
    by_name = ScoringService(name="mended")
    by_name.shutdown()
    until(lambda: not names("mended"))  # any driver may end it
    again = serve(factory=model, name="mended")
    service.model = old
    with pytest.raises(ServiceClosedError, match="there is no service 'mended'"):
        service.update_weights(model(1))
    assert again.version == 0
