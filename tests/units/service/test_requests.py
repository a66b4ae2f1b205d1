"""The requests of a call: divided among replicas, sent again after a failure, awaited, withdrawn, and blamed for deaths."""

import asyncio
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from load import assert_same, request_of, sequences
from remote_models import model
from torchrl_llm_kl import LogProbScorer, Ragged, Sampling
from torchrl_llm_kl.scoring import ScoreOptions, ScoreRequest, Scores
from torchrl_llm_kl.service import PoisonedRequest, RemoteModel
from torchrl_llm_kl.service._errors import ReplicaGone, ServiceBusy, ServiceTimeout
from torchrl_llm_kl.service._wire import Reply, Request
from torchrl_llm_kl.service.client import _remote, _replicas
from torchrl_llm_kl.service.client._remote import Exchange, Part, RemoteScorer
from torchrl_llm_kl.service.client._router import Router
from torchrl_llm_kl.service.control._spec import ServiceSpec
from torchrl_llm_kl.service.engines._engine import TransformersEngine
from torchrl_llm_kl.service.replica._core import ScoringCore
from waits import LONG, until

ray = pytest.importorskip("ray")


class Reference:
    """What stands for a reference to a reply."""

    def __init__(self, packed):
        self.packed, self.arrived, self.withdrawn = packed, Future(), False

    def future(self):
        return self.arrived


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch):
    """References that are functions are computed when they are asked for."""

    def get(reference, *, timeout):
        if callable(reference):
            return reference()
        try:
            return reference.arrived.result(timeout)
        except TimeoutError:
            raise ray.exceptions.GetTimeoutError from None

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "cancel", lambda reference: setattr(reference, "withdrawn", True))


class Fakes:
    """Replicas whose log-prob of a token is its negative id; each answer may be replaced by the next of ``failures``."""

    def __init__(self, count=2):
        self.count, self.newest, self.requests, self.failures, self.lost = count, 0, [], {}, []
        self.versions = [0] * count
        self.spec = SimpleNamespace(name="fakes", num_replicas=count, replica_name=lambda i: f"x:{i}")

    def saw(self, version, weights=""):
        self.newest = max(self.newest, version)

    def usable(self):
        return [i for i in range(self.count) if i not in self.lost] or list(range(self.count))

    def handle(self, replica, *, timeout):
        return SimpleNamespace(score=SimpleNamespace(remote=lambda packed, left: self.answer(replica, packed)))

    def lose(self, replica, error):
        self.lost.append(replica)

    def answer(self, replica, packed):
        request = Request.unpack(packed)
        self.requests.append((replica, request))
        if self.failures.get(replica):
            failure = self.failures[replica].pop(0)
            return lambda: failure
        self.versions[replica] = max(self.versions[replica], request.newest)
        values = -request.scored.tokens.values[request.scored.mask].double()
        reply = Reply({"log_prob": values}, self.versions[replica]).pack()
        return lambda: reply

    def asked(self):
        """The replica of each request."""
        return sorted(replica for replica, _ in self.requests)

    def tokens(self):
        return [request.num_tokens for _, request in self.requests]


def scorer(fakes, *, timeout=5.0):
    there = {"replicas": fakes, "router": Router(), "version": None, "top_k_dtype": torch.float32, "timeout": timeout}
    return RemoteScorer(SimpleNamespace(**there), ScoreOptions())


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


def assert_scored(fakes, data, mask, **options):
    found = scorer(fakes).score(data, mask, **options)
    assert torch.equal(found.values, torch.where(mask, -data.values, 0).double())


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("remember", [False, True])
def test_one_request_for_each_replica(count, remember):
    fakes = Fakes(count)
    assert_scored(fakes, *prompts(256), remember=remember)
    assert fakes.asked() == list(range(count))
    assert max(fakes.tokens()) <= 1.25 * sum(fakes.tokens()) / count


def test_requests_are_bounded(monkeypatch):
    """A sequence is never divided, even if it alone is beyond the bound."""
    monkeypatch.setattr(_remote, "_MOST_TOKENS", 200)
    data, mask = prompts(30, responses=2, length=40)
    for count in (1, 3):
        fakes = Fakes(count)
        assert_scored(fakes, data, mask)
        assert 0 < min(fakes.tokens()) <= max(fakes.tokens()) <= 200 + 60
        assert len(fakes.requests) <= data.values.shape[0] / 200 + count + 1
    monkeypatch.setattr(_remote, "_MOST_TOKENS", 10)
    fakes = Fakes(2)
    assert_scored(fakes, data, mask)
    assert all(request.num_sequences == 1 for _, request in fakes.requests)


