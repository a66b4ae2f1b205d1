"""The transforms with remote models, without Ray."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from remote_models import model
from tensordict import TensorDict

from torchrl_llm_kl import LogProbScorer, Ragged, RetrieveKL
from torchrl_llm_kl.rollouts import ModelInterface
from torchrl_llm_kl.scoring import Scores
from torchrl_llm_kl.service import RayRetrieveLogProb, RemoteModel
from torchrl_llm_kl.service.control._spec import ServiceSpec


class RemoteStub:
    """A model in another process, as transforms see it."""

    interface = ModelInterface()

    def __init__(self, events: list[str]) -> None:
        self.events, self.scorer = events, LogProbScorer(model(seed=1))

    def make_scorer(self, **settings: object) -> RemoteStub:
        return self

    def begin(self, tokens: Ragged, mask: torch.Tensor, **settings: object) -> Callable[[], Scores]:
        self.events.append("request sent")

        def finish() -> Scores:
            self.events.append("reply awaited")
            return self.scorer.evaluate(tokens, mask)

        return finish


def test_the_reference_is_scored_while_the_policy_is() -> None:
    events: list[str] = []
    policy = model()
    transform = RetrieveKL(policy, RemoteStub(events), coeff=0.5)
    policy.register_forward_pre_hook(lambda *_: events.append("policy scored"))
    policy.model.register_forward_pre_hook(lambda *_: events.append("policy scored"))
    full = torch.randint(97, (2, 6), generator=torch.Generator().manual_seed(0))

    def data() -> TensorDict:
        return TensorDict(
            {
                "tokens": {"full": full, "prompt": full[:, :2].clone()},
                "masks": {"all_attention_mask": torch.ones_like(full, dtype=torch.bool)},
                "next": TensorDict({"reward": torch.zeros(2, 1)}, [2]),
            },
            [2],
        )

    found = transform(data())
    assert events[0] == "request sent"
    assert events[-1] == "reply awaited"
    assert events[1:-1]
    assert set(events[1:-1]) == {"policy scored"}
    expected = RetrieveKL(model(), model(seed=1), coeff=0.5)(data())
    for key in (("next", "kl_penalty"), ("next", "reward")):
        assert torch.allclose(found[key], expected[key], atol=1e-6)


def test_service_arguments_without_a_service_are_refused() -> None:
    there = RemoteModel(ServiceSpec("name", model, "source", {"max_tokens": 1}))
    with pytest.raises(ValueError, match="actor_name, num_replicas would be ignored"):
        RayRetrieveLogProb(there, num_replicas=7, actor_name="x")
    with pytest.raises(ValueError, match="there is nothing to serve, use the local class"):
        RetrieveKL("from_collector", "base", use_ray_service=True)
    with pytest.raises(ValueError, match="use the local class"):
        RayRetrieveLogProb(model(), use_ray_service=False)
