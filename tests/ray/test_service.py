"""The service on a local Ray cluster: the numbers of a local scorer for every kind of request, by whoever sends it."""

import asyncio
import pickle
from contextlib import closing
from functools import partial

import pytest
import ray
import torch
from tensordict import TensorDict

from closeness import assert_near
from load import Client, assert_same, assert_scores, callers, clone, sequences
from prompt_server import MODEL, PromptServer
from remote_models import delayed, model
from torchrl_llm_kl import AfterPrompt, LogProbScorer, RememberedModel, RetrieveKL, RetrieveLogProb, TopK
from torchrl_llm_kl.scoring import ScoreOptions, ScoreRequest, fingerprint_of
from torchrl_llm_kl.service import HTTPEngine, RayRetrieveLogProb
from waits import LONG, until


def test_the_same_numbers_as_locally(shared, local):
    data = sequences()
    mask = torch.rand(data.values.shape[0], generator=torch.Generator().manual_seed(1)) < 0.5
    mask &= data.positions > 0
    remote, warm = shared.model.make_scorer(), shared.model.make_scorer(temperature=0.5)
    scores, expected = remote.evaluate(data, mask, entropy=True), local.evaluate(data, mask, entropy=True)
    assert_same(scores.log_prob.values, expected.log_prob.values)
    assert_same(scores.entropy.values, expected.entropy.values)
    assert_same(warm.score(data).values, LogProbScorer(model(), temperature=0.5).score(data).values)
    assert shared.fingerprint == fingerprint_of(model())


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


def test_one_name_in_two_namespaces(shared, serve):
    """Neither service sees the other, whatever their configurations."""
    other = serve(factory=partial(model, 1), name="shared", namespace="another")
    assert_scores(other.model, model(1))
    assert len(other.stats()) == 1
    assert other.stats()[0]["pid"] not in {stats["pid"] for stats in shared.stats()}
    other.shutdown()
    assert len(shared.stats()) == 2
    assert_scores(shared.model, model())


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
def test_an_awaited_call_is_cancelled_while_another_runs(serve, local):
    """One forward takes a second."""
    service = serve(factory=partial(delayed, 1.0), num_cpus=0)
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
    assert_same(asyncio.run(calls()).values, local.score(sequences(0)).values)
    until(lambda: service.stats()[0]["queue"] == 0)
    assert service.stats()[0]["requests"] == 2, "the cancelled call was not scored"


@pytest.mark.slow
def test_a_service_of_a_server(serve, local):
    """With failures while four callers wait: no answer is lost or wrong."""
    with closing(PromptServer()) as server:
        service = serve(factory=partial(HTTPEngine, server.url, model=MODEL, timeout=LONG))
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
