"""The client without Ray: parts of a call, answers of one version, replicas that end, full queues, deadlines."""

import asyncio
import copy
import math
import pickle
import threading
import time
from types import SimpleNamespace

import pytest
from torch.testing import assert_close

from load import sequences
from remote_models import model
from torchrl_llm_kl import LogProbScorer, Sampling
from torchrl_llm_kl.scoring import ScoreOptions, ScoreRequest
from torchrl_llm_kl.service import (
    ProtocolError,
    RemoteModel,
    ServiceClosedError,
    ServiceError,
    ServiceOverloaded,
    ServiceTimeout,
)
from torchrl_llm_kl.service._core import ScoringCore
from torchrl_llm_kl.service._errors import VersionPending
from torchrl_llm_kl.service._messages import PROTOCOL, read
from torchrl_llm_kl.service._remote import Connection
from torchrl_llm_kl.service.engines._engine import TransformersEngine

ray = pytest.importorskip("ray")
serve = pytest.importorskip("ray.serve")


class Response:
    """A fake response of Serve. Each call of ``result`` takes one of ``fates``: an error, or a function of the answer."""

    def __init__(self, *fates):
        self.fates, self.withdrawn = list(fates), False

    def result(self, *, timeout_s):
        fate = self.fates.pop(0) if len(self.fates) > 1 else self.fates[0]
        if isinstance(fate, BaseException):
            time.sleep(0.005)
            raise fate
        return fate()

    def cancel(self):
        self.withdrawn = True


class Fake(Connection):
    """Answers with a model of this process.

    ``plan`` holds a list for each call: the errors that come before its answer. A call of three or more is never answered.
    """

    def __init__(self, plan=(), versions=(0,)):
        super().__init__("name")
        self.core, self.plan, self.versions = ScoringCore(TransformersEngine(model())), list(plan), list(versions)
        self.messages, self.responses, self.open = [], [], True

    def connect(self):
        pass

    def check_open(self):
        if not self.open:
            raise self.gone()

    def send(self, method, message):
        message = pickle.loads(pickle.dumps(message))
        self.messages.append(message)

        def answer():
            (reply,) = self.core.score([read(message)])
            if not isinstance(reply, Exception):
                reply["version"] = self.versions.pop(0) if len(self.versions) > 1 else self.versions[0]
            return reply

        fates = self.plan.pop(0) if self.plan else []
        self.responses.append(Response(*fates, *([] if len(fates) > 2 else [answer])))
        return self.responses[-1]


def remote(*plan, versions=(0,), part_size=10**6, timeout=60.0):
    made = RemoteModel("name", timeout=timeout)
    made.connection, made.part_size = Fake(plan, versions), part_size
    return made


def assert_local(scores, data=None):
    data = sequences() if data is None else data
    assert_close(scores.values, LogProbScorer(model()).score(data).values, atol=1e-9, rtol=0)


def died():
    return ray.exceptions.ActorUnavailableError("it was killed", None)


@pytest.mark.parametrize("part_size", [1, 12, 10**6, -5])
def test_a_call_is_sent_in_parts_of_neighbours(part_size):
    made, data = remote(part_size=part_size), sequences(count=9)
    assert_local(made.make_scorer().score(data), data)
    lengths = [message["arrays"]["lengths"].tolist() for message in made.connection.messages]
    assert [count for some in lengths for count in some] == data.lengths.tolist()
    assert len(lengths) == {1: 9, 10**6: 1}.get(part_size, len(lengths))


def test_the_fields_of_a_message():
    made = remote()
    made.version, made.connection.service, made.connection.newest = 0, "abc", 0
    made.make_scorer(sampling=Sampling(0.7, top_k=5)).score([[3, 4, 5]])
    (message,) = made.connection.messages
    assert ScoreOptions.from_dict(message["options"]) == ScoreOptions(Sampling(0.7, top_k=5))
    assert (message["protocol"], message["service"], message["version"], message["tries"]) == (PROTOCOL, "abc", 0, 0)
    assert message["caller"].endswith(f"/{threading.get_ident()}")
    for protocol, side in ((PROTOCOL - 1, "client"), (PROTOCOL + 1, "replica")):
        with pytest.raises(ProtocolError, match=f"Update torchrl_llm_kl on the side of the {side}"):
            read({**message, "protocol": protocol})


@pytest.mark.parametrize(
    "error", [died(), ray.exceptions.OutOfMemoryError("full"), ray.exceptions.NodeDiedError("gone")], ids=type
)
def test_a_request_whose_replica_ended_is_sent_again_and_marked(error):
    made = remote([error], [error])
    assert_local(made.make_scorer().score(sequences()))
    messages = made.connection.messages
    assert [message["tries"] for message in messages] == [0, 1, 2]
    assert len({message["id"] for message in messages}) == 1


def test_a_version_that_is_not_pushed_yet_is_requested_again():
    """A request that waits holds no place in the replica: the push needs one."""
    made = remote([lambda: VersionPending("3")], [lambda: VersionPending("3")])
    made.version = 0
    assert_local(made.make_scorer().score(sequences()))
    assert [message["tries"] for message in made.connection.messages] == [0, 0, 0]
    made = remote(*[[lambda: VersionPending("version 3 is not there")]] * 9, timeout=0.2)
    with pytest.raises(ServiceTimeout, match=r"took more than 0.2 s: version 3 is not there"):
        made.make_scorer().score(sequences())


