"""The top k over the wire: the numbers of the local scorer, in float32 and float16, while replicas die."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import numpy as np
import pytest
import ray
import torch
from tensordict import TensorDict
from torch.testing import assert_close

from load import callers
from remote_models import model
from torchrl_llm_kl import LogProbScorer, RetrieveLogProb
from torchrl_llm_kl.service import ProtocolError, RayRetrieveLogProb, RemoteModel
from torchrl_llm_kl.service._wire import Reply, Request
from torchrl_llm_kl.service.client import _remote
from torchrl_llm_kl.service.control._spec import ServiceSpec
from torchrl_llm_kl.service.engines._engine import TransformersEngine
from torchrl_llm_kl.service.replica._core import ScoringCore
from waits import until

FIELDS = ("log_prob", "entropy", "top_indices", "top_log_probs", "tail_log_prob")
ROWS = [[3, 4, 5, 6, 7], [8], [], [9, 10, 11]]


def loopback(monkeypatch: pytest.MonkeyPatch, made: Any, max_tokens: int = 4) -> RemoteModel:
    """A model whose requests and replies are packed, scored here and unpacked, without Ray."""
    core = ScoringCore(TransformersEngine(made))

    class Exchange:
        def __init__(self, replicas: Any, router: Any, whole: Any, *, timeout: float) -> None:
            self.parts = whole.divided(router, [0, 1])

        async def arrival(self) -> None:
            pass

        def replies(self) -> list[Reply]:
            found = core.score([Request.unpack(part.request.pack()) for part in self.parts])
            for one in found:
                if isinstance(one, Exception):
                    raise one
            return [Reply.unpack(one.pack()) for one in found if isinstance(one, Reply)]

    monkeypatch.setattr(_remote, "Exchange", Exchange)
    return RemoteModel(ServiceSpec("name", model, "source", {"max_tokens": max_tokens}, num_replicas=2))


@pytest.mark.parametrize("k", [1, 5, 97])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_equal_those_of_the_local_scorer(monkeypatch: pytest.MonkeyPatch, k: int, dtype: torch.dtype) -> None:
    made = model().to(dtype)
    masks = [[False, True, False, True, True], [False], [], [False, False, True]]
    for mask in (None, masks):
        for entropy in (False, True):
            found = loopback(monkeypatch, made).make_scorer().evaluate(ROWS, mask, top_k=k, entropy=entropy)
            expected = LogProbScorer(made).evaluate(ROWS, mask, top_k=k, entropy=entropy)
            for name in FIELDS:
                a, b = getattr(found, name), getattr(expected, name)
                assert (a is None) == (b is None), name
                if a is not None:
                    assert_close(
                        a.values, b.values, atol=1e-6, rtol=1e-6, check_dtype=name in ("log_prob", "top_indices")
                    )
    assert found.top_log_probs is not None
    assert found.top_log_probs.values.dtype == torch.float32
    if k == 97:
        assert found.tail_log_prob is not None
        assert found.tail_log_prob.values[found.log_prob.values != 0].isneginf().all()


def test_nothing_to_score(monkeypatch: pytest.MonkeyPatch) -> None:
    found = loopback(monkeypatch, model()).make_scorer().evaluate([[3], []], top_k=4)
    assert found.top_indices is not None
    assert found.top_indices.values.shape == (1, 4)
    assert found.top_indices.values.dtype == torch.int64


def test_log_probs_in_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative error of at most 2^-11, 2^-25 nats for the smallest; finite ones stay finite, -inf stays -inf."""
    remote = loopback(monkeypatch, model())
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
        def __init__(self) -> None:
            super().__init__()
            self.logits = torch.nn.Parameter(torch.tensor([0.0, -1e-6, -70000.0, -20.0, -torch.inf]))

        def forward(self, input_ids: torch.Tensor, **_: object) -> tuple[torch.Tensor]:
            return (self.logits.expand(*input_ids.shape, 5),)

    with pytest.warns(UserWarning, match="full forward"):
        far = loopback(monkeypatch, Far())
    far.top_k_dtype = torch.float16
    found = far.make_scorer().evaluate([[0, 1]], top_k=5)
    assert found.top_indices.values[1].tolist() == [0, 1, 3, 2, 4]
    assert found.top_log_probs.values[1, 3:].tolist() == [-65504.0, -torch.inf]
    assert_close(
        found.top_log_probs.values[1, :3], torch.tensor([-0.693147, -0.693148, -20.693148]), rtol=2.0**-11, atol=0
    )
    with pytest.raises(ValueError, match=r"top_k_dtype must be torch.float32 or torch.float16, got torch.int8"):
        far.top_k_dtype = torch.int8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 98}, "98.*97"),
        ({"top_k": -1}, "top_k must be a whole number from 0 to 1024, got -1"),
        ({"top_k": 2000}, "top_k must be a whole number from 0 to 1024, got 2000"),
        ({"moments": True}, "moments=True needs the models in this process"),
        ({"reference": object()}, "an exact KL needs the models in this process: .* Ask for top_k="),
        ({"grad": True}, "returns no gradient"),
    ],
)
def test_what_is_refused(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str) -> None:
    scorer = loopback(monkeypatch, model()).make_scorer()
    with pytest.raises(ValueError, match=message):
        scorer.evaluate(ROWS, **options)
    with pytest.raises(ValueError, match=message):
        asyncio.run(scorer.aevaluate(ROWS, **options))


