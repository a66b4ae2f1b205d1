"""Tests that every server for :class:`HTTPEngine` must pass: the server of the tests and a real one."""

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from load import job_of, sequences
from torchrl_llm_kl import LogProbScorer, Ragged, Sampling
from torchrl_llm_kl.head import Kept
from torchrl_llm_kl.scoring import ScoreOptions, ScoreRequest, Scores
from torchrl_llm_kl.service import HTTPEngine, ServiceError
from torchrl_llm_kl.service._core import ScoringCore
from torchrl_llm_kl.service.engines._engine import Engine
from waits import LONG


@dataclass
class Served:
    """A server and its model."""

    url: str
    model: str
    scorer: LogProbScorer  # in this process, with the same weights
    vocab: int
    context: int  # tokens
    max_logprobs: int
    dialect: str = "vllm"
    tolerance: float = 1e-5

    def engine(self, **options: Any) -> HTTPEngine:
        return HTTPEngine(self.url, **{"model": self.model, "dialect": self.dialect, "timeout": LONG, **options})

    def rows(self, seed: int, count: int, longest: int = 12) -> Ragged:
        return sequences(seed, count, self.vocab, longest)

    def assert_right(self, engine: HTTPEngine, rows: Ragged, mask: Any = None, **options: Any) -> Scores:
        """Check that the engine's scores equal those of the model in this process, and return them."""
        found = evaluated(engine, rows, mask, **options)
        want = self.scorer.evaluate(rows, mask, **options)
        for name in ("log_prob", "top_log_probs", "tail_log_prob"):
            if (expected := getattr(want, name)) is not None:
                got = getattr(found, name).values
                torch.testing.assert_close(got.double(), expected.values.double(), rtol=0, atol=self.tolerance)
        return found


def evaluated(engine: HTTPEngine, rows: Ragged, mask: Any = None, **options: Any) -> Scores:
    return engine.run(ScoreRequest.of(rows, mask), ScoreOptions().but(**options))


class EngineContract:
    """Tests for subclasses that define the fixture ``served``."""

    def test_values_equal_the_models(self, served: Served) -> None:
        found = served.engine()
        assert isinstance(found, Engine)
        assert not found.interface()[1]
        rows = served.rows(4, 9)
        some = (rows.positions >= 4) & (rows.sequence_ids % 3 != 1)
        some[some.nonzero()[1]] = False  # a gap
        for mask in (rows.positions > 0, some, torch.zeros_like(some), None):
            served.assert_right(found, rows, mask)

    def test_top_k_equals_the_models(self, served: Served) -> None:
        found, rows = served.engine(), served.rows(4, 6)
        for k in (5, served.max_logprobs):
            scores = served.assert_right(found, rows, rows.positions > 2, top_k=k)
            want = served.scorer.evaluate(rows, rows.positions > 2, top_k=k)
            assert scores.top_indices.values.equal(want.top_indices.values)
        if served.dialect == "vllm":
            with pytest.raises(ValueError, match="greater than max allowed"):
                evaluated(found, rows, top_k=served.max_logprobs + 1)

    def test_options_and_weights_of_the_server_are_refused(self, served: Served) -> None:
        """Refused requests do not affect the others of a batch."""
        core = ScoringCore(served.engine())
        bad: dict[str, Any] = dict.fromkeys(("entropy", "deterministic", "moments"), True)
        bad |= {"dtype": torch.bfloat16, "adapters": False, "temperature": 0.7}
        bad |= {"sampling": Sampling(top_k=3), "records": {"kept": Kept(torch.tensor([1, 2, 3]), torch.arange(4))}}
        requests = [job_of([(1, 2, 3)], **{name: value}) for name, value in bad.items()]
        # The last one is accepted, since the server has its own cache.
        first, *refused, last = core.score([job_of([(1, 2, 3)]), *requests, job_of([(1, 2)], remember=True)])
        assert [type(answer) for answer in (first, last)] == [dict, dict]
        for name, answer in zip(bad, refused, strict=True):
            assert isinstance(answer, ValueError)
            assert str(answer).startswith("kept=" if name == "records" else f"{name}=")
            assert f" is not supported by the server at {served.url}: its log-probs are of all tokens at" in str(answer)
        for call in (core.engine.own_weights, core.engine.update_weights):
            with pytest.raises(TypeError, match="are not in this process"):
                call({"lm_head.weight": torch.zeros(2)})
        sent = [(1, 2, 3), (1, served.vocab + 9), [1] * (served.context + 6), (4, 5)]
        good, wrong, long, other = core.score([job_of([row]) for row in sent])
        assert [type(answer) for answer in (good, wrong, long, other)] == [dict, ValueError, ValueError, dict]
        assert re.search("refuses sequence 0: HTTP 400: .*out of vocabulary", str(wrong))
        assert f"maximum context length is {served.context} tokens" in str(long)

    def test_a_model_that_the_server_does_not_have(self, served: Served) -> None:
        with pytest.raises(ServiceError, match=r"HTTP 404: .*The model `other` does not exist"):
            served.engine(model="other")

    def test_concurrent_callers_with_common_prefixes_get_their_own_scores(self, served: Served) -> None:
        found = served.engine(concurrency=64)
        whole = served.rows(7, 1, 48).values.tolist() + list(range(1, 40))
        rows = [Ragged.from_list([torch.tensor([*whole[: 16 + i % 24], i % served.vocab, i % 7])]) for i in range(64)]
        with ThreadPoolExecutor(64) as pool:
            answers = list(pool.map(lambda row: evaluated(found, row, top_k=len(row.values) % 3), rows))
        for row, answer in zip(rows, answers, strict=True):
            want = served.scorer.score(row).values.double()
            torch.testing.assert_close(answer.log_prob.values.double(), want, rtol=0, atol=served.tolerance)
