"""Pushed weights: chunks, the keeper's rules, files, what each replica loads, and scores of mixed ones. Without a cluster."""

import re
import time
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from load import request_of
from remote_models import model
from torchrl_llm_kl.service import ProtocolError, RemoteModel, ScoringService, WeightVersionError, _weights
from torchrl_llm_kl.service._controller import READY, SILENT
from torchrl_llm_kl.service._errors import ReplicaGone, ServiceClosedError, ServiceError, ServiceTimeout
from torchrl_llm_kl.service._spec import ServiceSpec
from torchrl_llm_kl.service._weights import MAX_VERSION, Pushes, WeightKeeper, chunks_of, tensors_of
from torchrl_llm_kl.service._wire import Request
from torchrl_llm_kl.service.client import _push
from torchrl_llm_kl.service.client._connection import Connection
from torchrl_llm_kl.service.client._push import push_weights
from torchrl_llm_kl.service.engines._engine import TransformersEngine

ray = pytest.importorskip("ray")


@pytest.fixture(autouse=True)
def context(monkeypatch):
    """References are the objects themselves. Whether the keeper was created again can be set."""
    found = SimpleNamespace(was_current_actor_reconstructed=False)
    monkeypatch.setattr(ray, "put", lambda value: value)
    monkeypatch.setattr(ray, "get", lambda value, timeout=None: value)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: found)
    return found


def weights(value, *names):
    return {name: torch.full((3, 5), value) for name in names or ("a", "b")}


def stage(kept, token, push):
    chunks = list(chunks_of(push.items(), size=64))
    for chunk in chunks:
        kept.stage(token, chunk)
    return len(chunks)


def commit(kept, push, version=None, *, token=""):
    token = token or f"{time.monotonic_ns()}"
    return kept.commit(token, stage(kept, token, push), version)


def unpacked(chunks):
    return {name: value for chunk in chunks for name, value in tensors_of(chunk).items()}


def held(kept):
    """What a replica loads that starts now."""
    return unpacked(kept.get("model")[2])


def refused(kept, push, version):
    """The message with which a push is refused."""
    found = commit(kept, push, version)
    assert isinstance(found, WeightVersionError)
    return str(found)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert found[name].shape == value.shape
        assert torch.equal(found[name].double(), value.double()), name


def test_chunks_hold_every_type_and_shape():
    base = torch.arange(24.0).reshape(4, 6)
    types = (torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.float8_e4m3fn)
    given = {"transposed": base.T, "part": base[1:3, ::2], "number": torch.tensor(3.5), "empty": torch.zeros(0, 4)}
    given |= {str(dtype): torch.tensor([0, 1, 1]).to(dtype) for dtype in types}
    given["grad"] = base.clone().requires_grad_()
    assert_equal(unpacked(chunks_of(given.items(), size=1)), given)
    with pytest.raises(TypeError, match=r"weights must be dense tensors, got torch.sparse_coo for 'a'"):
        list(chunks_of([("a", torch.eye(2).to_sparse())]))


def test_no_chunk_is_larger_than_asked_but_for_a_single_weight():
    given = {f"{i}": torch.zeros(n, dtype=torch.uint8) for i, n in enumerate([40, 40, 30, 500, 10, 90, 1])}
    sizes = [sum(data.nbytes for _, _, data in chunk.values()) for chunk in chunks_of(given.items(), size=100)]
    assert sizes == [80, 30, 500, 100, 1]


def test_versions_are_never_given_twice(kept):
    assert commit(kept, weights(1.0)) == 1
    assert kept.commit("seen", stage(kept, "seen", weights(2.0)), None, 9) == 10, "a pusher has seen 9"
    assert commit(kept, weights(3.0), token="once") == kept.commit("once", 2, None) == 11, "Ray repeats a lost call"
    for late in (2, 11):
        message = f"version {late} of the weights came after version 11: versions must increase."
        assert refused(kept, weights(4.0), late) == message
    assert_equal(held(kept), weights(3.0))


def test_the_last_version_that_a_message_can_hold(kept):
    """A later one would be in every request of a client that has seen it, and no replica could read those."""
    request = request_of([[1, 2]], newest=MAX_VERSION)
    assert Request.unpack(request.pack()).newest == MAX_VERSION
    with pytest.raises(ProtocolError, match="newest"):
        Request.unpack(replace(request, newest=MAX_VERSION + 1).pack())
    assert commit(kept, weights(1.0), MAX_VERSION) == MAX_VERSION
    for version in (None, MAX_VERSION + 1):
        message = "must be from 0 to 9223372036854775807 (2^63 - 1), got 9223372036854775808"
        assert message in refused(kept, weights(2.0), version)
    assert_equal(held(kept), weights(1.0))


