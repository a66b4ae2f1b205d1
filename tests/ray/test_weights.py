"""Weight updates: direct, through torchrl, while callers request versions, and beside replicas that end or start."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import ray
import torch

from closeness import assert_near
from load import all_up, assert_scores, callers, clone, keeper_pid, pids, sequences
from remote_models import SHARED, delayed, model
from torchrl_llm_kl import LogProbScorer
from torchrl_llm_kl.scoring import ScoreRequest, VersionLostError
from torchrl_llm_kl.service import ScoringService, ServiceWeightSyncScheme, ServiceWeightUpdater, WeightVersionError
from waits import LONG, until


def assert_holds(service, expected, version):
    remote = clone(service.model)
    remote.part_size = 20  # both replicas get parts
    for wanted in (None, version):
        remote.version = wanted
        assert_scores(remote, expected, sequences(count=24))
    assert {state.version for state in service.replicas()} == {version}


def test_weights_reach_every_replica_under_their_version(pushed):
    start = pushed.version
    pushed.update_weights(model(seed=1).state_dict(), np.int64(start + 1))
    assert_holds(pushed, model(seed=1), np.int64(start + 1))
    pushed.update_weights(ray.put(model(seed=2).state_dict()), start + 5)
    assert_holds(pushed, model(seed=2), start + 5)
    found = pushed.update_weights(model(seed=3), start + 6)
    assert (found, found.missed) == (start + 6, ())
    assert_holds(pushed, model(seed=3), start + 6)
    with pytest.raises(WeightVersionError, match=rf"version {start + 6} of the weights came after version {start + 6}"):
        pushed.update_weights(model(seed=2), start + 6)
    broken = model(seed=2).state_dict()
    broken["lm_head.weight"][3, 2] = torch.nan
    with pytest.raises(ValueError, match=r"lm_head.weight holds values that are not finite"):
        pushed.update_weights(broken)
    with pytest.raises(WeightVersionError, match="this push lacks"):
        pushed.update_weights({"lm_head.weight": model().lm_head.weight})
    assert type(pushed.model.connection.newest) is int, "the keeper would import torch for a PushedVersion"
    assert_holds(pushed, model(seed=3), start + 6)


def test_a_version_for_each_token_on_every_replica(serve):
    """A replica that starts after the pushes loads those that are kept."""
    service = serve(factory=model, keep_versions=2)
    for seed in (1, 2, 3):
        service.update_weights(model(seed=seed))
    os.kill(pids(service)[0], signal.SIGKILL)
    rows, versions = [[3, 4, 5, 6], [7, 8, 9]], torch.tensor([2, 2, 3, 2, 3, 3, 3])
    scorer = service.model.make_scorer()
    got = scorer.score(ScoreRequest.of(rows, versions=versions)).values
    old, new = (LogProbScorer(model(seed=seed)).score(rows).values for seed in (2, 3))
    assert_near(got, torch.where(versions == 2, old, new))
    with pytest.raises(VersionLostError, match=r"version 1 of the weights is not held, only \[2, 3\]"):
        scorer.score(ScoreRequest.of(rows, versions=torch.tensor([1, 3])))


def test_a_past_version_and_one_that_is_never_pushed(pushed):
    pushed.update_weights(model(), pushed.version + 1)
    remote = clone(pushed.model, timeout=1.0)
    remote.version = pushed.version - 1
    with pytest.raises(
        WeightVersionError, match=rf"version {remote.version} of the weights was requested, but this replica"
    ):
        remote.make_scorer().score(sequences())
    remote.version = pushed.version + 1
    with pytest.raises(TimeoutError):
        remote.make_scorer().score(sequences())


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
    updater = ServiceWeightUpdater(pushed, model(seed=7))
    updater()  # as collector.update_policy_weights_() does
    assert_holds(pushed, model(seed=7), version + 2)
    updater(model(seed=8).state_dict())
    assert_holds(pushed, model(seed=8), version + 3)
    with pytest.raises(ValueError, match="no weights were given"):
        ServiceWeightUpdater(pushed)()


def test_two_updaters_at_once(pushed):
    """Without numbers of their own: each push gets the next one."""
    start, other = pushed.update_weights(model()), ScoringService(**SHARED)

    def update(updater, new):
        return [updater.update_weights(new) for _ in range(3)]

    with callers(pushed.model, count=2) as load, ThreadPoolExecutor(2) as pool:
        versions = list(pool.map(update, (pushed, other), (model(seed=1), model(seed=2)), timeout=LONG))
    other.close()
    assert sorted(version for some in versions for version in some) == list(range(start + 1, start + 7))
    load.assert_all_right(*(LogProbScorer(model(seed)) for seed in range(3)))
    assert {state.version for state in pushed.replicas()} == {start + 6}


def test_a_replica_that_was_killed_comes_back_with_the_pushed_weights(pushed, local):
    version = pushed.update_weights(model(seed=1))
    with callers(pushed.model, calls=12) as load:
        until(lambda: len(load.answers) >= 4)
        os.kill(pids(pushed)[0], signal.SIGKILL)
    load.assert_all_right(LogProbScorer(model(seed=1)))
    all_up(pushed)
    assert_holds(pushed, model(seed=1), version)


@pytest.mark.slow
def test_every_answer_is_of_the_version_that_it_states(pushed):
    """Twenty pushes of two models in turn while four callers work."""
    seeds, scorers, start = {}, [LogProbScorer(model(seed)) for seed in (0, 1)], pushed.update_weights(model())
    seeds[start] = 0
    stop, wrong, versions = [], [], set()

    def work(i):
        scorer = clone(pushed.model).make_scorer()
        while not stop:
            data = sequences(i, count=8)
            found = scorer.evaluate(data)
            want = scorers[seeds_of(found.version)].score(data).values
            versions.add(found.version)
            if not torch.allclose(found.log_prob.values, want, atol=1e-6, rtol=1e-6):
                wrong.append(found.version)
            i += 4

    def seeds_of(version):
        return (version - start) % 2

    with ThreadPoolExecutor(4) as pool:
        done = [pool.submit(work, i) for i in range(4)]
        for i in range(1, 21):
            pushed.update_weights(model(i % 2), start + i)
            time.sleep(0.05)
        stop.append(True)
        for each in done:
            each.result(LONG)
    assert wrong == []
    assert len(versions) > 3


@pytest.mark.slow
def test_an_autoscaled_replica_gets_the_newest_weights(serve):
    scaling = {
        "min_replicas": 1,
        "max_replicas": 2,
        "target_ongoing_requests": 1,
        "upscale_delay_s": 0.5,
        "downscale_delay_s": 600,
    }
    scaling["metrics_interval_s"] = 0.5
    service = serve(factory=partial(delayed, 0.1), autoscaling_config=scaling)
    version = service.update_weights(model(seed=1))
    with callers(service.model, count=6) as load:
        all_up(service)
    load.assert_all_right(LogProbScorer(model(seed=1)))
    assert {state.version for state in service.replicas()} == {version}


@pytest.mark.slow
def test_the_loss_of_the_keeper(serve):
    """Scores go on. A replica that starts without the pushed weights answers nothing until all of them are pushed again."""
    service = serve(factory=model)
    service.update_weights(model(seed=1))
    os.kill(keeper_pid(service), signal.SIGKILL)
    assert_scores(service.model, model(seed=1))
    time.sleep(10.0)  # the replica tells the next keeper which version it holds
    os.kill(pids(service)[0], signal.SIGKILL)
    all_up(service, 1)
    with pytest.raises(WeightVersionError, match="were lost with the actor that kept them"):
        service.model.make_scorer().score(sequences())
    with pytest.raises(WeightVersionError, match="Push all tensors"):
        service.update_weights({"lm_head.weight": model().lm_head.weight})
    service.update_weights(model(seed=2))
    assert_scores(service.model, model(seed=2))
