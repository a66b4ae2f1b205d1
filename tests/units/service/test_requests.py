"""The requests of a call: divided among replicas, sent again after a failure, awaited, withdrawn, and suspected of deaths."""

import asyncio
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from load import request_of, sequences
from torchrl_llm_kl import Ragged, Sampling
from torchrl_llm_kl.scoring import ScoreOptions, ScoreRequest
from torchrl_llm_kl.service import PoisonedRequest, RemoteModel, ServiceOverloaded
from torchrl_llm_kl.service._controller import FAILED, PENDING, READY, SILENT, STARTING
from torchrl_llm_kl.service._errors import ReplicaGone, ServiceBusy, ServiceError, ServiceTimeout
from torchrl_llm_kl.service._spec import ServiceSpec
from torchrl_llm_kl.service._wire import Reply, Request
from torchrl_llm_kl.service.client import _connection, _exchange
from torchrl_llm_kl.service.client._connection import Connection
from torchrl_llm_kl.service.replica import _server
from torchrl_llm_kl.service.replica._server import Server
from waits import LONG, until

ray = pytest.importorskip("ray")
DIES, GONE, NEVER = ray.exceptions.RayActorError(), ReplicaGone("it ends"), None


class Reference:
    """What stands for a reference to an answer."""

    def __init__(self, replica, request):
        self.replica, self.request, self.arrived, self.withdrawn = replica, request, Future(), False

    def future(self):
        """Another one each time, as Ray returns it."""
        found = Future()
        self.arrived.add_done_callback(lambda _: found.cancelled() or found.set_result(None))
        return found

    def withdraw(self):
        self.withdrawn = True
        if not self.arrived.done():
            self.arrived.set_exception(ray.exceptions.TaskCancelledError())


class Replicas(Connection):
    """Replicas whose log-prob of a token is its negative id; the fates of each are what its next requests end with.

    An error of Ray is raised, others are returned; without an answer they wait for :meth:`reply`.
    """

    def __init__(self, count=2, *, fates=(), answering=True, connecting=0.0):
        super().__init__(ServiceSpec("name", "source", {}, num_replicas=count))
        self.fates, self.answering, self.connecting = dict(fates), answering, connecting
        self.states, self.errors, self.versions = [READY] * count, [None] * count, [0] * count
        self.sent, self.joined = [], []
        self._controller = SimpleNamespace(join=SimpleNamespace(remote=self.join))

    def connect(self, **_):
        time.sleep(self.connecting)

    def table(self, **_):
        return {"states": self.states, "errors": self.errors}

    def join(self, config, service, *, new):
        self.joined.append(new)
        self.states = [READY] * len(self.states)
        answer = Reference(None, None)
        answer.arrived.set_result(self.table())
        return answer

    @property
    def handles(self):
        calls = (partial(self.send, replica) for replica in range(self.spec.num_replicas))
        return [SimpleNamespace(score=SimpleNamespace(remote=call)) for call in calls]

    def send(self, replica, packed):
        answer = Reference(replica, Request.unpack(packed))
        assert answer.request.timeout > 0
        self.sent.append(answer)
        fate = self.fates[replica].pop(0) if self.fates.get(replica) else ""
        if isinstance(fate, ray.exceptions.RayError):
            answer.arrived.set_exception(fate)
        elif isinstance(fate, Exception):
            answer.arrived.set_result(fate)
        elif fate == "" and self.answering:
            self.reply(answer)
        return answer

    def reply(self, answer):
        request = answer.request
        self.versions[answer.replica] = max(self.versions[answer.replica], request.newest)
        values = -request.scored.tokens.values[request.scored.mask].double()
        answer.arrived.set_result(Reply({"log_prob": values}, self.versions[answer.replica]).pack())

    @property
    def asked(self):
        """The replica of each request."""
        return [answer.replica for answer in self.sent]

    @property
    def tokens(self):
        return [answer.request.num_tokens for answer in self.sent]

    def scorer(self, *, timeout=5.0):
        remote = RemoteModel(self.spec, timeout=timeout)
        remote.connection = self
        return remote.make_scorer()

    def score(self, data, mask, *, timeout=5.0, **options):
        assert_answered(self.scorer(timeout=timeout).score(data, mask, **options), data, mask)
        return self


def assert_answered(found, data, mask=None):
    mask = data.positions > 0 if mask is None else mask
    assert torch.equal(found.values, torch.where(mask, -data.values, 0).double())


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch):
    def get(reference, *, timeout):
        try:
            return reference.arrived.result(timeout)
        except TimeoutError:
            raise ray.exceptions.GetTimeoutError from None

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "cancel", Reference.withdraw)
    monkeypatch.setattr(_exchange, "_LOOK", 0.1)


