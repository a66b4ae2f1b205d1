"""The keeper of a service without Ray: configurations, the last push, trials, and lost weights."""

from types import SimpleNamespace

import pytest
import torch

from remote_models import model
from torchrl_llm_kl.service import ServiceConfigError, ServiceError, WeightVersionError, _keeper, _replica
from torchrl_llm_kl.service._keeper import Keeper
from torchrl_llm_kl.service._messages import chunks_of, tensors_of
from torchrl_llm_kl.service._spec import ServiceSpec, Settings
from torchrl_llm_kl.service.engines._engine import TransformersEngine

ray = pytest.importorskip("ray")
ALL = ["body", "head"]


@pytest.fixture
def context(monkeypatch):
    """A fake of Ray and Serve. It keeps objects as they are, and deploys nothing."""
    context = SimpleNamespace(deployed=[], current_actor="keeper", killed=[], deleted=[], applications={})
    fake = SimpleNamespace(put=lambda value: value, get_runtime_context=lambda: context, exceptions=ray.exceptions)
    fake.kill = lambda actor, no_restart: context.killed.append(actor)
    monkeypatch.setattr(_keeper, "ray", fake)
    monkeypatch.setattr(_keeper, "_LOOK", 0.01)
    serve = SimpleNamespace(status=lambda: context, delete=context.deleted.append)
    monkeypatch.setattr(_keeper, "serve", serve)
    context.serve = serve
    monkeypatch.setattr(Keeper, "_watch", lambda self: None)
    return context


def spec(**given):
    return ServiceSpec("name", "source", Settings(max_tokens=1), **{"id": "first", **given})


async def push(keeper, token, version=None, *, seen=0, tensors=ALL, whole=False):
    await keeper.stage(token, f"chunk of {token}")
    return await keeper.commit(token, version, seen, tensors, whole=whole, parts=1)


async def test_the_first_driver_deploys_and_later_ones_must_agree(context):
    keeper = Keeper("name", spec())
    assert await keeper.join(spec(), b"model", context.deployed.append) is None
    assert await keeper.join(spec(id="second"), b"another", context.deployed.append) is None
    error = await keeper.join(spec(num_replicas=2), None, context.deployed.append)
    assert isinstance(error, ServiceConfigError)
    assert "num_replicas: it has 1, requested 2" in str(error)
    assert [each.id for each in context.deployed] == ["first"]
    assert await keeper.model() == [b"model"]
    state = await keeper.state()
    assert (state.id, state.version) == ("first", 0)
    error = await Keeper("name", None).join(spec(), b"model", context.deployed.append)
    assert isinstance(error, ServiceError)
    assert "was deployed by Serve's own commands" in str(error)


async def test_an_error_of_the_deployment_reaches_the_driver(context):
    def fails(spec):
        raise OSError("no room")

    keeper = Keeper("name", spec(factory=b"x"))
    assert isinstance(await keeper.join(spec(), None, fails), OSError)
    await keeper.failed(OSError("no such checkpoint"))
    assert str((await keeper.state()).failure) == "no such checkpoint"


async def test_a_configuration_that_cannot_be_deployed_leaves_the_name_free(context):
    def fails(spec):
        raise ValueError("no such option")

    def lost(spec):
        raise ray.exceptions.ActorUnavailableError("Serve's controller restarts", None)

    keeper = Keeper("name", spec())
    assert isinstance(await keeper.join(spec(), None, lost), ray.exceptions.RayError)
    assert not keeper._tasks
    assert isinstance(await keeper.join(spec(), None, fails), ValueError)
    await keeper._tasks["end"]
    assert (await keeper.state()).ended == "it could not be deployed"
    assert context.killed == ["keeper"]


async def test_the_end_is_tried_until_serve_has_deleted_the_application(context):
    failures = [TimeoutError("it drains"), ray.exceptions.ActorUnavailableError("it restarts", None)]

    def delete(name):
        if failures:
            raise failures.pop()
        context.deleted.append(name)

    context.applications["name"], context.serve.delete = SimpleNamespace(deployments={"Replica": None}), delete
    await Keeper("name", spec()).end("it was shut down")
    assert (context.deleted, context.killed) == (["name"], ["keeper"])


async def test_the_application_of_somebody_else_is_not_deleted(context, monkeypatch):
    context.applications["name"] = SimpleNamespace(deployments={"Chat": None, "Replica": None})
    await Keeper("name", spec()).end("its last driver ended")
    assert (context.deleted, context.killed) == ([], ["keeper"])
    monkeypatch.setattr(_replica, "serve", SimpleNamespace(start=lambda **given: None, status=lambda: context))
    with pytest.raises(ServiceError, match="Serve has another application with the name 'name'"):
        _replica.deploy(spec())


def test_no_service_is_left_after_serve_was_shut_down(context):
    """Serve caches its controller, which is dead then."""

    def status():
        raise ray.exceptions.ActorDiedError()

    context.serve.status = status
    assert not _keeper.is_deployed("name")


async def test_versions_increase_and_are_never_given_twice(context):
    keeper = Keeper("name", spec())
    assert await push(keeper, "a") == 1
    assert await push(keeper, "b", 5) == 5
    for version in (5, 3):
        error = await push(keeper, "c", version)
        assert isinstance(error, WeightVersionError)
        assert f"version {version} of the weights came after version 5, but versions must increase" in str(error)
    assert await keeper.newest(0) == (5, ["chunk of b"], 5, [])
    assert await push(keeper, "d") == 6