def test_empty_sequences():
    for lengths in ([0], [0, 0, 0], [0, 3, 0, 2]):
        data = Ragged.from_list([torch.arange(1, n + 1) for n in lengths])
        for count in (1, 3):
            assert_scored(Fakes(count), data, data.positions > 0)


def test_options_set_later_travel():
    fakes, data = Fakes(1), Ragged.from_list([torch.arange(1, 4)])
    remote, truncated = scorer(fakes), {"top_k": 7, "top_p": 0.75, "min_p": 0.25}
    changes = {"temperature": [2.0, 0.75], "sampling": [Sampling(0.5, **truncated), None], "dtype": [torch.bfloat16]}
    changes |= {"adapters": ["mine"], "deterministic": [True], "remember": [True]}
    order = ["temperature", "sampling", "temperature", "sampling", "dtype", "adapters", "deterministic", "remember"]
    for name in order:
        setattr(remote, name, changes[name].pop(0))
        remote.score(data)
    sampled = [Sampling(2.0), Sampling(0.5, **truncated), Sampling(0.75, **truncated), *[Sampling(0.75)] * 5]
    assert [request.options.sampling for _, request in fakes.requests] == sampled
    last = ScoreOptions(Sampling(0.75), "mine", torch.bfloat16, deterministic=True, remember=True)
    assert fakes.requests[-1][1].options == last == remote.options
    for name, wrong, message in (
        ("temperature", -1, "temperature must be a positive number, got -1"),
        ("top_k", 1025, "top_k must be at most 1024"),
        ("grad", True, "grad=True cannot be had from a service"),
    ):
        with pytest.raises(ValueError, match=message):
            setattr(remote, name, wrong)
    assert remote.options == last
    with pytest.raises(TypeError, match="mask must be boolean"):
        remote.score(data, torch.ones(3))
    assert len(fakes.requests) == 8, "errors of the input are raised before anything is sent"
    remote.options = remote.options.but(memory=0)
    remote.score(data)
    assert not fakes.requests[-1][1].options.remember, "0 allows no cache"


def test_the_share_of_a_lost_replica_is_divided_among_the_others():
    fakes = Fakes(4)
    fakes.failures = {2: [ReplicaGone("dead")]}
    assert_scored(fakes, *prompts(64))
    first, again = fakes.requests[:4], fakes.requests[4:]
    assert sorted(replica for replica, _ in first) == [0, 1, 2, 3]
    assert sorted(replica for replica, _ in again) == [0, 1, 3]
    lost = next(request for replica, request in first if replica == 2)
    assert sum(request.num_tokens for _, request in again) == lost.num_tokens


def test_all_replicas_are_lost_for_a_while():
    fakes, (data, mask) = Fakes(2), prompts(16)
    fakes.failures = {replica: [ReplicaGone("dead")] * 2 for replica in range(2)}
    assert_scored(fakes, data, mask)
    fakes.failures = {replica: [ReplicaGone("dead")] * 1000 for replica in range(2)}
    with pytest.raises(ServiceTimeout, match=r"no replica came back within 0\.3 s: dead"):
        scorer(fakes, timeout=0.3).score(data, mask)
    fakes = Fakes(2)
    fakes.failures = {1: [ServiceBusy("full")]}
    assert_scored(fakes, data, mask)
    assert fakes.asked() == [0, 1, 1], "a full queue is tried again where it is"


def test_all_scores_of_a_call_come_from_one_version_after_a_failure_too():
    """The replica that takes over holds newer weights: the others are asked again, and catch up."""
    fakes = Fakes(3)
    fakes.failures, fakes.versions = {0: [ReplicaGone("dead")]}, [3, 3, 4]
    assert_scored(fakes, *prompts(64))
    assert (fakes.versions[1:], fakes.newest, fakes.requests[-1][1].newest) == ([4, 4], 4, 4)