@pytest.mark.parametrize("version", [2**70, 2**63, -1])
def test_a_version_that_no_message_can_hold_is_refused_where_it_enters(version):
    service = object.__new__(ScoringService)
    service.model = RemoteModel(ServiceSpec("name", "source", {"max_tokens": 1}))
    with pytest.raises(WeightVersionError, match=rf"must be from 0 to .*, got {version}\."):
        service.model.version = version
    with pytest.raises(WeightVersionError, match=rf"must be from 0 to .*, got {version}\."):
        service.update_weights(weights(1.0), version)  # Ray is not asked: there is no cluster


def test_incomplete_and_dropped_pushes_change_nothing(kept):
    commit(kept, weights(1.0), 4)
    for token in ("half", "given up"):
        kept.stage(token, next(chunks_of(weights(2.0).items(), size=64)))
    assert isinstance(kept.commit("half", 2, 5), ServiceError)
    assert len(kept.staged("given up")[0]) == 1
    kept.drop("given up")
    assert kept.staged("given up") == ([], None)
    assert kept.get("model")[0] == 4
    assert_equal(held(kept), weights(1.0))
    assert kept.get("another model") == (0, "", [], None)


def test_a_keeper_that_lost_its_weights_goes_on_after_the_replicas_version(monkeypatch, context):
    """The versions of the replicas are all that is left of earlier pushes: they are asked with each push."""
    context.was_current_actor_reconstructed = True
    service = Service(monkeypatch)
    service.replicas[1].version = 7
    assert isinstance(service.keeper.get("model")[3], WeightVersionError)
    with pytest.raises(WeightVersionError, match="version 6 of the weights came after version 7"):
        service.push(weights(1.0), 6)
    assert service.push(weights(1.0)) == 8
    assert service.keeper.get("model")[3] is None


@pytest.fixture
def keep(monkeypatch):
    """Makes a new keeper, which replicas ask."""

    def make():
        one = WeightKeeper("model")
        calls = {name: SimpleNamespace(remote=getattr(one, name)) for name in ("get", "staged")}
        monkeypatch.setattr(_weights, "actor_of", lambda *_: SimpleNamespace(**calls))
        return one

    return make


@pytest.fixture
def kept(keep):
    return keep()


class Replica:
    """Checks weights as an engine does, and counts what it checks."""

    def __init__(self, tensors=()):
        self.checks, self.model, self.version = 0, {}, 0
        self.pushes = Pushes(SimpleNamespace(id="model"), self.check, tensors)

    def check(self, found):
        self.checks += 1
        if "unknown" in found:
            raise KeyError("the model has no weight 'unknown'")
        return {name.removeprefix("model."): value for name, value in found.items()}

    def load(self):
        found = self.pushes.missing()
        if found is None:
            return None
        self.model.update(found.weights)
        self.version = found.version
        self.pushes.take(found)
        return found.version

    def stage(self, *given):
        self.pushes.stage(*given)
        return self.version


def test_a_staged_push_is_fetched_and_checked_once(kept):
    replica = Replica()
    assert replica.load() is None
    chunks = stage(kept, "one", weights(1.0))
    replica.pushes.stage("one")
    assert replica.load() is None, "it is not committed"
    assert kept.commit("one", chunks, None) == 1
    assert (replica.load(), replica.checks, replica.load()) == (1, 1, None)
    replica.pushes.stage("one")  # a call that arrives late
    assert replica.pushes._staged == ("", {}), "nothing is held for it"
    assert_equal(replica.model, weights(1.0))
    with pytest.raises(ServiceError, match="the push is not known"):
        replica.pushes.stage("dropped")


def test_a_replica_that_missed_pushes_loads_the_last_one(kept):
    replica, later = Replica(), Replica()
    commit(kept, weights(1.0), 1)
    assert replica.load() == 1
    commit(kept, weights(2.0), 2)
    commit(kept, weights(3.0, "model.a", "model.b"), 3)  # under the names that a wrapper gives them
    assert (replica.load(), replica.checks, later.load(), later.checks) == (3, 2, 3, 1)
    for each in (replica, later):
        assert_equal(each.model, weights(3.0))