def prompts(count, responses=8, length=30):
    """Responses to prompts of 20 tokens, and the mask of the responses."""
    rng = torch.Generator().manual_seed(0)
    rows = [
        torch.cat([prompt, torch.randint(1, 1000, (int(torch.randint(length, (), generator=rng)),), generator=rng)])
        for prompt in torch.randint(1, 1000, (count, 20), generator=rng)
        for _ in range(responses)
    ]
    data = Ragged.from_list(rows)
    return data, data.positions >= 20


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("remember", [False, True])
def test_one_request_for_each_replica(count, remember):
    found = Replicas(count).score(*prompts(256), remember=remember)
    assert found.asked == list(range(count))
    assert max(found.tokens) <= 1.25 * sum(found.tokens) / count


def test_requests_are_bounded(monkeypatch):
    """A sequence is never divided, even if it alone is beyond the bound."""
    monkeypatch.setattr(_exchange, "_MOST_TOKENS", 200)
    data, mask = prompts(30, responses=2, length=40)
    for count in (1, 3):
        found = Replicas(count).score(data, mask)
        assert 0 < min(found.tokens) <= max(found.tokens) <= 200 + 60
        assert len(found.sent) <= data.values.shape[0] / 200 + count + 1
    monkeypatch.setattr(_exchange, "_MOST_TOKENS", 10)
    assert all(answer.request.num_sequences == 1 for answer in Replicas().score(data, mask).sent)


def test_empty_sequences():
    for lengths in ([0], [0, 0, 0], [0, 3, 0, 2]):
        data = Ragged.from_list([torch.arange(1, n + 1) for n in lengths])
        for count in (1, 3):
            Replicas(count).score(data, data.positions > 0)


def test_options_set_later_travel():
    found, data = Replicas(1), Ragged.from_list([torch.arange(1, 4)])
    remote, truncated = found.scorer(), {"top_k": 7, "top_p": 0.75, "min_p": 0.25}
    changes = {"temperature": [2.0, 0.75], "sampling": [Sampling(0.5, **truncated), None], "dtype": [torch.bfloat16]}
    changes |= {"adapters": ["mine"], "deterministic": [True], "remember": [True]}
    order = ["temperature", "sampling", "temperature", "sampling", "dtype", "adapters", "deterministic", "remember"]
    for name in order:
        remote.options = remote.options.but(**{name: changes[name].pop(0)})
        remote.score(data)
    sampled = [Sampling(2.0), Sampling(0.5, **truncated), Sampling(0.75, **truncated), *[Sampling(0.75)] * 5]
    assert [answer.request.options.sampling for answer in found.sent] == sampled
    last = ScoreOptions(Sampling(0.75), "mine", torch.bfloat16, deterministic=True, remember=True)
    assert found.sent[-1].request.options == last == remote.options
    for name, wrong, message in (
        ("temperature", -1, "temperature must be a positive number, got -1"),
        ("top_k", 1025, "top_k must be at most 1024"),
        ("grad", True, "grad=True cannot be had from a service"),
    ):
        with pytest.raises(ValueError, match=message):
            remote.options = remote.options.but(**{name: wrong})
    assert remote.options == last
    with pytest.raises(TypeError, match="mask must be boolean"):
        remote.score(data, torch.ones(3))
    assert len(found.sent) == 8, "errors of the input are raised before anything is sent"
    remote.options = remote.options.but(memory=0)
    remote.score(data)
    assert not found.sent[-1].request.options.remember, "0 allows no cache"


@pytest.mark.parametrize(
    ("fate", "state", "suspect"),
    [
        (DIES, READY, True),
        (GONE, READY, False),
        (ray.exceptions.ObjectLostError("", None, ""), READY, False),
        *((NEVER, state, False) for state in (SILENT, FAILED, PENDING, STARTING)),
    ],
    ids=["dies", "says that it ends", "answer lost", "silent", "failed", "has no process yet", "has no model yet"],
)
def test_the_share_of_a_lost_replica_is_divided_among_the_others(fate, state, suspect):
    """It may have killed its replica: from then on it shares no batch."""
    found = Replicas(4, fates={2: [fate]})
    found.states[2] = state
    found.score(*prompts(64))
    first, again = found.sent[:4], found.sent[4:]
    assert [answer.replica for answer in first] == [0, 1, 2, 3]
    assert [answer.replica for answer in again] == [0, 1, 3]
    assert sum(answer.request.num_tokens for answer in again) == first[2].request.num_tokens
    assert [answer.request.suspect for answer in found.sent] == [False] * 4 + [suspect] * 3
    assert [answer for answer in found.sent if answer.withdrawn] == ([first[2]] if fate is NEVER else [])
    assert found.retries == 1
    for state in (SILENT, READY):  # it is avoided until it is ready, and a moment has passed
        found.states[2] = state
        time.sleep(0.35)
        del found.sent[:]
        found.score(*prompts(64))
        assert found.asked == ([0, 1, 2, 3] if state == READY else [0, 1, 3])