class Service(Fakes):
    """A model in this process: answers arrive ``delay`` seconds after the request; None for never."""

    def __init__(self, *, delay=None, connecting=0.0):
        super().__init__(1)
        self.core, self.delay, self.connecting = ScoringCore(TransformersEngine(model())), delay, connecting
        self.spec = ServiceSpec("name", model, "source", {"max_tokens": 1000})
        self.answers, self.failing, self._lock = [], 0, threading.Lock()  # the replica dies of so many requests

    def usable(self):
        return [0]

    def handle(self, replica, *, timeout):
        time.sleep(self.connecting)
        return super().handle(replica, timeout=timeout)

    def answer(self, replica, packed):
        self.answers.append(Reference(packed))
        if self.delay is not None:
            threading.Timer(self.delay, self.reply, [self.answers[-1]]).start()
        return self.answers[-1]

    def reply(self, answer):
        with self._lock:
            self.failing -= 1
            if self.failing >= 0:
                found = ReplicaGone("it ended")
            else:
                (found,) = self.core.score([Request.unpack(answer.packed)])
        if not answer.arrived.done():
            answer.arrived.set_result(found.pack() if isinstance(found, Reply) else found)

    def withdrawn(self):
        return self.answers and all(answer.withdrawn for answer in self.answers)


def awaiting(timeout=LONG, **options):
    """A scorer, and its service."""
    service = Service(**options)
    remote = RemoteModel(service.spec, timeout=timeout)
    remote.replicas = service
    return remote.make_scorer(), service


def here():
    return LogProbScorer(model(), probe=False)


def test_the_loop_goes_on():
    """Others run while it connects and while it waits: the answer is sent by one of them."""
    scorer, service = awaiting(connecting=0.2)
    ticks = 0

    async def tick():
        nonlocal ticks
        while not service.answers:
            ticks += 1
            await asyncio.sleep(0.005)
        service.reply(service.answers[0])

    async def both():
        return await asyncio.gather(
            scorer.arun(ScoreRequest.of(sequences()), ScoreOptions(top_k=3, entropy=True)), tick()
        )

    found, _ = asyncio.run(both())
    assert isinstance(found, Scores)
    expected = here().evaluate(sequences(), top_k=3, entropy=True)
    for name in ("log_prob", "entropy"):
        assert_same(getattr(found, name).values, getattr(expected, name).values)
    for name in ("top_log_probs", "tail_log_prob"):  # float32 for any model
        assert_same(getattr(found, name).values, getattr(expected, name).values.float())
    assert torch.equal(found.top_indices.values, expected.top_indices.values)
    assert ticks > 1


def test_waiting_takes_no_thread():
    """Fifty calls wait at once: each is sent before the first one is answered."""
    scorer, service = awaiting()

    async def all_of_them():
        calls = asyncio.gather(*(scorer.ascore(sequences(seed)) for seed in range(50)))
        while len(service.answers) < 50:
            await asyncio.sleep(0.01)
        for answer in service.answers:
            service.reply(answer)
        return await calls

    for seed, one in enumerate(asyncio.run(all_of_them())):
        assert_same(one.values, here().score(sequences(seed)).values)
    assert len(service.answers) == 50


@pytest.mark.parametrize("stage", ["connecting", "waiting"])
def test_a_cancelled_call_withdraws_its_requests(stage, caplog):
    scorer, service = awaiting(connecting=0.3 if stage == "connecting" else 0.0)

    async def cancelled():
        task = asyncio.create_task(scorer.ascore(sequences()))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, LONG)
        assert bool(service.answers) == (stage == "waiting"), "it ends at once"

    asyncio.run(cancelled())
    until(service.withdrawn)
    if not service.answers[0].arrived.done():
        service.answers[0].arrived.set_result(b"late")  # the loop is closed
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_deadlines_of_the_caller_and_of_the_service():
    scorer, service = awaiting()

    async def hurried():
        await asyncio.wait_for(scorer.ascore(sequences()), 0.1)

    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(hurried())
    until(service.withdrawn)
    scorer, service = awaiting(timeout=0.2)
    with pytest.raises(ServiceTimeout, match=r"scoring on 'name' took more than 0.2 s"):
        asyncio.run(scorer.ascore(sequences()))
    assert service.withdrawn()


def test_errors_and_lost_replicas_of_awaited_calls():
    scorer, service = awaiting(delay=0.01)
    with pytest.raises(ValueError, match="token id 97 at sequence 0, position 1 is outside the vocabulary"):
        asyncio.run(scorer.ascore([[3, 97]]))
    service.failing = 2
    assert_same(asyncio.run(scorer.ascore(sequences())).values, here().score(sequences()).values)
    assert service.lost == [0, 0]


#: What becomes of a request: its replica dies while it runs, or before; says that it ends; or drops it after its timeout.
RUNS, WAITS, ENDS, DROPS = "runs", "waits", "ends", "drops"
#: Or the process dies before any trial; or seems to die while it runs and lives on.
EARLY, SAME = "early", "same"