def test_an_error_of_one_part_withdraws_the_others():
    made = remote([lambda: RuntimeError("no room")], part_size=12)
    with pytest.raises(RuntimeError, match="no room"):
        made.make_scorer().score(sequences(count=6))
    assert len(made.connection.responses) > 1
    assert all(response.withdrawn for response in made.connection.responses)


async def test_calls_and_broadcasts_in_an_event_loop():
    """As in a notebook: Serve refuses to wait in the thread of a loop."""

    def refuses(**given):
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        return ["answer"]

    made = Fake()
    made.send = lambda method: SimpleNamespace(result=refuses)
    made.connect = lambda: SimpleNamespace(broadcast=lambda method: SimpleNamespace(results=refuses))
    assert made.call("interface", timeout=1.0) == ["answer"]
    assert made.broadcast("state", timeout=1.0) == ["answer"]


def test_all_scores_of_a_call_come_from_one_version():
    """Parts that were scored before a push are scored again."""
    made = remote(versions=[1, 2, 2, 2], part_size=12)
    scores = made.make_scorer().evaluate(sequences(count=6))
    assert scores.version == 2
    messages = made.connection.messages
    assert messages[-1]["newest"] == 2
    assert messages[-1]["arrays"]["lengths"].tolist() == messages[0]["arrays"]["lengths"].tolist()
    assert_local(scores.log_prob, sequences(count=6))


def test_an_error_names_the_sequence_of_the_call():
    made = remote(part_size=4)
    with pytest.raises(ValueError, match="token id 500 at sequence 2, position 1 is outside the vocabulary"):
        made.make_scorer().score([[1, 2, 3], [4, 5, 6], [1, 500]])
    assert all(response.withdrawn for response in made.connection.responses[:3])


FAILURES = {
    "full": ([serve.exceptions.BackPressureError(7, 7)], ServiceOverloaded, "num_queued_requests=7"),
    "late": ([TimeoutError()] * 3, ServiceTimeout, "scoring on 'name' took more than 0.01 s. Raise timeout="),
    "died": ([died()] * 3, ServiceTimeout, "took more than 0.01 s: .*it was killed"),
    "failed": ([serve.exceptions.DeploymentUnavailableError("x")], ServiceError, "the application failed"),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_failures_of_serve_are_typed_errors(kind):
    fates, error, message = FAILURES[kind]
    made = remote(*[fates] * 3, timeout=0.01)
    with pytest.raises(error, match=message) as caught:
        made.make_scorer().score(sequences())
    assert type(caught.value) is error
    assert made.connection.responses[-1].withdrawn


@pytest.mark.parametrize("timeout", [math.nan, 0.0, -1.0])
def test_a_timeout_that_no_call_could_meet_is_refused(timeout):
    """A call that waits until NaN would never end."""
    with pytest.raises(ValueError, match="timeout must be greater than 0, got"):
        remote([TimeoutError()] * 3, timeout=timeout).make_scorer().score(sequences())


def test_a_service_that_ended():
    made = remote([TimeoutError(), TimeoutError()])
    made.connection.open = False
    with pytest.raises(ServiceClosedError, match="no service 'name': it was shut down, or its last driver ended"):
        made.make_scorer().score(sequences())


async def test_awaited_calls():
    """Serve's responses must not block an event loop. A cancelled call withdraws its request."""
    made = remote([TimeoutError()] * 3)
    scorer = made.make_scorer()
    waiting = asyncio.ensure_future(scorer.arun(ScoreRequest.of(sequences()), ScoreOptions()))
    while not made.connection.responses:
        await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    while not made.connection.responses[0].withdrawn:
        await asyncio.sleep(0.01)
    assert_local(await scorer.ascore(sequences()))
    assert_local(scorer.score(sequences()))


def test_a_model_travels_without_its_weights():
    made = RemoteModel("name", timeout=7.0)
    made.connection.service, made.connection.address = "id", "here:1"
    made.version, made._interface = 3, "known"
    for other in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        assert (other.name, other.timeout, other.version, other._interface) == ("name", 7.0, 3, "known")
        assert (other.connection.service, other.connection.address) == ("id", "here:1")
    assert len(pickle.dumps(made)) < 2000
    assert repr(made) == "RemoteModel('name')"
    made.close()
    with pytest.raises(ServiceClosedError, match=r"RemoteModel\('name'\) was closed"):
        made.make_scorer().score([[1, 2]])


def test_attributes_of_the_wrapper():
    made = remote()
    made._interface = SimpleNamespace(log_probs_key="k", pad_output=1), False
    with pytest.raises(
        AttributeError, match=r"RemoteModel\('name'\) is not a TorchRL wrapper, and has no log_probs_key"
    ):
        _ = made.log_probs_key
    made._interface = SimpleNamespace(log_probs_key="k", pad_output=1), True
    assert (made.log_probs_key, made.pad_output) == ("k", True)