@pytest.mark.parametrize("states", [[SILENT], [STARTING], [STARTING, PENDING]])
def test_a_replica_is_awaited_where_no_other_is_ready(states):
    found = Replicas(len(states), answering=False)
    found.states = states
    threading.Timer(0.3, lambda: [found.reply(answer) for answer in found.sent]).start()
    assert found.score(*prompts(2)).asked == [*range(len(states))]


def test_all_replicas_are_lost_for_a_while():
    data, mask = prompts(16)
    Replicas(fates={replica: [DIES, GONE] for replica in range(2)}).score(data, mask)
    with pytest.raises(ServiceTimeout, match=r"scoring on 'name': no replica came back within 0\.3 s: it ends"):
        Replicas(fates={replica: [GONE] * 1000 for replica in range(2)}).score(data, mask, timeout=0.3)
    busy = ServiceBusy("800 requests wait")
    for full in (busy, ServiceTimeout("not scored in time")):
        assert sorted(Replicas(fates={1: [full]}).score(data, mask).asked) == [0, 1, 1], "tried again where it is"
    with pytest.raises(ServiceOverloaded, match="800 requests wait"):
        Replicas(fates={1: [busy] * 1000}).score(data, mask, timeout=0.3)


def test_a_model_that_no_replica_has():
    """Its error is raised, and the replicas are started again for later calls."""
    found = Replicas(fates={0: [DIES], 1: [DIES]})
    found.states, found.errors = [FAILED, FAILED], [OSError("no such checkpoint")] * 2
    with pytest.raises(OSError, match="no such checkpoint"):
        found.score(*prompts(16))
    assert found.joined == [True]
    found.score(*prompts(16))
    assert found.joined == [True]


def test_an_error_of_one_request_withdraws_the_others():
    found = Replicas(3, fates={0: [ValueError("token id 97 at sequence 0")], 1: [NEVER]})
    with pytest.raises(ValueError, match="token id 97 at sequence 0"):
        found.score(*prompts(64))
    assert [answer.withdrawn for answer in found.sent] == [True] * 3
    pending = found.scorer().begin(ScoreRequest.of(sequences()))
    pending.cancel()
    with pytest.raises(ServiceError, match="the call was cancelled"):
        pending()


def test_all_scores_of_a_call_come_from_one_version_after_a_failure_too():
    """The replica that takes over holds newer weights: the others are asked again, and catch up."""
    found = Replicas(3, fates={0: [DIES]})
    found.versions = [3, 3, 4]
    found.score(*prompts(64))
    assert (found.versions[1:], found.newest, found.sent[-1].request.newest) == ([4, 4], 4, 4)


async def test_the_loop_goes_on():
    """Others run while it connects and while it waits: the answer is sent by one of them."""
    found, ticks = Replicas(1, answering=False, connecting=0.2), 0

    async def tick():
        nonlocal ticks
        while not found.sent:
            ticks += 1
            await asyncio.sleep(0.005)
        found.reply(found.sent[0])

    scores, _ = await asyncio.gather(found.scorer().arun(ScoreRequest.of(sequences())), tick())
    assert_answered(scores.log_prob, sequences())
    assert ticks > 1


async def test_many_calls_wait_at_once():
    """Each is sent before the first one is answered."""
    found = Replicas(1, answering=False)
    calls = asyncio.gather(*(found.scorer().ascore(sequences(seed)) for seed in range(50)))
    while len(found.sent) < 50:
        await asyncio.sleep(0.01)
    for answer in found.sent:
        found.reply(answer)
    for seed, one in enumerate(await calls):
        assert_answered(one, sequences(seed))
    assert len(found.sent) == 50


@pytest.mark.parametrize("stage", ["connecting", "waiting"])
def test_a_cancelled_call_withdraws_its_requests(stage, caplog):
    found = Replicas(1, answering=False, connecting=0.2 if stage == "connecting" else 0.0)

    async def cancelled():
        task = asyncio.create_task(found.scorer().ascore(sequences()))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, LONG)
        assert bool(found.sent) == (stage == "waiting"), "it ends at once"

    asyncio.run(cancelled())
    until(lambda: found.sent and all(answer.withdrawn for answer in found.sent))
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize(
    ("timeout", "error", "message"),
    [(LONG, asyncio.TimeoutError, None), (0.2, ServiceTimeout, r"scoring on 'name' took more than 0\.2 s")],
    ids=["of the caller", "of the service"],
)
def test_deadlines_of_the_caller_and_of_the_service(timeout, error, message):
    found = Replicas(answering=False)

    async def hurried():
        await asyncio.wait_for(found.scorer(timeout=timeout).ascore(sequences()), 0.5)

    with pytest.raises(error, match=message):
        asyncio.run(hurried())
    until(lambda: all(answer.withdrawn for answer in found.sent))
    if error is ServiceTimeout:
        with pytest.raises(error, match=message):
            found.score(*prompts(2), timeout=timeout)


