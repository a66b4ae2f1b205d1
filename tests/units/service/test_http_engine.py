"""Engines behind HTTP have the values of the local scorer, and each trap of the servers raises an error."""

from __future__ import annotations

import re
from contextlib import closing
from functools import cache

import pytest
import torch

from engine_contract import EngineContract, Served, evaluated
from load import assert_same, job_of, sequences
from prompt_server import MODEL, PromptServer
from remote_models import model
from torchrl_llm_kl import LogProbScorer, Ragged
from torchrl_llm_kl.scoring import Scores
from torchrl_llm_kl.service import HTTPEngine, ServiceConfigError, ServiceError, ServiceTimeout
from torchrl_llm_kl.service._core import ScoringCore
from waits import LONG

ROWS = sequences(4, 6)


def rows_of(*rows):
    return Ragged.from_list([torch.tensor(row) for row in rows])


ONE_ROW = rows_of(range(1, 7))


@pytest.fixture(scope="module")
def server():
    with closing(PromptServer()) as found:
        yield found


class Exact(LogProbScorer):
    """Scores in float64, as the server does, and rounds to float32, as an engine does."""

    def run(self, *args, **options):
        found = super().run(*args, **options).per_token
        values = {name: x.values.float() if x.values.is_floating_point() else x.values for name, x in found.items()}
        return Scores(**{name: found[name].like(value) for name, value in values.items()})


@cache
def scorer():
    return Exact(model().double())


def engine(server, dialect="vllm", **options):
    return HTTPEngine(server.url, **{"model": MODEL, "dialect": dialect, "timeout": LONG, **options})


def scored(found, rows=ROWS, mask=None):
    return evaluated(found, rows, mask).log_prob.values


def assert_right(found, rows=ROWS, mask=None):
    """The engine's scores equal the local model's."""
    assert_same(scored(found, rows, mask), scorer().score(rows, mask).values)


class TestVllm(EngineContract):
    dialect = "vllm"

    @pytest.fixture
    def served(self, server):
        return Served(server.url, MODEL, scorer(), 97, 64, 20, dialect=self.dialect, tolerance=1e-6)


class TestSglang(TestVllm):
    dialect = "sglang"

    def test_a_model_that_the_server_does_not_have(self, served):
        with pytest.raises(ServiceConfigError, match="serves 'toy', expected model='other'"):
            served.engine(model="other")

    @pytest.mark.parametrize("cache_", ["null", "missing"])
    def test_a_prefix_cache(self, server, cache_):
        """Tokens without scores are requested again with ``logprob_start_len=0``."""
        rows = rows_of(range(1, 12), range(1, 9))
        mask = (rows.positions > 2) & (rows.positions < 7)
        with server.set(cache=cache_):
            found = engine(server, "sglang")
            server.change()
            for _ in range(2):
                assert_right(found, rows, mask)
            assert {body["logprob_start_len"] for body in server.requests()} == {2, 0}
            server.change(recomputes=False)
            alone = rows_of(range(1, 12))
            assert scored(found, alone, mask[:11]).isfinite().all()
            with pytest.raises(ServiceError, match="returned no log-prob for"):
                scored(found, alone, mask[:11])


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_a_request_ends_at_the_last_scored_token(server, dialect):
    found = engine(server, dialect)
    rows = rows_of(range(1, 9), range(1, 5))
    mask = torch.zeros(12, dtype=torch.bool)
    mask[[3, 5]] = True
    scored(found, rows, mask)  # connects
    server.change()
    scored(found, rows, mask)
    (body,) = server.requests()  # a sequence without a scored token is not sent
    assert body["prompt" if dialect == "vllm" else "input_ids"] == [1, 2, 3, 4, 5, 6]  # nor what follows the last one
    sampling = body if dialect == "vllm" else body["sampling_params"]
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    assert {name: sampling[name] for name in plain} == plain
    if dialect == "sglang":
        assert body["logprob_start_len"] == 2  # whose own entry is null