@pytest.mark.parametrize("tensors", [(), [["a", "tied"], ["b"], ["c"]]])
def test_a_push_holds_all_tensors_of_those_before_it(kept, tensors):
    """A replica that starts later loads nothing else."""
    replica = Replica(tensors)
    commit(kept, weights(1.0, "a", "b"))
    replica.load()
    stage(kept, "less", weights(2.0, "b"))
    message = "this push lacks 1 tensors, such as 'a', which others held: push those"
    with pytest.raises(WeightVersionError, match=message):
        replica.stage("less")
    stage(kept, "more", weights(2.0, "tied" if tensors else "a", "b", "c"))
    replica.stage("more")


def test_a_replica_knows_whether_pushes_replaced_its_whole_model(kept):
    """A changed checkpoint shows behind a push of some tensors only."""
    tensors = [["a", "tied"], ["b"]]
    one, again, unknown = Replica(tensors), Replica(tensors), Replica()
    assert not one.pushes.whole
    for names, whole in ((["b"], False), (["tied", "b"], True)):
        commit(kept, weights(1.0, *names))
        one.load()
        assert one.pushes.whole == whole, names
    assert again.load() == unknown.load() == 2
    assert again.pushes.whole
    assert not unknown.pushes.whole, "an engine that does not name its tensors"


@pytest.mark.parametrize("restarted", [True, False])
def test_after_the_loss_of_the_keeper_a_push_must_hold_all_tensors(context, keep, restarted):
    """A replica that starts later loads nothing else. Ray restarts the keeper, or another is made."""
    first, tensors = keep(), [["a", "tied"], ["b"], ["c"]]
    knows, late, nameless = Replica(tensors), Replica(tensors), Replica()
    commit(first, weights(1.0, "a", "b"))
    assert knows.load() == 1
    context.was_current_actor_reconstructed = restarted
    second = keep()
    assert second.check(None, 1) is None, "each push asks first, with the version that the pusher has seen"
    stage(second, "some", weights(2.0, "a", "b"))
    for replica in (knows, late):
        with pytest.raises(WeightVersionError, match="lacks 1 tensors, such as 'c', and what was pushed before"):
            replica.stage("some")
    nameless.stage("some")
    chunks = stage(second, "all", weights(3.0, "tied", "b", "c"))
    for replica in (knows, late):
        replica.stage("all")
    assert second.commit("all", chunks, None, 1) == 2
    assert knows.load() == late.load() == 2


