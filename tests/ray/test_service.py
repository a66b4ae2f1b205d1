"""The service on a local Ray cluster: the numbers of a local scorer for every kind of request, by whoever sends it."""

import asyncio
import math
import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import ray
import torch
from tensordict import TensorDict

from closeness import assert_near
from load import Client, assert_same, callers, clone, sequences
from prompt_server import MODEL, PromptServer
from remote_models import delayed, model
from torchrl_llm_kl import AfterPrompt, LogProbScorer, RememberedModel, RetrieveKL, RetrieveLogProb, Sampling, TopK
from torchrl_llm_kl.head import Kept
from torchrl_llm_kl.scoring import ScoreOptions, ScoreRequest, fingerprint_of
from torchrl_llm_kl.service import HTTPEngine, RayRetrieveLogProb, ScoringService
from waits import LONG, until

CPUS = {"num_cpus": 0.1}


def test_the_same_numbers_as_locally(shared, local):
    data = sequences()
    mask = torch.rand(data.values.shape[0], generator=torch.Generator().manual_seed(1)) < 0.5
    mask &= data.positions > 0
    remote = shared.model.make_scorer()
    assert_same(remote.score(data).values, local.score(data).values)
    assert_same(remote.score(data, mask).values, local.score(data, mask).values)
    scores, expected = remote.evaluate(data, mask, entropy=True), local.evaluate(data, mask, entropy=True)
    assert_same(scores.log_prob.values, expected.log_prob.values)
    assert_same(scores.entropy.values, expected.entropy.values)
    warm = LogProbScorer(model(), temperature=0.5).score(data).values
    assert_same(shared.model.make_scorer(temperature=0.5).score(data).values, warm)


def test_other_processes_find_it_by_name_and_one_is_killed_mid_call(shared, local):
    handle, doomed = pickle.dumps(shared.model), Client.remote()
    for seed, values in enumerate(ray.get(doomed.ask.remote(handle, [0, 1]))):
        assert_same(values, local.score(sequences(seed)).values)
    unanswered = doomed.ask.remote(handle, list(range(1000)))
    with callers(shared.model, count=2, calls=6) as load:
        until(lambda: len(load.answers) >= 2)
        ray.kill(doomed)
    load.assert_all_right(local)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(unanswered)
    until(lambda: all(stats.get("queue", 1) == 0 for stats in shared.stats()))


def test_the_fingerprint_is_that_of_the_loaded_weights(shared):
    assert shared.fingerprint == fingerprint_of(model())


def test_one_name_in_two_namespaces(shared):
    """Neither service sees the other, whatever their configurations."""
    with ScoringService(factory=partial(model, 1), name="shared", namespace="another", **CPUS) as other:
        assert_same(
            other.model.make_scorer().score(sequences()).values, LogProbScorer(model(1)).score(sequences()).values
        )
        assert len(other.stats()) == 1
        assert other.stats()[0]["pid"] not in {stats["pid"] for stats in shared.stats()}
        other.shutdown()
    assert len(shared.stats()) == 2
    assert_same(shared.model.make_scorer().score(sequences()).values, LogProbScorer(model()).score(sequences()).values)


def test_another_prompt_for_a_served_model(shared):
    """The client builds the sequences, which go over the wire as any others."""
    full = torch.tensor([[7, 8, 11, 12], [5, 6, 13, 14]])
    tokens, hint = {"full": full, "prompt": full[:, :2].clone()}, torch.tensor([[20, 21, 22], [23, 24, 25]])
    data = TensorDict({"tokens": tokens, "hint": hint, "next": {"reward": torch.zeros(2, 1)}}, [2])
    want = RetrieveLogProb(model(), extras=[TopK(3), AfterPrompt("hint")])(data.clone())["next"]
    assert torch.count_nonzero(want["log_probs", "full"]) == 4
    for transform in (RetrieveLogProb, RayRetrieveLogProb):
        found = transform(shared.model, extras=[TopK(3), AfterPrompt("hint")])(data.clone())["next"]
        assert torch.equal(found["top_k", "ids"], want["top_k", "ids"])
        for key in (("log_probs", "full"), ("top_k", "log_probs")):  # those of the top k are float32 for any model
            assert_near(found[key].double(), want[key].double(), size=16, dtype=torch.float32)
    both = RetrieveKL(model(1), shared.model, extras=[AfterPrompt("hint", of="reference")])(data.clone())["next"]
    assert_near(both["ref_log_probs", "full"], want["log_probs", "full"], size=16, dtype=torch.float32)


