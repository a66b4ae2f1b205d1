"""A gang of ranks scores like one process, and starts and ends as a unit."""

import os
import signal
from functools import partial

import pytest
import ray
import torch

from gang_ranks import alive, broken_on_one_rank, build, pids, recorded
from load import all_up, assert_same, callers, keeper_pid, pids as replica_pids, sequences
from torchrl_llm_kl import LogProbScorer
from torchrl_llm_kl.service import GangEngine, ScoringService, WeightVersionError
from waits import LONG, until

pytestmark = pytest.mark.usefixtures("ray_cluster")
CPUS = {"num_cpus": 0.1}


@pytest.fixture(scope="module")
def local():
    return LogProbScorer(build())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


def gang(folder, **options):
    """Two ranks with a slow forward, so that a kill hits a batch, in float64: tensor parallel sums are rounded differently."""
    return partial(GangEngine, partial(recorded, str(folder), 0.03), ranks=2, **CPUS, **options)


@pytest.fixture(scope="module")
def service(ray_cluster, folder):
    with ScoringService(factory=gang(folder), name="gang", timeout=LONG, **CPUS) as found:
        yield found
        found.shutdown()


def groups():
    """The states of all placement groups."""
    return [group["state"] for group in ray.util.placement_group_table().values()]


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["fsdp2", "tp", "none", "by_hand"])
def test_ranks_score_as_one_process(pool, shard):
    """Shards have the names of the whole tensors, also after a score. Tied tensors share a place."""
    for found in pool.run("gang_ranks:difference", shard=shard):
        assert max(found) < 1e-12
    if shard in ("fsdp2", "tp"):
        for found in pool.run("gang_ranks:difference", shard=shard, dtype="float32"):
            assert max(found) < 1e-5
    if shard == "by_hand":
        return
    names = build().state_dict().keys()
    for found, tensors, own in pool.run("gang_ranks:replayed", shard=shard):
        assert found < 1e-12
        assert sorted(name for tied in tensors for name in tied) == sorted(names)
        assert own == {f"model.{name}": name for name in names}


@pytest.mark.slow
def test_models_that_have_no_plan_are_refused(pool):
    for config, text in (
        ({"num_key_value_heads": 1}, "and 1 heads of keys and values"),
        ({"family": "gpt2"}, "GPT2LMHeadModel has the plan None"),
    ):
        assert all(text in message for message in pool.run("gang_ranks:refusal", shard="tp", **config))


def test_a_service_of_gangs_scores_as_the_model(service, local):
    scorer = service.model.make_scorer(temperature=1.3)
    for count in (8, 1):  # with one sequence a rank has nothing to score
        rows = sequences(count, count)
        found = scorer.evaluate(rows, entropy=True)
        want = LogProbScorer(local.model, temperature=1.3).evaluate(rows, entropy=True)
        assert_same(found.log_prob.values, want.log_prob.values)
        assert_same(found.entropy.values, want.entropy.values)


def test_an_error_names_the_sequence_of_the_caller(service):
    good = torch.randint(97, (12,), generator=torch.Generator().manual_seed(0))
    bad = good.clone()
    bad[4] = 97
    for rows, options, message in (
        ([good] * 4 + [bad], {}, "token id 97 at sequence 4, position 4 is outside the vocabulary"),
        ([good, good.new_zeros(70)], {}, "sequence 1 has 70 tokens"),
        ([good], {"adapters": "nobody"}, "has no PEFT adapters"),
    ):
        with pytest.raises(ValueError, match=message):
            service.model.make_scorer(**options).score(rows)


def test_weights_reach_every_rank(service, local):
    new = build(1).state_dict()
    with pytest.raises(ValueError, match="the model has shape"):
        service.update_weights({**new, "lm_head.weight": torch.zeros(2)}, version=1)
    rows = sequences(5)
    assert_same(service.model.make_scorer().score(rows).values, local.score(rows).values)
    service.update_weights(new, version=1)
    want = LogProbScorer(build(1)).score(rows).values
    assert_same(service.model.make_scorer().score(rows).values, want)
    service.update_weights(build().state_dict(), version=2)
    assert_same(service.model.make_scorer().score(rows).values, local.score(rows).values)


