"""Weight updates: direct, through torchrl, and while callers request versions."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import ray

from load import actor, assert_scores, callers, clone, names, pid_of, pids, sequences
from remote_models import SHARED, model
from torchrl_llm_kl import LogProbScorer
from torchrl_llm_kl.service import ScoringService, ServiceWeightSyncScheme, ServiceWeightUpdater, WeightVersionError
from torchrl_llm_kl.service._weights import chunks_of, keeper_of
from waits import LONG, until


def assert_holds(service, expected, version):
    remote = clone(service.model)
    for wanted in (None, version):
        remote.version = wanted
        assert_scores(remote, expected, sequences(count=24))  # enough to reach both replicas
    assert [stats["version"] for stats in service.stats()] == [version, version]


def test_weights_reach_every_replica_under_their_version(pushed):
    start = pushed.version
    pushed.update_weights(model(seed=1).state_dict(), np.int64(start + 1))
    assert_holds(pushed, model(seed=1), np.int64(start + 1))
    pushed.update_weights(ray.put(model(seed=2).state_dict()), start + 5)
    assert_holds(pushed, model(seed=2), start + 5)
    mixed = model(seed=3)
    pushed.update_weights(mixed, start + 6)
    assert_holds(pushed, mixed, start + 6)
    with pytest.raises(WeightVersionError, match=rf"version {start + 6} of the weights came after version {start + 6}"):
        pushed.update_weights(model(seed=2), start + 6)
    with pytest.raises(TypeError, match="version must be a whole number, got '7'"):
        pushed.update_weights(model(), "7")
    with pytest.raises(TypeError, match="version must be a whole number"):
        pushed.model.version = 2.5
    assert_holds(pushed, mixed, start + 6)


def test_a_past_version_and_one_that_is_never_pushed(pushed):
    pushed.update_weights(model(), pushed.version + 1)
    remote = clone(pushed.model, timeout=1.0)
    remote.version = pushed.version - 1
    with pytest.raises(
        WeightVersionError, match=rf"version {remote.version} of the weights was requested, this replica holds"
    ):
        remote.make_scorer().score(sequences())
    remote.version = pushed.version + 1
    start = time.monotonic()
    with pytest.raises((WeightVersionError, TimeoutError)):
        remote.make_scorer().score(sequences())
    assert time.monotonic() - start < LONG / 2


def test_a_request_waits_for_a_later_version(pushed):
    early = clone(pushed.model)
    early.version = pushed.version + 1
    with callers(pushed.model, count=2) as load, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(assert_scores, early, model(seed=4))
        until(lambda: len(load.answers) > 10)  # requests without a version are served meanwhile
        assert not waiting.done()
        pushed.update_weights(model(seed=4), early.version)
        waiting.result(LONG)
    load.assert_all_right(LogProbScorer(model()), LogProbScorer(model(seed=4)))


def test_through_a_sync_scheme_and_an_updater_of_torchrl(pushed):
    scheme = ServiceWeightSyncScheme(pushed)
    scheme.init_on_sender(model_id="policy")
    scheme.connect()
    version = pushed.version
    scheme.send(model(seed=5))
    assert_holds(pushed, model(seed=5), version + 1)
    scheme.send(model(seed=6).state_dict())
    assert_holds(pushed, model(seed=6), version + 2)

    updater = ServiceWeightUpdater(pushed, model(seed=7))
    version = pushed.version
    updater()  # as collector.update_policy_weights_() does
    assert_holds(pushed, model(seed=7), version + 1)
    updater(model(seed=8).state_dict())
    assert_holds(pushed, model(seed=8), version + 2)
    with pytest.raises(ValueError, match="no weights were given"):
        ServiceWeightUpdater(pushed)()


def test_a_replica_catches_up_after_an_interrupted_push(pushed):
    """The keeper stores weights first: a replica without them takes them once a client has seen the new version."""
    spec, new, version = pushed.model.spec, model(seed=9), pushed.version + 1
    keeper, chunks = keeper_of(spec), list(chunks_of(new.state_dict().items(), size=20_000))
    assert len(chunks) > 2
    for chunk in chunks:
        ray.get(keeper.stage.remote("interrupted", chunk))
    assert ray.get(keeper.commit.remote("interrupted", len(chunks), version)) == version
    assert pushed.model.connection.gather("refresh_weights", replicas=[1], timeout=LONG) == {1: None}
    assert sorted(stats["version"] for stats in pushed.stats()) == [version - 1, version]
    assert_holds(pushed, new, version)


def test_two_updaters_at_once(pushed):
    """Without numbers of their own: each push gets the next one."""
    start, other = pushed.update_weights(model()), ScoringService(**SHARED)

    def update(updater, new):
        return [updater.update_weights(new) for _ in range(3)]

    with callers(pushed.model, count=2) as load, ThreadPoolExecutor(2) as pool:
        versions = list(pool.map(update, (pushed, other), (model(seed=1), model(seed=2)), timeout=LONG))
    assert sorted(version for some in versions for version in some) == list(range(start + 1, start + 7))
    load.assert_all_right(*(LogProbScorer(model(seed=seed)) for seed in (0, 1, 2)))
    assert pushed.update_weights(model()) == start + 7
    other.close()


@contextmanager
def stopped(handle):
    """The process of an actor stands still, as one that cannot be reached."""
    pid = pid_of(handle)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_replica_that_cannot_be_reached_does_not_block_a_push(pushed):
    """It takes the weights when it is back, before it answers a client that has seen their version."""
    pushed.update_weights(model())
    with ThreadPoolExecutor(1) as pool:
        with stopped(actor(pushed, 1)):
            version = pushed.update_weights(model(seed=3), wait=1.0)
            assert version.missed == (f"{pushed.name}:1",)
            waiting = pool.submit(assert_scores, pushed.model, model(seed=3), sequences(count=24))
        waiting.result(LONG)
    assert [stats["version"] for stats in pushed.stats()] == [version, version]


def test_a_keeper_that_cannot_be_reached_does_not_stop_the_scores(pushed):
    """A request for a version to come asks the keeper: others are scored meanwhile."""
    pushed.update_weights(model())
    early = clone(pushed.model, timeout=20.0)
    early.version = pushed.version + 1
    with ThreadPoolExecutor(1) as pool:
        with stopped(keeper_of(pushed.model.spec)):
            waiting = pool.submit(assert_scores, early, model(seed=5))
            time.sleep(0.5)  # both replicas ask
            with callers(pushed.model, count=2, calls=20) as load:
                pass
            load.assert_all_right(LogProbScorer(model()))
            assert not waiting.done()
        pushed.update_weights(model(seed=5), early.version)
        waiting.result(LONG)


@pytest.mark.slow
def test_weights_lost_with_their_keeper_are_an_error(serve):
    service = serve(factory=model)
    service.update_weights(model(seed=1), 1)
    before = pids(service)
    ray.kill(actor(service, "weights"))
    ray.kill(actor(service, 0), no_restart=False)
    until(lambda: pids(service)[0] not in (0, *before))
    with pytest.raises(WeightVersionError, match="version 1 of the weights was seen before"):
        service.model.make_scorer().score(sequences())
    service.update_weights(model(seed=1), 2)
    assert_scores(clone(service.model), model(seed=1))


@pytest.mark.slow
def test_a_new_service_with_an_old_name_starts_at_version_0(serve):
    with ScoringService(factory=model, name="life", num_cpus=0.1) as service:
        service.update_weights(model(seed=1), 5)
    until(lambda: not names("life:0"))
    service = serve(factory=model, name="life")
    assert service.version == 0
    assert_scores(service.model, model())