async def test_pushes_that_replicas_keep(context):
    """A replica gets the pushes that it lacks, and a new one all that are kept."""
    keeper = Keeper("name", spec())
    assert (await keeper.started("x", "source", 3)).earlier == []
    for name in "abcd":
        await push(keeper, name)
    earlier = [(2, ["chunk of b"]), (3, ["chunk of c"])]
    assert await keeper.newest(0) == (4, ["chunk of d"], 4, earlier)
    assert (await keeper.newest(2)).earlier == earlier[1:]
    assert (await keeper.started("x", "source", 3)).earlier == earlier


async def test_a_keeper_that_restarts_still_keeps_later_pushes(context):
    """Ray starts it with its first arguments. The replicas do not start again."""
    own = ServiceSpec("name", "source", Settings(keep_versions=2), id="first")
    keeper = Keeper("name", own)
    for name in "ab":
        await push(keeper, name)
    assert (await keeper.newest(0)).earlier == [(1, ["chunk of a"])]


async def test_a_push_that_was_dropped_or_is_not_complete_changes_nothing(context):
    """It is not complete if the keeper started again between two chunks."""
    keeper = Keeper("name", spec())
    await keeper.stage("a", 1)
    assert await keeper.staged("a") == [1]
    await keeper.drop("a")
    assert await keeper.staged("a") == []
    for parts in (1, 2):
        error = await keeper.commit("a", None, 0, ALL, whole=True, parts=parts)
        assert isinstance(error, WeightVersionError)
        assert "Push them again" in str(error)
        assert await keeper.newest(0) == (0, [], 0, [])
        await keeper.stage("a", "the second of two chunks")


async def test_a_push_of_a_driver_that_was_killed_is_freed(context, monkeypatch):
    context.applications["name"], keeper = SimpleNamespace(deployments={"Replica": None}), Keeper("name", None)
    await keeper.stage("a", 1)
    await keeper._watch_once()
    assert await keeper.staged("a") == [1]
    monkeypatch.setattr(_keeper, "_STAGED", 0.0)
    await keeper._watch_once()
    assert await keeper.staged("a") == []


async def test_a_push_holds_all_tensors_of_those_before_it(context):
    """A replica that starts later loads nothing else."""
    keeper = Keeper("name", spec())
    assert await push(keeper, "a", tensors=["head"]) == 1
    assert await push(keeper, "b", tensors=["body", "head"]) == 2
    error = await push(keeper, "c", tensors=["head"])
    assert isinstance(error, WeightVersionError)
    assert "lacks 1 tensors of earlier pushes, such as 'body'" in str(error)


async def test_a_keeper_that_lost_the_weights_takes_only_all_of_them(context):
    """The replicas report which version they hold."""
    keeper = Keeper("name", spec())
    assert (await keeper.started("x", "source")).seen == 0, "nothing was pushed"
    assert await keeper.newest(5) == (0, [], 5, [])
    assert (await keeper.started("x", "source")).seen == 5, "a replica that starts now must not answer"
    error = await push(keeper, "a", tensors=["head"])
    assert isinstance(error, WeightVersionError)
    assert "were lost with the actor that kept them. Push all tensors" in str(error)
    assert await push(keeper, "b", seen=7, whole=True) == 8, "after the version that the pusher knows"
    assert await keeper.started("x", "source") == (8, ["chunk of b"], 8, [])


async def test_a_replica_with_another_checkpoint_is_refused_unless_pushed_weights_replace_it(context):
    keeper = Keeper("name", spec())
    assert await keeper.started("x", "source") == (0, [], 0, [])
    assert isinstance(await keeper.started("y", "source"), ServiceError)
    assert await keeper.started("y", "another that serve deploys") == (0, [], 0, [])
    await push(keeper, "a", tensors=["head"])
    assert isinstance(await keeper.started("y", "source"), ServiceError), "the body is another"
    await push(keeper, "b", whole=True)
    assert (await keeper.started("y", "source")).version == 2


async def test_trials_are_counted_until_a_replica_survives(context):
    keeper = Keeper("name", spec())
    assert [await keeper.begin_trial("a") for _ in range(3)] == [1, 2, 3]
    assert await keeper.begin_trial("b") == 1
    await keeper.end_trial("a")
    assert await keeper.begin_trial("a") == 1


# ------------------------------------------------------------------ weights on their way


def test_chunks_hold_every_type_and_shape():
    weights = {
        str(dtype): torch.ones(3, 2).to(dtype) for dtype in (torch.bfloat16, torch.int8, torch.bool, torch.float64)
    }
    weights |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4), "strided": torch.arange(6.0).view(2, 3).T}
    chunks = list(chunks_of(weights.items(), size=30))
    assert len(chunks) > 2
    assert all(sum(data.nbytes for _, _, data in chunk.values()) <= 30 for chunk in chunks if len(chunk) > 1)
    found = {name: value for chunk in chunks for name, value in tensors_of(chunk).items()}
    assert found.keys() == weights.keys()
    for name, value in weights.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value)


def test_names_of_the_tensors_of_a_model():
    """Tied ones share a place."""
    made = model()
    made.lm_head.weight = made.model.embed_tokens.weight
    tied = [names for names in TransformersEngine(made).tensors() if len(names) > 1]
    assert [sorted(names) for names in tied] == [["lm_head.weight", "model.embed_tokens.weight"]]