class Mortal(Fakes):
    """Two replicas in turn. Each try of a request has the next of some fates, then an answer."""

    def __init__(self, fates):
        super().__init__(2)
        self.fates, self.fate, self.deaths, self.refused = iter(fates), "", [], []
        self.next, self.active, self.lives = 0, [0, 1], 0

    def usable(self):
        self.next = 1 - self.next
        return [self.next]

    def handle(self, replica, *, timeout):
        calls = {"score": self.score, "settled": self.settled, "on_trial": self.on_trial}
        methods = {
            name: SimpleNamespace(remote=lambda *args, call=call: lambda: call(*args)) for name, call in calls.items()
        }
        return SimpleNamespace(**methods, quarantine=SimpleNamespace(remote=self.refused.append))

    def quarantine(self, digest):
        self.refused.append(digest)

    def score(self, packed, timeout):
        self.deaths.append(Request.unpack(packed).deaths)
        self.fate = next(self.fates, "")
        if self.fate in (ENDS, DROPS):
            return ReplicaGone("it ends") if self.fate == ENDS else ServiceTimeout("too late")
        if self.fate:
            raise ray.exceptions.ActorDiedError
        return LookupError("answered")  # stands for an answer

    def settled(self):
        if self.fate == EARLY:
            raise ray.exceptions.GetTimeoutError
        return True

    def on_trial(self, digest, timeout):
        if self.fate in (WAITS, EARLY):
            raise ray.exceptions.GetTimeoutError
        self.lives += self.fate != SAME
        return f"process {self.lives}"


def part():
    return Part(request_of([range(4)], caller="a"))


@pytest.fixture
def tried(monkeypatch):
    """Tries of a request with these fates, which follow at once."""
    monkeypatch.setattr(_replicas, "_FIRST_PAUSE", 0.001)

    def run(fates, error, match):
        replicas = Mortal(fates)
        with pytest.raises(error, match=match):
            Exchange(replicas, Router(), part(), timeout=LONG).replies()
        return replicas

    return run


@pytest.mark.parametrize(
    ("fates", "deaths"),
    [
        ([], [0]),
        ([ENDS, ENDS, ENDS, DROPS], [0, 0, 0, 0, 0]),
        ([WAITS], [0, 1]),  # unknown the first time: it may be to blame
        ([WAITS, WAITS, WAITS, WAITS, WAITS], [0, 1, 1, 1, 1, 1]),
        ([WAITS, RUNS, WAITS, ENDS, WAITS], [0, 1, 2, 2, 2, 2]),
        ([RUNS, RUNS, RUNS], [0, 1, 2, 3]),  # two trials ended by someone else, and an answer
        ([RUNS, RUNS, RUNS, WAITS, ENDS], [0, 1, 2, 3, 3, 3]),
        ([RUNS, RUNS, RUNS, EARLY, RUNS, RUNS], [0, 1, 2, 3, 1, 2, 3]),  # others die without it: the count starts over
        ([RUNS, EARLY, RUNS, RUNS], [0, 1, 1, 2, 3]),
        ([RUNS, RUNS, SAME, SAME, RUNS, SAME], [0, 1, 2, 2, 2, 3, 3]),  # one process that was out of reach dies once
    ],
    ids=str,
)
def test_only_deaths_on_trial_count_after_the_first(tried, fates, deaths):
    replicas = tried(fates, LookupError, "answered")
    assert (replicas.deaths, replicas.refused) == (deaths, [])


def test_after_three_trials_it_is_refused_everywhere(tried):
    text = r"4 replicas died while they scored a request of 1 sequences and 4 tokens \(x:1, x:1, x:1, x:0\)"
    replicas = tried([RUNS, WAITS, RUNS, ENDS, RUNS, RUNS, RUNS], PoisonedRequest, text)
    assert replicas.deaths == [0, 1, 1, 2, 2, 3]
    assert replicas.refused == [part().request.digest()] * 3, "the control actor and both replicas"


def test_deaths_on_the_wire():
    """A request without deaths is as before, and has the digest of one with deaths."""
    plain = request_of([range(4)], deterministic=True)
    found = Request.unpack(replace(plain, deaths=2).pack())
    assert (found.deaths, found.options) == (2, plain.options)
    assert Request.unpack(plain.pack()).deaths == 0
    assert found.digest() == plain.digest()
    records = {"top_ids": torch.zeros(4, 1, dtype=torch.long)}
    others = [request_of([range(4)]), request_of([range(1, 5)], deterministic=True)]
    others += [
        request_of([[0, 1], [2, 3]], deterministic=True),
        request_of([range(4)], records=records, deterministic=True),
    ]
    assert len({each.digest() for each in [found, *others]}) == 5
