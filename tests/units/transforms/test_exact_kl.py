"""The exact KL through the transforms: in an env, in a buffer, from two entries, in the reward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import LazyStackStorage, ReplayBuffer

from closeness import assert_near
from torchrl_llm_kl import KLComputation, KLRewardTransform, RetrieveKL, RetrieveLogProb
from toy_models import BACKWARD, FORWARD
from toy_rollouts import OUTCOMES, collect, flat, make_model, make_policy, steps


def exact(model: Any, ref: Any, step: TensorDictBase) -> Tensor:
    """The sum over the vocabulary at each token of the response, 0 on prompt and padding."""
    full, attention = step["tokens", "full"], step["masks", "all_attention_mask"]
    out = torch.zeros(len(full))
    with torch.no_grad():
        p, q = (m(input_ids=full[attention][None]).logits[0, :-1].log_softmax(-1) for m in (model, ref))
    out[attention] = torch.cat([torch.zeros(1), (p.exp() * (p - q)).sum(-1)])
    out[: len(step["tokens", "prompt"])] = 0
    return out


def assert_exact(data: TensorDictBase, model: Any, ref: Any, coeff: float) -> None:
    for i, step in enumerate(steps(data)):
        want = exact(model, ref, step)
        kl, reward = step["next", "kl_penalty"], step["next", "reward"]
        assert_near(kl, want, **FORWARD)
        assert float(want.sum()) > 0.1
        assert_near(reward.sum(), OUTCOMES[i] - coeff * want.sum(), **FORWARD)


@pytest.mark.parametrize(
    ("place", "padded"), [("env", True), ("env", False), ("direct", True), ("on sample", False)], indirect=["padded"]
)
def test_retrieve_kl(wrapped: Any, policy_model: Any, ref_model: Any, tokenizer: Any, padded: bool, place: str) -> None:
    policy = make_policy(policy_model, tokenizer, pad_output=padded)
    transform = RetrieveKL(*wrapped(padded), estimator="exact", coeff=0.3, entropy_key=("entropy", "full"))
    data = flat(collect(tokenizer, policy, *([transform] if place == "env" else [])))
    if place == "direct":
        data = transform(data)
    elif place == "on sample":
        buffer = ReplayBuffer(storage=LazyStackStorage(8), batch_size=2, transform=transform)
        buffer.extend(data)
        data = buffer[:]
    assert_exact(data, policy_model, ref_model, 0.3)
    for step in steps(data):
        entropy = step["next", "entropy", "full"]
        assert entropy.shape == step["tokens", "full"].shape
        assert float(entropy.sum()) > 0.1


def test_two_transforms_and_an_entry_between_them(
    policy: Any, policy_model: Any, ref_model: Any, tokenizer: Any
) -> None:
    retrieve = [
        RetrieveLogProb(policy_model, reference=ref_model),
        RetrieveLogProb(ref_model, log_probs_full_key=("ref_log_probs", "full")),
    ]
    data = flat(collect(tokenizer, policy, *retrieve, KLComputation(estimator="exact", coeff=0.3)))
    assert_exact(data, policy_model, ref_model, 0.3)


def test_the_policys_own_base_is_the_reference(tokenizer: Any) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, init_lora_weights=False, target_modules="all-linear")
    model = peft.get_peft_model(make_model(tokenizer, seed=0), config).eval()
    policy = make_policy(model, tokenizer, pad_output=False)
    data = flat(collect(tokenizer, policy))
    data = RetrieveKL(model, "base", estimator="exact", coeff=0.3)(data)
    assert_exact(data, model, make_model(tokenizer, seed=0), 0.3)


def test_with_detach_false_the_penalty_has_the_gradient_of_the_kl(policy: Any, ref_model: Any, tokenizer: Any) -> None:
    data = flat(collect(tokenizer, policy))
    model = make_model(tokenizer, seed=0)
    out = RetrieveKL(model, ref_model, estimator="exact", detach=False, add_to_reward=False)(data)
    parameters = list(model.parameters())
    got = torch.autograd.grad(sum(step["next", "kl_penalty"].sum() for step in steps(out)), parameters)
    want = torch.zeros(())
    for step in steps(data):
        row = step["tokens", "full"][step["masks", "all_attention_mask"]]
        p, q = (m(input_ids=row[None]).logits[0, :-1].log_softmax(-1) for m in (model, ref_model))
        kl = (p.exp() * (p - q.detach())).sum(-1)
        response = int(step["masks", "all_attention_mask"][len(step["tokens", "prompt"]) :].sum())
        want = want + kl[-response:].sum()
    for a, b in zip(got, torch.autograd.grad(want, parameters), strict=True):
        assert_near(a, b, **BACKWARD)


def test_what_is_refused(policy: Any, policy_model: Any, ref_model: Any, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="exact"):  # the legacy transform runs no policy
        KLRewardTransform(ref_model, estimator="exact")
    wider = make_model(tokenizer, seed=1)
    wider.resize_token_embeddings(len(tokenizer) + 8)
    with pytest.raises(ValueError, match="vocabular"):
        RetrieveKL(policy_model, wider, estimator="exact")(flat(collect(tokenizer, policy)))
    for extra in ({"reference": ref_model}, {"exact_kl_key": "x"}, {"nonsense": 1}):
        with pytest.raises(TypeError, match=next(iter(extra))):
            RetrieveKL(policy_model, ref_model, **extra)
    with pytest.raises(ValueError, match=r"exact_kl_key='x' needs the model to compare with: pass reference="):
        RetrieveLogProb(policy_model, exact_kl_key="x")
