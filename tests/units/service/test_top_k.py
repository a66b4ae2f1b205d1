"""The top k over the wire: the numbers of the local scorer, in float32 and float16."""

import asyncio
from functools import partial

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from remote_models import model
from torchrl_llm_kl import LogProbScorer
from torchrl_llm_kl.service import ProtocolError
from torchrl_llm_kl.service._wire import Reply, Request
from torchrl_llm_kl.service.client import _remote
from torchrl_llm_kl.service.engines._engine import TransformersEngine
from torchrl_llm_kl.service.replica._core import ScoringCore

FIELDS = ("log_prob", "entropy", "top_indices", "top_log_probs", "tail_log_prob")
ROWS = [[3, 4, 5, 6, 7], [8], [], [9, 10, 11]]


@pytest.mark.parametrize(("k", "dtype"), [(1, torch.float64), (5, torch.float32), (97, torch.float64)])
def test_scores_equal_those_of_the_local_scorer(loop, k, dtype):
    made = model().to(dtype)
    some = [[False, True, False, True, True], [False], [], [False, False, True]]
    scorer = loop.serve(made).make_scorer()
    for mask, entropy in ((None, True), (some, False)):
        found = scorer.evaluate(ROWS, mask, top_k=k, entropy=entropy)
        expected = LogProbScorer(made).evaluate(ROWS, mask, top_k=k, entropy=entropy)
        for name in FIELDS:
            a, b = getattr(found, name), getattr(expected, name)
            assert (a is None) == (b is None), name
            if a is not None:
                same = name in ("log_prob", "top_indices")
                assert_close(a.values, b.values, atol=2e-6, rtol=1e-6, check_dtype=same)
    assert found.top_log_probs.values.dtype == torch.float32
    if k == 97:
        assert found.tail_log_prob.values[found.log_prob.values != 0].isneginf().all()
    empty = scorer.evaluate([[3], []], top_k=4).top_indices
    assert (empty.values.shape, empty.values.dtype) == ((1, 4), torch.int64)


def test_log_probs_in_float16(loop):
    """A relative error of at most 2^-11, 2^-25 nats for the smallest; finite ones stay finite, -inf stays -inf."""
    remote = loop.serve(model())
    exact = remote.make_scorer().evaluate(ROWS, top_k=97)
    remote.top_k_dtype = torch.float16
    rounded = remote.make_scorer().evaluate(ROWS, top_k=97)
    assert torch.equal(exact.top_indices.values, rounded.top_indices.values)
    assert torch.equal(exact.tail_log_prob.values, rounded.tail_log_prob.values)
    assert torch.equal(exact.log_prob.values, rounded.log_prob.values)
    a, b = exact.top_log_probs.values, rounded.top_log_probs.values
    assert not torch.equal(a, b)
    assert ((a - b).abs() <= torch.maximum(a.abs() * 2.0**-11, torch.tensor(2.0**-25))).all()

    class Far(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.logits = torch.nn.Parameter(torch.tensor([0.0, -1e-6, -70000.0, -20.0, -torch.inf]))

        def forward(self, input_ids, **_):
            return (self.logits.expand(*input_ids.shape, 5),)

    with pytest.warns(UserWarning, match="full forward"):
        far = loop.serve(Far())
    far.top_k_dtype = torch.float16
    found = far.make_scorer().evaluate([[0, 1]], top_k=5)
    assert found.top_indices.values[1].tolist() == [0, 1, 3, 2, 4]
    assert found.top_log_probs.values[1, 3:].tolist() == [-65504.0, -torch.inf]
    assert_close(
        found.top_log_probs.values[1, :3], torch.tensor([-0.693147, -0.693148, -20.693148]), rtol=2.0**-11, atol=0
    )
    with pytest.raises(ValueError, match=r"top_k_dtype must be torch.float32 or torch.float16, got torch.int8"):
        far.top_k_dtype = torch.int8


REFUSED = {
    "98.*97": {"top_k": 98},
    "top_k must be a whole number from 0 to 1024, got -1": {"top_k": -1},
    "top_k must be a whole number from 0 to 1024, got 2000": {"top_k": 2000},
    "moments=True needs the models in this process": {"moments": True},
    "an exact KL needs the models in this process: .* Ask for top_k=": {"reference": object()},
    "returns no gradient": {"grad": True},
}


def test_what_is_refused(loop):
    scorer = loop.serve(model()).make_scorer()
    for message, options in REFUSED.items():
        with pytest.raises(ValueError, match=message):
            scorer.evaluate(ROWS, **options)
        with pytest.raises(ValueError, match=message):
            asyncio.run(scorer.aevaluate(ROWS, **options))
    for routing in ({"routing": torch.zeros(1, 1, 1)}, {"record_routing": True}):
        with pytest.raises(ValueError, match="routing is recorded and replayed by a model in this process"):
            scorer.evaluate(ROWS, **routing)


class Plain(TransformersEngine):
    """An engine without distributions."""

    def evaluate(self, *args):
        found = super().evaluate(*args)
        return found._replace(top_indices=None, entropy=None)


def test_an_engine_without_distributions():
    core, request = ScoringCore(Plain(model())), partial(Request.of, version=None, caller="")
    tokens, lengths = torch.tensor([3, 4, 5]), torch.tensor([3])
    settings = [_remote.Settings(), _remote.Settings(entropy=True), _remote.Settings(top_k=2)]
    plain, entropy, top = core.score([request(tokens, lengths, None, each) for each in settings])
    assert isinstance(plain, Reply)
    assert isinstance(entropy, ValueError)
    assert str(entropy) == "Plain returns no entropy: leave it out of the request."
    assert isinstance(top, ValueError)
    assert "Plain returns no top_indices" in str(top)


def test_a_reply_without_the_top_k(loop, monkeypatch):
    remote = loop.serve(model())
    monkeypatch.setattr(
        _remote.Exchange, "replies", lambda self: [Reply(np.zeros(7, np.float32), None, 0)] * len(self.parts)
    )
    with pytest.raises(ProtocolError, match="it answers another request"):
        remote.make_scorer().evaluate(ROWS, top_k=2)