@pytest.mark.parametrize(
    ("cache_", "message"),
    [
        ("null", r"returned no log-prob for \d+ of \d+ tokens of the probe.*--no-enable-prefix-caching"),
        ("missing", r"returned no log-prob|scored other tokens than were sent"),
        ("stale", "log-probs of one sequence changed between two requests"),
    ],
)
def test_vllm_with_a_prefix_cache(server, cache_, message):
    """A salt in each request avoids the prefixes of other requests. A server that ignores it is refused."""
    with server.set(cache=cache_):
        assert_right(engine(server), rows_of(*(range(1, n) for n in (9, 12, 9))))
    with server.set(cache=cache_, salts=False), pytest.raises(ServiceError, match=message):
        engine(server)


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_a_forbidden_token_is_no_number(server, dialect):
    """vLLM sends -9999.0 for -inf, SGLang null."""
    rows = rows_of([1, 2, 3], [7, 8, 50, 9])
    mask = rows.positions > 0
    message = r"-inf at sequence 1, position 2 \(token 50\)"
    if dialect == "sglang":
        message = "for 1 of 3 tokens of sequence 1, first at position 2. .*forbidden"
    with server.set(forbids=50):
        found = engine(server, dialect)
        with pytest.raises(ValueError if dialect == "vllm" else ServiceError, match=message):
            scored(found, rows, mask)
        mask[5] = False  # not asked for
        assert scored(found, rows, mask).isfinite().all()


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_other_tokens_than_were_sent(server, dialect):
    made, rows = engine(server, dialect), rows_of([1, 2, 5, 4])
    assert scored(made, rows)[0] == 0, "the first token has no log-prob"
    for trap in ({"retokenises": True}, {"starts": True}):
        with server.set(**trap), pytest.raises(ServiceError, match="scored other tokens than were sent for sequence 0"):
            scored(made, rows)


@pytest.mark.parametrize("fails", [[503, 0, 429], [500, 500]])
def test_failures_that_pass_are_retried(server, fails):
    found = engine(server)
    with server.set(fails=fails):
        assert_right(found)


@pytest.mark.parametrize(
    ("switches", "message", "tries"),
    [
        ({"fails": [500] * 1000}, "answers with HTTP 500: .*switched off", 3),
        ({"fails": [299] * 1000}, "answers in another form, .*not JSON", 1),
        ({"fails": [403] * 1000}, "answers with HTTP 403", 1),
        ({"fails": [302]}, "answers with HTTP 302", 1),
        ({"odd": True}, "answers in another form, .*Pass its dialect=", 1),
    ],
)
def test_failures_that_stay(server, switches, message, tries):
    found = engine(server)
    with server.set(**switches):
        with pytest.raises(ServiceError, match=message):
            scored(found, ONE_ROW)
        assert len(server.requests()) == tries


def test_a_server_that_is_late_or_absent(server):
    found = engine(server, timeout=0.3)
    with server.set(delay=0.6), pytest.raises(ServiceTimeout, match="did not answer in time: ReadTimeout: timed out"):
        scored(found)
    with pytest.raises(ServiceTimeout, match=r"did not answer in time: ConnectError: .*refused"):
        HTTPEngine("http://127.0.0.1:9", model=MODEL, timeout=0.2)


def test_a_batch_waits_once_for_a_server_that_is_down(server):
    found = engine(server, timeout=1.0)
    with server.set(fails=[503] * 1000):
        answers = ScoringCore(found).score([job_of([[1, 2]])] * 20)
        tries = len(server.requests())
    assert [type(answer) for answer in answers] == [ServiceTimeout] * 20
    assert re.search("did not answer in time: (HTTP 503: .*switched off|ReadTimeout)", str(answers[0]))
    assert tries <= 20 * 5  # pauses of 0.05, 0.1, 0.2, 0.4 s


def test_a_server_that_comes_back_with_another_model(server):
    """It is noticed by a connection that is lost, by a request that is repeated, or by new connections between two calls."""
    for fails, rows, delay in (([0], ONE_ROW, 0.0), ([503], ONE_ROW, 0.0), ([], ROWS, 1.5)):
        found = engine(server)
        with server.set(fails=fails, seed=1, delay=delay), pytest.raises(ServiceError, match="with another model, by"):
            scored(found, rows)
        assert scored(found).isfinite().all()


def test_addresses():
    for url in ("host:8000", "ftp://user:hush@host", "http://"):
        with pytest.raises(ValueError, match="url must begin with http") as caught:
            HTTPEngine(url, model=MODEL)
        assert "hush" not in str(caught.value)


def test_keys(server, monkeypatch):
    """The key is in no message."""
    monkeypatch.setenv("TOY_KEY", "hush\n")
    with server.set(key="hush"):
        assert scored(engine(server, api_key_env="TOY_KEY")).isfinite().all()
        with pytest.raises(ServiceError, match="HTTP 401"):
            engine(server)
    with pytest.raises(KeyError, match="NO_KEY"):
        engine(server, api_key_env="NO_KEY")


def test_a_log_prob_is_at_most_0_up_to_rounding(server):
    made, want = engine(server), scorer().score(ONE_ROW).values
    with server.set(adds=1e-7):
        assert_same(scored(made, ONE_ROW), want)
    for adds, shown in ((30.0, r"2\d\.\d+"), (float("inf"), "inf")):
        with server.set(adds=adds), pytest.raises(ServiceError, match=f"sent the log-prob {shown}, expected a number"):
            scored(made, ONE_ROW)