class Plain(TransformersEngine):
    """An engine without distributions."""

    def evaluate(self, *args: Any) -> Any:
        found = super().evaluate(*args)
        return found._replace(top_indices=None, entropy=None)


def test_an_engine_without_distributions() -> None:
    core, request = ScoringCore(Plain(model())), partial(Request.of, version=None, caller="")
    tokens, lengths = torch.tensor([3, 4, 5]), torch.tensor([3])
    settings = [_remote.Settings(), _remote.Settings(entropy=True), _remote.Settings(top_k=2)]
    plain, entropy, top = core.score([request(tokens, lengths, None, each) for each in settings])
    assert isinstance(plain, Reply)
    assert isinstance(entropy, ValueError)
    assert str(entropy) == "Plain returns no entropy: leave it out of the request."
    assert isinstance(top, ValueError)
    assert "Plain returns no top_indices" in str(top)


def test_a_reply_without_the_top_k(monkeypatch: pytest.MonkeyPatch) -> None:
    remote = loopback(monkeypatch, model())
    monkeypatch.setattr(
        _remote.Exchange, "replies", lambda self: [Reply(np.zeros(7, np.float32), None, 0)] * len(self.parts)
    )
    with pytest.raises(ProtocolError, match="it answers another request"):
        remote.make_scorer().evaluate(ROWS, top_k=2)


# ------------------------------------------------------------------ with Ray


def data(seed: int) -> TensorDict:
    full = torch.randint(97, (3, 8), generator=torch.Generator().manual_seed(seed))
    return TensorDict({"tokens": {"full": full, "prompt": full[:, :3].clone()}}, [3])


@pytest.mark.slow
def test_a_teacher_while_replicas_die() -> None:
    transform = RayRetrieveLogProb(
        model_factory=model, actor_name="teacher", num_replicas=2, num_cpus=0, top_k=64, temperature=0.7
    )
    local = RetrieveLogProb(model(), top_k=64, temperature=0.7)
    handles = [ray.get_actor(f"teacher:{i}", namespace=transform.model.spec.namespace) for i in range(2)]
    try:
        with callers(transform.model, count=2) as load:
            for seed in range(30):
                if seed in (5, 15):
                    ray.kill(handles[seed == 15], no_restart=False)
                found, expected = transform(data(seed)), local(data(seed))
                for key in [("log_probs", "full"), *(("top_k", x) for x in ("ids", "log_probs", "rest_log_prob"))]:
                    assert_close(found[key], expected[key], atol=1e-6, rtol=1e-6, check_dtype=False)
            until(lambda: len(load.answers) > 20)
        load.assert_all_right(LogProbScorer(model()))
        restarts = [transform.model.call(i, "stats")["restarts"] for i in range(2)]
        assert min(restarts) >= 1
    finally:
        transform.model.close()