async def test_errors_and_lost_replicas_of_awaited_calls():
    for fate in (DIES, GONE, NEVER):
        found = Replicas(fates={0: [fate]})
        found.states[0] = SILENT if fate is NEVER else READY
        assert_answered(await found.scorer().ascore(sequences()), sequences())
    with pytest.raises(ValueError, match="outside the vocabulary"):
        await Replicas(1, fates={0: [ValueError("outside the vocabulary")]}).scorer().ascore([[3, 97]])


@pytest.fixture
def joined(monkeypatch):
    """A connection to a service of three replicas with these states, and the states."""
    states, errors = [STARTING, READY, READY], [OSError("no such checkpoint")] * 3
    table = {"id": "mine", "ended": "", "errors": errors, "fingerprint": None, "has_model": True}
    answer = SimpleNamespace(remote=lambda *_, **__: {**table, "states": list(states)})
    controller = SimpleNamespace(**dict.fromkeys(("join", "hold", "watch", "table"), answer))
    context = SimpleNamespace(gcs_address="here", get_node_id=str, get_job_id=str, get_worker_id=str)
    monkeypatch.setattr(_connection, "actor_of", lambda *_: controller)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(ray, "get", lambda found, *, timeout: found)
    connection = Connection(ServiceSpec("name", "source", {}, num_replicas=3))
    yield connection, states
    connection._lease.clear()  # there is no call to cancel


def test_a_client_that_joins_avoids_replicas_that_are_not_ready(joined, monkeypatch):
    """Its first call would wait for their model."""
    connection, states = joined
    assert connection.usable() == [1, 2]
    states[0] = READY
    monkeypatch.setattr(_connection, "_LOOK", 0.0)
    assert connection.usable() == [0, 1, 2]


def test_after_the_error_of_a_model_that_no_replica_has_the_next_call_looks_anew(joined):
    connection, states = joined
    states[:] = [FAILED] * 3
    with pytest.raises(OSError, match="no such checkpoint"):
        connection.usable()
    states[:] = [STARTING] * 3  # what the controller does then
    assert connection.usable() == [0, 1, 2]


def test_what_a_replica_asks_before_it_scores_a_suspect(monkeypatch, caplog):
    calls, answers = [], []

    def call(name, *args):
        calls.append((name, *args))
        made = Future()
        if answers:
            made.set_result(answers.pop(0))
        return SimpleNamespace(future=lambda: made)

    methods = {f"{name}_trial": SimpleNamespace(remote=partial(call, name)) for name in ("begin", "end")}
    monkeypatch.setattr(_server, "actor_of", lambda spec, suffix: SimpleNamespace(**methods))
    monkeypatch.setattr(_server, "_ANSWER", 0.1)
    replica = object.__new__(Server)
    replica._spec, replica._name, replica._replica, replica._life = ServiceSpec("s", "source", {}), "s:1", 1, "life"
    request = request_of([range(4)], suspect=True)
    assert replica._trial(replace(request, suspect=False)) is None
    answers += [True, None]
    trial = replica._trial(request)
    for over in (False, True):
        asyncio.run(trial(over))
    assert calls == [("begin", request.digest(), 1, "life"), ("end", request.digest(), "")]
    answers.append(None)
    asyncio.run(trial(None))
    assert calls[-1] == ("end", request.digest(), "life"), "it was dropped: this process did not die of it"
    asyncio.run(trial(False))
    assert "the controller of s:1 does not answer: this trial does not count" in caplog.text
    answers.append(False)
    message = "3 processes died while they scored a request of 1 sequences and 4 tokens, and nothing else"
    with pytest.raises(PoisonedRequest, match=message):
        asyncio.run(trial(False))
    monkeypatch.setattr(_server, "actor_of", lambda spec, suffix: None)
    assert replica._trial(request) is None


def test_equal_requests_have_one_digest():
    """Whether they are suspect or not."""
    plain = request_of([range(4)], deterministic=True)
    found = Request.unpack(replace(plain, suspect=True).pack())
    assert (found.suspect, found.options, found.digest()) == (True, plain.options, plain.digest())
    records = {"top_ids": torch.zeros(4, 1, dtype=torch.long)}
    others = [request_of([range(4)]), request_of([range(1, 5)], deterministic=True)]
    others += [request_of([[0, 1], [2, 3]], deterministic=True)]
    others += [request_of([range(4)], records=records, deterministic=True)]
    assert len({each.digest() for each in [found, *others]}) == 5
