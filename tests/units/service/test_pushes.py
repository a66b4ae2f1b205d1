"""Pushed weights: chunks, the keeper's rules, files, and what each replica loads. Without a cluster."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from remote_models import model
from torchrl_llm_kl.service import ProtocolError, RemoteModel, ScoringService, WeightVersionError, _weights
from torchrl_llm_kl.service._errors import ServiceClosedError, ServiceError, ServiceTimeout
from torchrl_llm_kl.service._weights import MAX_VERSION, Pushes, WeightKeeper, chunks_of, tensors_of
from torchrl_llm_kl.service._wire import Request, Settings
from torchrl_llm_kl.service.client import _push
from torchrl_llm_kl.service.client._push import ask_all, push_weights
from torchrl_llm_kl.service.control._spec import ServiceSpec
from torchrl_llm_kl.service.engines._engine import TransformersEngine
from waits import LONG

ray = pytest.importorskip("ray")


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """References are the objects themselves."""
    monkeypatch.setattr(ray, "put", lambda value: value)
    monkeypatch.setattr(ray, "get", lambda value, timeout=None: value)
    context = SimpleNamespace(was_current_actor_reconstructed=False)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(WeightKeeper, "_watch", lambda self: None)


def keeper(folder: Path | None = None, *, source: str = "model", name: str = "service") -> WeightKeeper:
    return WeightKeeper(name, [], "namespace", source, None if folder is None else str(folder))


def weights(value: float, *names: str) -> dict[str, Tensor]:
    return {name: torch.full((3, 5), value) for name in names or ("a", "b")}


def commit(
    keeper: WeightKeeper, push: Mapping[str, Tensor], version: int | None = None, *, token: str = ""
) -> int | Exception:
    token = token or f"{time.monotonic_ns()}"
    chunks = list(chunks_of(push.items(), size=64))
    for chunk in chunks:
        keeper.stage(token, chunk)
    return keeper.commit(token, len(chunks), version)


def held(keeper: WeightKeeper) -> dict[str, Tensor]:
    """What a replica loads that starts now."""
    pushes = keeper.get("model")[1]
    chunks = [chunk for _, references, _ in pushes for chunk in references]
    return {name: value for chunk in chunks for name, value in tensors_of(chunk).items()}


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


# ------------------------------------------------------------------ chunks


def test_chunks_hold_every_type_and_shape() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    given = {
        "transposed": base.T,
        "part": base[1:3, ::2],
        "number": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "grad": base.clone().requires_grad_(),
        **{
            str(dtype): torch.tensor([0, 1, 1]).to(dtype)
            for dtype in (torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.float8_e4m3fn)
        },
    }
    found = {name: value for chunk in chunks_of(given.items(), size=1) for name, value in tensors_of(chunk).items()}
    assert found.keys() == given.keys()
    for name, value in given.items():
        assert found[name].dtype == value.dtype
        assert found[name].shape == value.shape
        assert torch.equal(found[name].double(), value.double()), name


def test_no_chunk_is_larger_than_asked_but_for_a_single_weight() -> None:
    given = {f"{i}": torch.zeros(n, dtype=torch.uint8) for i, n in enumerate([40, 40, 30, 500, 10, 90, 1])}
    sizes = [sum(data.nbytes for _, _, data in chunk.values()) for chunk in chunks_of(given.items(), size=100)]
    assert sizes == [80, 30, 500, 100, 1]


def test_sparse_weights_are_refused() -> None:
    with pytest.raises(TypeError, match=r"weights must be dense tensors, got torch.sparse_coo for 'a'"):
        list(chunks_of([("a", torch.eye(2).to_sparse())]))


# ------------------------------------------------------------------ versions


def test_versions_are_never_given_twice() -> None:
    one = keeper()
    assert [one.next_version(), one.next_version()] == [1, 2]
    assert commit(one, weights(1.0)) == 3
    assert one.next_version(seen=9) == 10
    assert commit(one, weights(2.0), 10) == 10
    assert commit(one, weights(2.0), 10) == 10, "again, as after a timeout"
    assert commit(one, weights(3.0), token="once") == one.commit("once", 2, None) == 11, "Ray repeats a lost call"
    late = commit(one, weights(4.0), 2)
    assert isinstance(late, WeightVersionError)
    assert str(late) == "version 2 of the weights was pushed after version 11: versions must increase."
    assert_equal(held(one), weights(3.0))


def test_the_last_version_that_a_message_can_hold() -> None:
    """A later one would be in every request of a client that has seen it, and no replica could read those."""
    request = Request(np.array([1, 2]), np.array([2]), None, Settings(), newest=MAX_VERSION)
    assert Request.unpack(request.pack()).newest == MAX_VERSION
    with pytest.raises(ProtocolError, match="newest"):
        Request.unpack(replace(request, newest=MAX_VERSION + 1).pack())
    one = keeper()
    assert commit(one, weights(1.0), MAX_VERSION) == MAX_VERSION
    for version in (None, MAX_VERSION + 1):
        refused = commit(one, weights(2.0), version)
        assert isinstance(refused, WeightVersionError)
        assert "must be from 0 to 9223372036854775807 (2^63 - 1), got 9223372036854775808" in str(refused)
    with pytest.raises(WeightVersionError, match="got 9223372036854775808"):
        one.next_version()
    assert_equal(held(one), weights(1.0))


@pytest.mark.parametrize("version", [2**70, 2**63, -1])
def test_a_version_that_no_message_can_hold_is_refused_where_it_enters(version: int) -> None:
    remote = RemoteModel(ServiceSpec("name", model, "source", {"max_tokens": 1}))
    with pytest.raises(WeightVersionError, match=rf"must be from 0 to .*, got {version}\."):
        remote.version = version
    service = object.__new__(ScoringService)
    service.model = remote
    with pytest.raises(WeightVersionError, match=rf"must be from 0 to .*, got {version}\."):
        service.update_weights(weights(1.0), version)  # Ray is not asked: there is no cluster


@pytest.mark.parametrize(("version", "message"), [(2**63, "must be from 0 to"), ("x", "was not written by a service")])
def test_a_file_with_an_invalid_version_is_an_error(tmp_path: Path, version: Any, message: str) -> None:
    commit(keeper(tmp_path), weights(1.0))
    (file,) = tmp_path.iterdir()
    save_file(weights(1.0), file, {"token": "t", "version": str(version), "model": "model"})
    assert message in str(keeper(tmp_path).get("model")[2])


@pytest.mark.parametrize(
    ("again", "differs"),
    [
        ({"a": torch.full((3, 5), 1.0), "b": torch.full((3, 5), 1.5)}, "'b'"),
        ({"a": torch.full((3, 5), 1.0)}, "'b'"),
        ({**weights(1.0), "c": torch.zeros(1)}, "'c'"),
        ({"a": torch.full((3, 5), 1.0).double(), "b": torch.full((3, 5), 1.0)}, "'a'"),
        ({"a": torch.full((5, 3), 1.0), "b": torch.full((5, 3), 1.0)}, "'a' and 1 more"),
    ],
    ids=["values", "fewer", "more", "dtype", "shapes"],
)
def test_one_version_has_one_set_of_weights(again: dict[str, Tensor], differs: str) -> None:
    """A replica that missed the second push would mix both."""
    one = keeper()
    assert commit(one, weights(1.0), 3, token="first") == 3
    refused = commit(one, again, 3)
    assert isinstance(refused, WeightVersionError)
    assert f"version 3 of the weights was pushed before with others ({differs}" in str(refused)
    assert not one._staged
    assert_equal(held(one), weights(1.0))
    reordered = dict(reversed(weights(1.0).items()))
    assert commit(one, reordered, 3) == 3, "the same weights"
    assert [push[0] for push in one.get("model")[1]] == ["first"], "nothing new to load"
    assert commit(one, again, 4) == 4


def test_incomplete_and_dropped_pushes_change_nothing() -> None:
    one = keeper()
    commit(one, weights(1.0), 4)
    one.stage("half", next(chunks_of(weights(2.0).items(), size=64)))
    assert isinstance(one.commit("half", 2, 5), ServiceError)
    one.stage("given up", next(chunks_of(weights(2.0).items(), size=64)))
    assert len(one.get("model", "given up")[1]) == 2
    one.drop("given up")
    assert len(one.get("model", "given up")[1]) == 1
    assert one.get("model")[0] == 4
    assert one.get("another model") == (0, [], None)


def test_pushes_are_kept_until_later_ones_replace_them() -> None:
    one = keeper()
    commit(one, weights(1.0))
    commit(one, weights(2.0, "b"))
    assert len(one.get("model")[1]) == 2
    assert_equal(held(one), {**weights(1.0, "a"), **weights(2.0, "b")})
    commit(one, weights(3.0, "b", "c"))
    assert len(one.get("model")[1]) == 2
    commit(one, weights(4.0, "a", "b", "c"))
    assert len(one.get("model")[1]) == 1


def test_a_keeper_that_lost_its_weights_goes_on_after_the_replicas_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """The versions of the replicas are all that is left of earlier pushes."""
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(was_current_actor_reconstructed=True))
    alive = SimpleNamespace(stats=SimpleNamespace(remote=lambda: {"version": 7}))
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: {"s:1": alive}[name])
    one = WeightKeeper("s", ["s:0", "s:1"], "namespace", "model")
    assert isinstance(one.get("model")[2], WeightVersionError)
    assert isinstance(commit(one, weights(1.0), 6), WeightVersionError)
    assert commit(one, weights(1.0)) == 8
    assert one.get("model")[2] is None


# ------------------------------------------------------------------ on disk


def test_a_new_keeper_takes_up_the_files_of_an_earlier_one(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    first = keeper(folder, name="a/b: c")
    commit(first, weights(1.0), 5)
    half = {"b": torch.full((3, 5), 2.0, dtype=torch.bfloat16)}
    commit(first, half, 6)
    expected = {**weights(1.0, "a"), **half}
    assert len(list(folder.iterdir())) == 2
    assert keeper(folder, name="another").get("model")[0] == 0
    second = keeper(folder, name="a/b: c")
    assert second.get("model")[0] == 6
    assert_equal(held(second), expected)
    assert second.next_version() == 7
    assert isinstance(commit(second, weights(1.0), 5), WeightVersionError)
    assert commit(second, weights(3.0)) == 8
    (only,) = folder.iterdir()
    assert_equal(load_file(only), weights(3.0))
    assert_equal(held(keeper(folder, name="a/b: c")), weights(3.0))


def test_a_push_that_cannot_be_written_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that ends halfway, as when the disk is full or the process is killed."""
    one = keeper(tmp_path)
    commit(one, weights(1.0), 1)

    def full(given: object, path: Path, metadata: object) -> None:
        Path(path).write_bytes(b"half of it")
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", full)
        assert str(commit(one, weights(2.0), 2)) == "No space left on device"
    (tmp_path / "service-00000001.123.part").write_bytes(b"left by a process that was killed")
    assert_equal(held(one), weights(1.0))
    assert keeper(tmp_path).get("model")[0] == 1
    assert_equal(held(keeper(tmp_path)), weights(1.0))