@pytest.mark.slow
def test_a_gang_restarts_after_a_rank_was_killed(service, local, folder):
    """The gang restarts with all its ranks and loads the pushed weights. No answer is lost or wrong."""
    version = service.update_weights(build().state_dict())
    before = [pids(folder, rank)[-1] for rank in (0, 1)]
    with callers(service.model, calls=10) as load:
        until(lambda: len(load.answers) >= 8)
        os.kill(before[1], signal.SIGKILL)
    load.assert_all_right(local)
    assert load.asked == 40
    after = [pids(folder, rank)[-1] for rank in (0, 1)]
    assert not set(after) & set(before)
    until(lambda: not any(alive(pid) for pid in before))
    until(lambda: [state.version for state in service.replicas()] == [version])
    assert groups().count("CREATED") == 1


@pytest.mark.slow
def test_a_gang_that_lost_pushed_weights_takes_only_all_of_them(service, local, folder):
    """The keeper of weights is killed, then the gang. The gang restarts from its factory and refuses partial weights."""
    service.update_weights(build(1).state_dict())
    scorer, rows, before = service.model.make_scorer(), sequences(5), len(pids(folder, 0))
    os.kill(keeper_pid(service), signal.SIGKILL)
    os.kill(replica_pids(service)[0], signal.SIGKILL)
    until(lambda: len(pids(folder, 0)) > before)
    all_up(service, 1)
    some = {"lm_head.weight": build(2).state_dict()["lm_head.weight"]}
    with pytest.raises(WeightVersionError, match="Push all tensors"):
        service.update_weights(some)
    wrapped = {f"model.{name}": value for name, value in build().state_dict().items()}  # as in a TorchRL wrapper
    service.update_weights(wrapped)
    assert_same(scorer.score(rows).values, local.score(rows).values)


@pytest.mark.slow
def test_a_killed_replica_ends_its_ranks(service, local, folder):
    before = [pids(folder, rank)[-1] for rank in (0, 1)]
    with callers(service.model, calls=10) as load:
        until(lambda: len(load.answers) >= 8)
        os.kill(replica_pids(service)[0], signal.SIGKILL)
    load.assert_all_right(local)
    until(lambda: not any(alive(pid) for pid in before))
    until(lambda: groups().count("CREATED") == 1)
    before = len(pids(folder, 0))
    os.kill(pids(folder, 0)[-1], signal.SIGKILL)  # a rank, while nobody calls
    until(lambda: len(pids(folder, 0)) > before)


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["fsdp2", "tp"])
def test_a_hanging_rank_is_replaced(tmp_path, local, shard):
    factory = gang(tmp_path, shard=shard)
    with ScoringService(factory=factory, timeout=LONG, health_check_timeout_s=4.0, **CPUS) as service:
        try:
            with callers(service.model, calls=6) as load:
                until(lambda: len(load.answers) >= 4)
                before = pids(tmp_path, 1)[-1]
                os.kill(before, signal.SIGSTOP)
            load.assert_all_right(local)
            assert pids(tmp_path, 1)[-1] != before
            until(lambda: not alive(before))
        finally:
            service.shutdown()


@pytest.mark.slow
def test_a_failing_factory_and_ranks_without_room_are_errors():
    with pytest.raises(OSError, match="no such checkpoint: /nowhere"):
        GangEngine(broken_on_one_rank, ranks=2, start_timeout=LONG, **CPUS)
    until(lambda: groups().count("CREATED") <= 1)
    with pytest.raises(TimeoutError, match=r"2 ranks with \{'CPU': 100\} each \(STRICT_PACK\) had no room"):
        GangEngine(build, ranks=2, num_cpus=100, start_timeout=1.0)


def test_a_service_that_ends_frees_its_ranks(service, folder):
    service.shutdown()
    until(lambda: not any(alive(pid) for rank in (0, 1) for pid in pids(folder, rank)))
    until(lambda: "CREATED" not in groups())
