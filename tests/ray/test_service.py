"""The service on a local Ray cluster returns the numbers of a local scorer for every kind of request."""

import asyncio
import pickle
from contextlib import closing
from functools import partial

import pytest
import ray
import torch
from ray import serve as ray_serve
from tensordict import TensorDict

from byte_texts import small_tokenizer
from closeness import assert_near
from image_models import IMAGE, image_model, num_placeholders, picture
from load import Client, assert_same, callers, clone, names, record_of, sequences
from prompt_server import MODEL, PromptServer
from remote_models import delayed, model
from torchrl_llm_kl import ByteTeacher, LogProbScorer, RememberedModel, make_algorithm
from torchrl_llm_kl.scoring import ScoreOptions, ScoreRequest, fingerprint_of
from torchrl_llm_kl.service import (
    HTTPEngine,
    ScoringService,
    ServiceClosedError,
    ServiceError,
    app,
)
from toy_models import tiny_model
from waits import LONG, until


def test_the_same_numbers_as_locally(shared, local):
    data = sequences()
    mask = torch.rand(data.values.shape[0], generator=torch.Generator().manual_seed(1)) < 0.5
    mask &= data.positions > 0
    remote, warm = shared.model.make_scorer(), shared.model.make_scorer(temperature=0.5)
    assert_same(warm.score(data).values, LogProbScorer(model(), temperature=0.5).score(data).values)
    calls = [(ScoreRequest.of(data, mask), kind) for kind in ({"entropy": True}, {"top_k": 5}, {"moments": True})]
    rows = [torch.tensor([3, 4, 5, 6, 7]), torch.tensor([9, 10])]
    records = ({"kept": record_of(rows)}, {"top_ids": torch.arange(14).view(7, 2)})
    calls += [(ScoreRequest.of(rows, **given), {}) for given in records]
    for request, options in calls:
        scores, expected = remote.evaluate(request, **options), local.evaluate(request, **options)
        for name, values in expected.per_token.items():
            assert_same(scores.per_token[name].values.double(), values.values.double())


def test_experts_and_images(serve):
    """One service, whose factory returns a mixture of experts, and one of a model with images."""
    made, rows = tiny_model("mixtral"), [[3, 4, 5, 6], [7, 8]]
    routing = LogProbScorer(made).evaluate(rows, record_routing=True).routing.values
    other = torch.where(routing < 0, routing, 5 - routing)
    request = ScoreRequest.of(rows, routing=other)
    found = serve(made).model.make_scorer().score(request).values
    assert_near(found, LogProbScorer(made).score(request).values, dtype=torch.float32)
    with_images, image = image_model("qwen2_5_vl"), picture("qwen2_5_vl", 1)
    (count,) = num_placeholders(with_images, image)
    request = ScoreRequest.of([[1, 7, *[IMAGE] * count, 8, 20, 21, 22]], images=[image])
    found = serve(with_images).model.make_scorer().score(request).values
    assert_near(found, LogProbScorer(with_images).score(request).values, dtype=torch.float32)


def test_a_teacher_with_another_tokenizer(serve):
    """The tokenizers and the teacher are in the service. The student's ids and its own top k travel."""
    tokenizers = small_tokenizer("a", "b", "ab", "ba"), small_tokenizer("a", "b", "aa")
    teacher = ByteTeacher(tiny_model(vocab_size=5), *tokenizers)
    served, student, full = serve(teacher).model, tiny_model(vocab_size=4), torch.tensor([[0, 1, 0, 2], [1, 0, 0, 1]])
    losses = []
    for reference in (teacher, served):
        gkd = make_algorithm("gkd", student, reference=reference, top_k=2)
        tokens = TensorDict(full=full, prompt=full[:, :2], batch_size=[2])
        losses.append(gkd.loss(gkd.prepare(TensorDict(tokens=tokens, batch_size=[2]))).total_loss)
    assert_near(losses[1], losses[0], terms=64, size=10.0)


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
    until(lambda: all(state.waiting == 0 for state in shared.replicas()))


def test_remembered_scores_are_requested_again_once_weights_are_pushed(pushed, tmp_path):
    start, data, reference = pushed.version, sequences(), RememberedModel(pushed.model, tmp_path)
    scorer = reference.make_scorer()
    first = scorer.evaluate(data, entropy=True)
    assert_same(first.log_prob.values, LogProbScorer(model()).score(data).values)
    assert first.version == start
    for again in (scorer, RememberedModel(clone(pushed.model), tmp_path).make_scorer()):
        found = again.begin(ScoreRequest.of(data), ScoreOptions(entropy=True))()
        assert torch.equal(found.log_prob.values, first.log_prob.values)
        assert torch.equal(found.entropy.values, first.entropy.values)
    pushed.update_weights(model(seed=1).state_dict(), start + 1)
    assert pushed.model.fingerprint() == (start + 1, fingerprint_of(model(seed=1)))
    found = scorer.evaluate(data)
    assert found.version == start + 1
    assert_same(found.log_prob.values, LogProbScorer(model(seed=1)).score(data).values)
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
    until(lambda: service.replicas()[0].waiting == 0)


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
        with pytest.raises(ValueError, match="entropy=True is not supported by the server at"):
            service.model.make_scorer().evaluate(sequences(), entropy=True)
        with pytest.raises(TypeError, match=r"weights of the server at .* are not in this process"):
            service.update_weights(model().state_dict(), version=1)


def test_an_application_that_serve_deploys(local):
    """As ``serve run`` and RayService do. A driver then uses the service by its name, and pushes weights into it."""
    target = app({"name": "deployed", "factory": "remote_models:model", "max_wait": 0.0})
    ray_serve.run(target, name="deployed", route_prefix=None)
    service = ScoringService(name="deployed")
    with pytest.raises(ServiceError, match="was deployed by Serve's own commands"):
        ScoringService(model(), name="deployed")
    assert_same(service.model.make_scorer().score(sequences()).values, local.score(sequences()).values)
    assert service.update_weights(model(1)) == 1
    want = LogProbScorer(model(1)).score(sequences()).values
    assert_same(service.model.make_scorer().score(sequences()).values, want)
    ray_serve.delete("deployed")
    until(lambda: not names("deployed"))
    with pytest.raises(ServiceClosedError, match="there is no service 'deployed'"):
        ScoringService(name="deployed")