def test_files_of_another_model_and_broken_ones_are_errors_and_stay(tmp_path: Path) -> None:
    commit(keeper(tmp_path, source="another"), weights(1.0), 1)
    (file,) = tmp_path.iterdir()
    one = keeper(tmp_path)
    assert "holds weights of another model: another, this is model" in str(one.get("model")[2])
    assert isinstance(commit(one, weights(2.0)), WeightVersionError)
    good = file.read_bytes()
    for bad in (good[: len(good) // 2], good[:100], b"", b"\x80\x04\x95pickle"):
        file.write_bytes(bad)
        one = keeper(tmp_path)
        assert "cannot be read" in str(one.get("model")[2])
        assert isinstance(commit(one, weights(2.0)), WeightVersionError)
        assert [path.read_bytes() for path in tmp_path.iterdir()] == [bad]
    file.unlink()
    assert one.get("model")[2] is None, "the keeper needs no restart"
    assert commit(one, weights(2.0)) == 1


# ------------------------------------------------------------------ the replica's side


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Callable[[WeightKeeper], WeightKeeper]:
    """Makes a keeper the one that replicas ask."""

    def ask(one: WeightKeeper) -> WeightKeeper:
        remote = SimpleNamespace(get=SimpleNamespace(remote=one.get))
        monkeypatch.setattr(_weights, "_find_keeper", lambda spec: remote)
        return one

    return ask


@pytest.fixture
def kept(found: Callable[[WeightKeeper], WeightKeeper]) -> WeightKeeper:
    """The keeper that replicas ask."""
    return found(keeper())


class Replica:
    """Checks weights as an engine does, and counts what it checks."""

    def __init__(self, kept: WeightKeeper, tensors: Sequence[Sequence[str]] = ()) -> None:
        self.checks = 0
        self.pushes = Pushes(SimpleNamespace(source="model"), self.check, tensors)  # type: ignore[arg-type]
        self.model: dict[str, Tensor] = {}
        self.held = 0, ""

    def check(self, found: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        self.checks += 1
        if "unknown" in found:
            raise KeyError("the model has no weight 'unknown'")
        return {name.removeprefix("model."): value for name, value in found.items()}

    def load(self) -> int | None:
        found = self.pushes.missing()
        if found is None:
            return None
        self.model.update(found.weights)
        self.held = found.version, found.digest
        self.pushes.take(found.token)
        return found.version


def stage(kept: WeightKeeper, token: str, push: Mapping[str, Tensor]) -> int:
    chunks = list(chunks_of(push.items(), size=64))
    for chunk in chunks:
        kept.stage(token, chunk)
    return len(chunks)


def test_a_staged_push_is_fetched_and_checked_once(kept: WeightKeeper) -> None:
    replica = Replica(kept)
    assert replica.load() is None
    chunks = stage(kept, "one", weights(1.0))
    replica.pushes.stage("one")
    assert replica.load() is None, "it is not committed"
    assert kept.commit("one", chunks, None) == 1
    assert replica.load() == 1
    assert replica.checks == 1
    assert replica.load() is None
    replica.pushes.stage("one")  # a call that arrives late
    assert replica.pushes._staged == ("", {}), "nothing is held for it"
    assert_equal(replica.model, weights(1.0))
    with pytest.raises(ServiceError, match="the push is not known"):
        replica.pushes.stage("dropped")


def test_a_replica_that_missed_pushes_loads_all_of_them_in_order(kept: WeightKeeper) -> None:
    replica, later = Replica(kept), Replica(kept)
    commit(kept, weights(1.0), 1)
    assert replica.load() == 1
    commit(kept, weights(2.0, "b"), 2)
    commit(kept, weights(3.0, "model.a"), 3)  # under the name that a wrapper gives it
    assert replica.load() == 3
    assert replica.checks == 3
    assert later.load() == 3
    assert_equal(replica.model, {**weights(3.0, "a"), **weights(2.0, "b")})
    assert_equal(later.model, replica.model)
    commit(kept, weights(4.0, "a", "b", "model.a"), 4)  # replaces the one that both took last
    assert replica.load() == later.load() == 4
    assert_equal(replica.model, weights(4.0))


def test_a_replica_knows_whether_pushes_replaced_its_whole_model(kept: WeightKeeper) -> None:
    """A changed checkpoint shows behind a push of some tensors only."""
    pushes = Replica(kept, tensors=[["a", "tied"], ["b"]]).pushes
    assert not pushes.whole
    for names, whole in ((["b"], False), (["tied"], True), (["b"], True)):
        commit(kept, weights(1.0, *names))
        found = pushes.missing()
        assert found is not None
        pushes.take(found.token)
        assert pushes.whole == whole, names
    again, unknown = Replica(kept, tensors=[["a", "tied"], ["b"]]), Replica(kept)
    assert again.load() == unknown.load() == 3
    assert again.pushes.whole
    assert not unknown.pushes.whole, "an engine that does not name its tensors"


def test_after_the_loss_of_the_keeper_a_push_must_replace_what_was_pushed(
    monkeypatch: pytest.MonkeyPatch, found: Callable[[WeightKeeper], WeightKeeper]
) -> None:
    """A replica that starts later has nothing else in place of the base's weights."""
    first, tensors = found(keeper()), [["a", "tied"], ["b"], ["c"]]
    knows, missed, late, nameless = (Replica(first, tensors=names) for names in (tensors, tensors, tensors, ()))
    assert missed.load() is None
    commit(first, weights(1.0, "a", "b"))
    assert knows.load() == 1
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(was_current_actor_reconstructed=True))
    monkeypatch.setattr(WeightKeeper, "_version_of", lambda self, replica: 1)
    second = found(WeightKeeper("service", ["service:0"], "namespace", "model"))
    assert second.check(None) is None, "each push asks first"
    stage(second, "some", weights(2.0, "b"))
    with pytest.raises(
        WeightVersionError, match=r"without 'a', does not replace them all: push all tensors of the model"
    ):
        knows.pushes.stage("some")
    for replica in (missed, late):
        with pytest.raises(WeightVersionError, match=r"of some tensors only, .*: push all tensors of the model"):
            replica.pushes.stage("some")
    nameless.pushes.stage("some")
    stage(second, "same", weights(2.0, "a", "b"))
    knows.pushes.stage("same")
    with pytest.raises(WeightVersionError):
        late.pushes.stage("same")  # it does not know what was pushed
    chunks = stage(second, "all", weights(3.0, "tied", "b", "c"))
    for replica in (knows, missed, late):
        replica.pushes.stage("all")
    assert second.commit("all", chunks, None) == 2
    for replica in (knows, missed, late):
        assert replica.load() == 2
        assert_equal({name: replica.model[name] for name in ("tied", "b", "c")}, weights(3.0, "tied", "b", "c"))
    stage(second, "later", weights(4.0, "b"))
    for replica in (knows, missed, late):
        replica.pushes.stage("later")


def test_a_new_keeper_asks_what_the_pusher_has_seen(kept: WeightKeeper) -> None:
    """It and a replica that started again know of no push: only a push of all tensors is taken."""
    one, replica = kept, Replica(kept, tensors=[["a"], ["b"]])
    assert replica.load() is None
    stage(one, "some", weights(2.0, "b"))
    replica.pushes.stage("some", None, 0)
    with pytest.raises(WeightVersionError, match=r"of some tensors only, .*: push all tensors of the model"):
        replica.pushes.stage("some", None, 1)
    stage(one, "all", weights(2.0))
    replica.pushes.stage("all", None, 1)


def test_a_replica_refuses_other_weights_under_its_version(
    kept: WeightKeeper, found: Callable[[WeightKeeper], WeightKeeper]
) -> None:
    """The keeper was created again, and knows nothing: the replica does."""
    replica = Replica(kept, tensors=[["a"], ["b"]])
    commit(kept, weights(1.0), 3)
    assert replica.load() == 3
    again = found(keeper())
    stage(again, "other", weights(2.0))
    with pytest.raises(WeightVersionError, match=r"version 3 of the weights was pushed before with others"):
        replica.pushes.stage("other", 3)
    replica.pushes.stage("other", 4)
    replica.pushes.stage("other")
    chunks = stage(again, "same", weights(1.0))
    replica.pushes.stage("same", 3)
    before = replica.held
    assert again.commit("same", chunks, 3) == 3
    assert replica.load() == 3
    assert replica.held == before, "the same digest"
    assert before[1]


def test_a_keeper_that_is_lost_before_the_first_push_takes_any(
    monkeypatch: pytest.MonkeyPatch, found: Callable[[WeightKeeper], WeightKeeper]
) -> None:
    replica = Replica(keeper(), tensors=[["a"], ["b"]])
    monkeypatch.setattr(_weights, "_find_keeper", lambda spec: None)
    assert replica.load() is None
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(was_current_actor_reconstructed=True))
    second = found(keeper())
    chunks = stage(second, "adapter", weights(1.0, "b"))
    replica.pushes.stage("adapter")
    assert second.commit("adapter", chunks, None) == 1
    assert replica.load() == 1


def test_names_of_the_tensors_of_a_model() -> None:
    """Tied weights are one tensor with two names, and buffers count."""
    layers = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    layers[1].weight = layers[0].weight
    engine = TransformersEngine(model())
    assert sorted(name for tied in engine.tensors() for name in tied) == sorted(model().state_dict())
    vars(next(iter(engine._scorers.values())))["model"] = layers
    rest = [[f"2.{name}"] for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")]
    assert engine.tensors() == [["0.weight", "1.weight"], ["1.bias"], *rest]


# ------------------------------------------------------------------ all replicas at once


def test_all_are_asked_at_once_and_a_hung_one_is_not_awaited() -> None:
    hung, together = threading.Event(), threading.Barrier(3, timeout=LONG)

    def call(replica: int) -> object:
        if replica == 2:
            hung.wait(LONG)
        elif replica == 4:
            raise ServiceTimeout("unreachable")
        else:
            together.wait()
        return None

    answers = ask_all(call, range(5), wait=0.3)
    assert {replica: type(answer) for replica, answer in answers.items()} == {
        **dict.fromkeys((0, 1, 3), type(None)),
        4: ServiceTimeout,
    }
    assert ask_all(call, [2], wait=0.0, needed=()) == {}
    hung.set()
    assert ask_all(lambda replica: replica, range(3), wait=0.0, needed=[0, 1, 2]) == {0: 0, 1: 1, 2: 2}


class Service:
    """Replicas and a keeper in this process, with calls that fail as asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int = 3, tensors: Sequence[Sequence[str]] = ()) -> None:
        self.keeper, self.newest, self.active = keeper(), 0, list(range(count))
        self.spec = SimpleNamespace(
            name="s", num_replicas=count, source="model", settings={}, replica_name=lambda i: f"s:{i}"
        )
        names = ("check", "stage", "commit", "drop", "get")
        remote = SimpleNamespace(**{n: SimpleNamespace(remote=getattr(self.keeper, n)) for n in names})
        monkeypatch.setattr(_push, "keeper_of", lambda spec: remote)
        monkeypatch.setattr(_weights, "_find_keeper", lambda spec: remote)
        self.replicas = [Replica(self.keeper, tensors) for _ in range(count)]
        self.threads = [threading.Lock() for _ in range(count)]
        self.down: dict[int, Exception] = {}
        self.hung: dict[int, threading.Event] = {}

    def start(self) -> None: ...

    def saw(self, version: int, weights: str = "") -> None:
        self.newest = max(self.newest, version)

    def call(self, replica: int, method: str, *args: Any, timeout: float) -> Any:
        if replica in self.hung:
            self.hung[replica].wait(LONG)
            raise ServiceTimeout("hung")
        if replica in self.down:
            raise self.down[replica]
        one = self.replicas[replica]
        methods = {"stage_weights": one.pushes.stage, "drop_weights": one.pushes.drop, "refresh_weights": one.load}
        try:
            with self.threads[replica]:
                methods[method](*args)
        except Exception as error:
            return error
        return None

    def push(self, given: Any, version: int | None = None, *, wait: float = 0.3, timeout: float = 5.0) -> Any:
        return push_weights(self, given, version, timeout=timeout, wait=wait)  # type: ignore[arg-type]


def test_a_push_reaches_all_and_names_those_that_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(monkeypatch)
    pushed = service.push(weights(1.0))
    assert (pushed, pushed.missed, service.newest) == (1, (), 1)
    service.hung[1], service.down[2] = threading.Event(), ServiceError("its model was given by value")
    pushed = service.push(weights(2.0))
    assert (pushed, pushed.missed) == (2, ("s:1", "s:2"))
    assert_equal(service.replicas[0].model, weights(2.0))
    assert_equal(service.replicas[1].model, weights(1.0))
    service.hung.pop(1).set()
    assert service.replicas[1].load() == 2
    assert_equal(service.replicas[1].model, weights(2.0))


@pytest.mark.parametrize(
    ("given", "version", "error", "message"),
    [
        (weights(2.0, "a", "unknown"), None, KeyError, "no weight 'unknown'"),
        ({}, None, ValueError, "there are no weights"),
        ({"a": 1}, None, TypeError, "got int for 'a'"),
        (weights(2.0), 1, WeightVersionError, "version 1 of the weights was pushed after version 3"),
        (weights(2.0), 2**63, WeightVersionError, r"from 0 to .*, got 9223372036854775808"),
        (weights(2.0), -1, WeightVersionError, r"from 0 to .*, got -1"),
    ],
)
def test_a_push_that_fails_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, given: Any, version: int | None, error: type[Exception], message: str
) -> None:
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


def test_a_push_is_refused_if_one_replica_cannot_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two replicas, one started again after the keeper was lost: it would be half the factory's, half the push's."""
    service = Service(monkeypatch, 2, tensors=[["a"], ["b"]])
    service.push(weights(1.0))
    fresh = Replica(service.keeper, tensors=[["a"], ["b"]])
    fresh.pushes._version, service.replicas[1] = 0, fresh
    service.keeper._pushed, service.keeper._version = [], 0
    with pytest.raises(WeightVersionError, match="push all tensors of the model"):
        service.push(weights(2.0, "b"))
    assert service.push(weights(2.0)) == 2
    assert_equal(service.replicas[0].model, service.replicas[1].model)


@pytest.mark.parametrize("down", [ServiceTimeout("took more than 5 s"), ServiceClosedError("shut down")])
def test_a_push_that_no_replica_takes(monkeypatch: pytest.MonkeyPatch, down: Exception) -> None:
    service = Service(monkeypatch)
    service.down = dict.fromkeys(range(3), down)
    with pytest.raises(type(down), match=str(down)):
        service.push(weights(1.0))
    assert service.keeper.get("model") == (0, [], None)
    assert not service.keeper._staged