def test_remembered_scores_are_requested_again_once_weights_are_pushed(pushed, tmp_path):
    def requests():
        return sum(int(stats["requests"]) for stats in pushed.stats())

    start, data, reference = pushed.version, sequences(), RememberedModel(pushed.model, tmp_path)
    scorer = reference.make_scorer()
    first = scorer.evaluate(data, entropy=True)
    assert_same(first.log_prob.values, LogProbScorer(model()).score(data).values)
    assert first.version == start
    sent = requests()
    for again in (scorer, RememberedModel(clone(pushed.model), tmp_path).make_scorer()):
        found = again.begin(ScoreRequest.of(data), ScoreOptions(entropy=True))()
        assert torch.equal(found.log_prob.values, first.log_prob.values)
        assert torch.equal(found.entropy.values, first.entropy.values)
    assert requests() == sent
    pushed.update_weights(model(seed=1).state_dict(), start + 1)
    assert pushed.model.fingerprint() == (start + 1, fingerprint_of(model(seed=1)))
    found = scorer.evaluate(data)
    assert found.version == start + 1
    assert_same(found.log_prob.values, LogProbScorer(model(seed=1)).score(data).values)
    assert requests() > sent
    pushed.model.version = start + 2  # not pushed yet: calls wait for it
    assert pushed.model.fingerprint() is None


@pytest.mark.slow
def test_an_awaited_call_is_cancelled_while_another_runs():
    """One forward takes a second."""
    with ScoringService(factory=partial(delayed, 1.0), num_cpus=0) as service:
        scorer = service.model.make_scorer()

        async def calls():
            first = asyncio.create_task(scorer.ascore(sequences(0)))
            await asyncio.sleep(0.3)  # it runs
            second = asyncio.create_task(scorer.ascore(sequences(1)))
            await asyncio.sleep(0.3)  # it waits
            second.cancel()
            with pytest.raises(asyncio.CancelledError):
                await second
            return await first

        asyncio.run(scorer.ascore(sequences(2)))  # connected
        assert_same(asyncio.run(calls()).values, LogProbScorer(model()).score(sequences(0)).values)
        until(lambda: service.stats()[0]["queue"] == 0)
        assert service.stats()[0]["requests"] == 2, "the cancelled call was not scored"


@pytest.fixture
def server():
    found = PromptServer()
    yield found
    found.close()


@pytest.mark.slow
def test_a_service_of_a_server(server, local):
    """With failures while four callers wait: no answer is lost or wrong."""
    with ScoringService(factory=partial(HTTPEngine, server.url, model=MODEL, timeout=LONG), **CPUS) as service:
        with callers(service.model, calls=6) as load:
            server.change(fails=[503, 0, 500, 429, 0], delay=0.01)
        assert not load.errors
        assert load.asked == 24
        for seed, answer in load.answers.items():
            assert_same(answer, local.score(sequences(seed)).values.float())
        with pytest.raises(ValueError, match="entropy=True cannot be had from the server at"):
            service.model.make_scorer().evaluate(sequences(), entropy=True)
        with pytest.raises(TypeError, match="update them at the server"):
            service.update_weights(model().state_dict(), version=1)
        service.shutdown()


@pytest.mark.slow
def test_callers_with_records_and_without_share_the_replicas():
    """Large and small calls at once, of several settings: each equals its local one."""
    here = model()

    def call(service, seed):
        rng = torch.Generator().manual_seed(seed)
        rows = sequences(seed, 40 if seed % 3 else 4)
        others = torch.randint(97, (rows.values.shape[0], 4), generator=rng)
        ids = [torch.tensor(sorted({int(t), *o.tolist()})) for t, o in zip(rows.values, others, strict=True)]
        kept = None if seed % 4 == 3 else Kept(torch.cat(ids), torch.tensor([0, *map(len, ids)]).cumsum(0))
        sampling = Sampling(*([0.7, 4] if seed % 2 else [1.3, 0, 0.9]))
        options = {"kept": kept, "entropy": seed % 5 == 0}
        found = clone(service.model).make_scorer(sampling=sampling).evaluate(rows, **options)
        want = LogProbScorer(here, sampling=sampling).evaluate(rows, **options)
        assert_near(found.log_prob.values, want.log_prob.values, size=16, dtype=torch.float32)
        if want.entropy is not None:
            assert_near(found.entropy.values, want.entropy.values, size=16, dtype=torch.float32)
        assert not math.isclose(float(want.log_prob.values.sum()), 0.0)

    with ScoringService(factory=model, num_replicas=2, max_tokens=256, max_wait=0.05, **CPUS) as service:
        with ThreadPoolExecutor(12) as pool:
            for done in [pool.submit(call, service, seed) for seed in range(24)]:
                done.result()
        assert all(stats["requests"] for stats in service.stats()), "both replicas scored"
        assert sum(stats["failures"] for stats in service.stats()) == 0
        service.shutdown()