def test_names_of_the_tensors_of_a_model():
    """Tied weights are one tensor with two names, and buffers count."""
    layers = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    layers[1].weight = layers[0].weight
    engine = TransformersEngine(model())
    assert sorted(name for tied in engine.tensors() for name in tied) == sorted(model().state_dict())
    vars(next(iter(engine._scorers.values())))["model"] = layers
    rest = [[f"2.{name}"] for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")]
    assert engine.tensors() == [["0.weight", "1.weight"], ["1.bias"], *rest]


class Service(Connection):
    """Replicas and a keeper in this process. A call is a future; ``down`` holds the error of a replica, None if it hangs."""

    def __init__(self, monkeypatch, count=3):
        super().__init__(ServiceSpec("s", "model", {}, num_replicas=count, id="model"))
        self.keeper, self.states, self.down, self.called = WeightKeeper("model"), [READY] * count, {}, []
        names = ("check", "stage", "commit", "drop", "get", "staged")
        remote = SimpleNamespace(**{n: SimpleNamespace(remote=getattr(self.keeper, n)) for n in names})
        monkeypatch.setattr(_push, "keeper_of", lambda spec: remote)
        monkeypatch.setattr(_weights, "actor_of", lambda *_: remote)
        monkeypatch.setattr(ray, "wait", lambda asked, timeout: (self.wait(asked, timeout), []))
        monkeypatch.setattr(ray, "get", lambda one, timeout=None: one.result(0) if isinstance(one, Future) else one)
        self.replicas = [Replica() for _ in range(count)]

    def connect(self, **_): ...

    def table(self, **_):
        return {"states": self.states}

    def wait(self, asked, timeout):
        done = [one for one in asked if one.done()]
        if not done:
            time.sleep(min(timeout, 0.01))
        return done[:1]

    @property
    def handles(self):
        def handle(replica):
            return SimpleNamespace(call=SimpleNamespace(remote=lambda *call: self.call_of(replica, *call)))

        return [handle(replica) for replica in range(len(self.replicas))]

    def call_of(self, replica, method, *args):
        self.called.append((replica, method))
        one, found = self.replicas[replica], Future()
        calls = {"stage_weights": one.stage, "drop_weights": one.pushes.drop, "refresh_weights": one.load}
        down = self.down.get(replica, "up")
        if isinstance(down, list):
            down = down.pop(0) if down else "up"
        if isinstance(down, ray.exceptions.RayError):
            found.set_exception(down)
        elif isinstance(down, Exception):
            found.set_result(down)
        elif down is not None:
            try:
                answer = calls[method](*args)
                found.set_result(None if method == "refresh_weights" else answer)
            except Exception as error:
                found.set_result(error)
        return found

    def push(self, given, version=None):
        return push_weights(self, given, version, timeout=5.0, wait=0.3)


def test_a_push_reaches_all_and_names_those_that_it_does_not(monkeypatch):
    """A replica that dies is asked again; one that hangs is not awaited once another one has answered."""
    service = Service(monkeypatch)
    pushed = service.push(weights(1.0))
    assert (pushed, pushed.missed, service.newest) == (1, (), 1)
    service.down = {0: [ray.exceptions.RayActorError(), ReplicaGone("it ends")], 1: None, 2: ServiceError("no model")}
    start = time.monotonic()
    pushed = service.push(weights(2.0))
    assert (pushed, pushed.missed) == (2, ("s:1", "s:2"))
    assert 0.3 <= time.monotonic() - start < 3.0
    assert_equal(service.replicas[0].model, weights(2.0))
    assert_equal(service.replicas[1].model, weights(1.0))
    assert service.replicas[1].load() == 2
    assert_equal(service.replicas[1].model, weights(2.0))


def test_calls_of_several_replicas(monkeypatch):
    service = Service(monkeypatch)
    service.down, service.states[1] = {1: None, 2: ray.exceptions.RayActorError()}, SILENT
    for replica, message in ((1, "replica s:1 hangs"), (2, r"replica s:2 did not answer within 0\.3 s: The actor")):
        found = service.gather("drop_weights", replicas=[0, replica], timeout=0.3)
        assert (found[0], type(found[replica])) == (None, ServiceTimeout)
        assert re.match(message, str(found[replica]))
    assert service.gather("drop_weights", replicas=[2], timeout=5, give_up=True) == {2: service.down[2]}
    unawaited = service.gather("drop_weights", replicas=[1], timeout=5, needed=())
    assert isinstance(unawaited[1], ServiceTimeout)
    service.down = {0: [ReplicaGone("it ends")]}
    assert service.call("drop_weights", timeout=5) is None
    assert [replica for replica, _ in service.called[-2:]] == [0, 1], "another replica is asked"
    service.down[1] = ValueError("of the call itself")
    with pytest.raises(ValueError, match="of the call itself"):
        service.call("drop_weights", timeout=5)


@pytest.mark.parametrize(
    ("given", "version", "error", "message"),
    [
        (weights(2.0, "a", "unknown"), None, KeyError, "no weight 'unknown'"),
        ({}, None, ValueError, "there are no weights"),
        ({"a": 1}, None, TypeError, "got int for 'a'"),
        (weights(2.0), 1, WeightVersionError, "version 1 of the weights came after version 3"),
        (weights(2.0), 2**63, WeightVersionError, r"from 0 to .*, got 9223372036854775808"),
        (weights(2.0), -1, WeightVersionError, r"from 0 to .*, got -1"),
    ],
)
def test_a_push_that_fails_changes_nothing(monkeypatch, given, version, error, message):
    service = Service(monkeypatch)
    service.push(weights(1.0), 3)
    if version is not None:  # refused before anything is pushed
        monkeypatch.setattr(service.keeper, "stage", None)
    with pytest.raises(error, match=message):
        service.push(given, version)
    assert service.keeper.get("model")[0] == service.newest == 3
    assert not service.keeper._staged
    for replica in service.replicas:
        assert replica.load() is None
        assert_equal(replica.model, weights(1.0))


def test_a_push_is_refused_if_one_replica_cannot_take_it(monkeypatch):
    """Of two replicas, one has taken a tensor that the push lacks."""
    service = Service(monkeypatch, 2)
    service.push(weights(1.0))
    service.replicas[1] = Replica()
    with pytest.raises(WeightVersionError, match="lacks 1 tensors, such as 'a'"):
        service.push(weights(2.0, "b"))
    assert service.push(weights(2.0)) == 2
    assert_equal(service.replicas[0].model, service.replicas[1].model)


@pytest.mark.parametrize("down", [ServiceTimeout("took more than 5 s"), ServiceClosedError("shut down")])
def test_a_push_that_no_replica_takes(monkeypatch, down):
    service = Service(monkeypatch)
    service.down = dict.fromkeys(range(3), down)
    with pytest.raises(type(down), match=str(down)):
        service.push(weights(1.0))
    assert service.keeper.get("model") == (0, "", [], None)
    assert not service.keeper._staged
