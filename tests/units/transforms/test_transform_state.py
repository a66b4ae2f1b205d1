"""What an env, a collector or a replay buffer saves of a transform: its coefficient, not the weights of its models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs import Transform
from torchrl.envs.llm.transforms import RetrieveLogProb as TorchRLRetrieveLogProb

from torchrl_llm_kl import AdaptiveKLCoefficient, KLRewardTransform, RetrieveKL, RetrieveLogProb
from toy_rollouts import make_env, make_policy, make_scoring_wrapper

Make = Callable[[float], Transform]


@pytest.fixture(params=["RetrieveKL", "RetrieveLogProb", "KLRewardTransform", "from_collector"])
def make(request: Any, wrapped: Any, ref_model: Any) -> Make:
    """Builds a transform with a coefficient."""

    def build(value: float) -> Transform:
        coefficient = AdaptiveKLCoefficient(value, target=1.0, horizon=100)
        gen, ref = wrapped(True)
        if request.param == "RetrieveKL":
            return RetrieveKL(gen, ref, coeff=coefficient)
        if request.param == "from_collector":
            return RetrieveKL("from_collector", ref, coeff=coefficient)
        if request.param == "RetrieveLogProb":
            return RetrieveLogProb(gen, reference=ref_model)
        return KLRewardTransform(ref, coef=coefficient)

    return build


KEYS = {
    "RetrieveKL": ["transforms.2.coeff.value"],
    "from_collector": ["transforms.2.coeff.value"],
    "RetrieveLogProb": [],
    "KLRewardTransform": ["coef.value"],
}


def test_a_transform_saves_its_coefficient_alone(make: Make, request: Any) -> None:
    transform, other = make(0.25), make(0.5)
    state = transform.state_dict()
    assert list(state) == KEYS[request.node.callspec.params["make"]]
    assert [float(value) for value in state.values()] == [0.25] * len(state)
    prefixed = transform.state_dict(prefix="mine.")
    assert [key.removeprefix("mine.") for key in prefixed] == list(state)
    missing, unexpected = other.load_state_dict(state)
    assert missing == unexpected == []
    assert [float(value) for value in other.state_dict().values()] == [0.25] * len(state)
    models = [part.model for part in (transform, *transform.children()) if hasattr(part, "model")]
    if state:
        with pytest.raises(RuntimeError, match=r"Missing key.*value"):
            other.load_state_dict({})
    assert all(any(p is q for q in transform.parameters()) for model in models for p in model.parameters()), (
        "still submodules: moved with the transform"
    )


def test_envs_collectors_and_buffers_save_no_weights(make: Make, tokenizer: Any, policy_model: Any) -> None:
    def build(value: float) -> tuple[Any, Any, Any]:
        env = make_env(tokenizer, make(value))
        policy = make_policy(policy_model, tokenizer, pad_output=True)
        collector = LLMCollector(env, policy=policy, dialog_turns_per_batch=4, total_dialog_turns=8)
        buffer = ReplayBuffer(storage=LazyStackStorage(4), batch_size=2, transform=make(value))
        return env, collector, buffer

    def numbers(state: Any) -> list[float]:
        return [float(value) for key, value in state.items() if isinstance(value, torch.Tensor) and "coef" in key]

    env, collector, buffer = build(0.25)
    saved = env.state_dict()
    states = [saved, collector.state_dict()["env_state_dict"], buffer.state_dict()["_transforms"]]
    for state in states:
        assert not [key for key in state if "weight" in key or "model" in key]
    weight = policy_model.get_output_embeddings().weight.detach().clone()
    again, again_collector, again_buffer = build(0.5)
    again.load_state_dict(copy.deepcopy(saved))
    assert numbers(again.state_dict()) == numbers(saved)
    again_buffer.load_state_dict(buffer.state_dict())
    assert numbers(again_buffer.state_dict()["_transforms"]) == numbers(saved)
    assert torch.equal(policy_model.get_output_embeddings().weight, weight)
    for one in (collector, again_collector):
        one.shutdown()


def test_a_state_with_weights_loads_them(tokenizer: Any, policy_model: Any, ref_model: Any) -> None:
    """As torchrl's transforms save theirs."""

    def build(kind: Any, model: Any) -> Transform:
        wrapper = make_scoring_wrapper(copy.deepcopy(model), tokenizer, pad_output=True)
        return kind(wrapper, log_probs_full_key=("ref_log_probs", "full"), assistant_only=False)

    state = build(TorchRLRetrieveLogProb, ref_model).state_dict()
    assert any(key.endswith("lm_head.weight") for key in state)
    ours = build(RetrieveLogProb, policy_model)
    assert ours.state_dict() == {}
    ours.load_state_dict(state)
    found = ours.model.model.get_output_embeddings().weight
    assert torch.equal(found, ref_model.get_output_embeddings().weight)
    (first, *_) = state
    with pytest.raises(RuntimeError, match=rf"Missing key.*{first}"):
        ours.load_state_dict({key: value for key, value in state.items() if key != first})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*other"):
        ours.load_state_dict({"other": torch.zeros(1)})
