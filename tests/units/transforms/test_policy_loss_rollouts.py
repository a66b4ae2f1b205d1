"""``PolicyLoss`` on rollouts of torchrl's chat env, against one plain forward for each sequence, beside ``GRPOLoss``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.objectives.llm import GRPOLoss

from loss_cases import CORRUPTIONS, close, close_gradients, corrupt, responses, rollouts, sequences, trainable
from torchrl_llm_kl import PolicyLoss, make_algorithm
from torchrl_llm_kl.losses import EntropyBonus, KLToReference
from toy_rollouts import make_scoring_wrapper

ADVANTAGES = torch.tensor([1.0, -0.5, 2.0, 0.25])


@pytest.fixture
def data(tokenizer: Any, policy_model: nn.Module, ref_model: nn.Module, padded: bool) -> TensorDictBase:
    found = rollouts(tokenizer, policy_model, ref_model, padded=padded)
    return found.set("advantage", ADVANTAGES.reshape(4, 1, 1))


@pytest.fixture
def model(policy_model: nn.Module) -> nn.Module:
    return trainable(policy_model, noise=0.02)


def by_hand(model: nn.Module, policy: nn.Module, ref: nn.Module, data: TensorDictBase) -> Tensor:
    """PPO with 0.1 / 0.3 and a dual clip of 3, plus 0.7 k2, a mean over all response tokens."""
    tokens = sequences(data)
    values = []
    for i, (now, old, other) in enumerate(zip(*(responses(m, tokens) for m in (model, policy, ref)), strict=True)):
        ratio, advantage = (now - old.detach()).exp(), ADVANTAGES[i]
        value = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.9, 1.3))
        value = torch.minimum(value, -3 * advantage) if advantage < 0 else value
        values.append(value + 0.35 * (now - other.detach()).square())
    return torch.cat(values).mean()


def total(out: TensorDictBase) -> Tensor:
    return out["loss_objective"] + out["loss_kl_to_ref"]


def make_loss(actor: Any, **kwargs: Any) -> PolicyLoss:
    return PolicyLoss(actor, "ppo", clip_low=0.1, clip_high=0.3, terms=[KLToReference(0.7)], **kwargs)


def test_value_and_gradient(data: Any, model: nn.Module, policy_model: nn.Module, ref_model: nn.Module) -> None:
    loss = total(make_loss(model)(data))
    want = by_hand(model, policy_model, ref_model, data)
    close(loss, want)
    close_gradients(loss, want, model)


@pytest.mark.parametrize("strategy", ["sft", "rlhf"])
@pytest.mark.parametrize("input_mode", ["tokens", "history", "text"])
def test_wrappers_as_actors(
    data: Any,
    model: nn.Module,
    tokenizer: Any,
    policy_model: nn.Module,
    ref_model: nn.Module,
    strategy: Any,
    input_mode: str,
) -> None:
    """Whatever a wrapper reads, the sampled tokens are what is trained."""
    actor = make_scoring_wrapper(model, tokenizer, pad_output=False, input_mode=input_mode)
    loss = make_loss(actor, masking_strategy=strategy)
    close(total(loss(data)), by_hand(model, policy_model, ref_model, data))


@pytest.mark.parametrize("how", CORRUPTIONS)
def test_it_notices(how: str, data: Any, model: nn.Module, policy_model: nn.Module, ref_model: nn.Module) -> None:
    """The negative control: each mistake in the data changes the loss."""
    want = by_hand(model, policy_model, ref_model, data)
    found = total(make_loss(model, masking_strategy="rlhf")(corrupt(data, how)))
    assert (found - want).abs() > 1e-3


def test_the_objective_is_grpo_losss(data: Any, model: nn.Module, tokenizer: Any, padded: bool) -> None:
    """Where torchrl is right: the clipped objective and the entropy bonus, values and gradients."""
    actor = make_scoring_wrapper(model, tokenizer, pad_output=padded)
    theirs = GRPOLoss(actor, masking_strategy="sft", entropy_bonus=True, entropy_coeff=0.3, clip_epsilon=(0.1, 0.3))
    theirs.set_keys(sample_log_prob=("next", "log_probs", "full"))
    out = theirs(data)
    ours = PolicyLoss(model, clip_epsilon=0.1, clip_high=0.3, clip_ratio_c=None, terms=[EntropyBonus(0.3)])(data)
    close(ours["loss_objective"], out.loss_objective)
    close(ours["loss_entropy"], out.loss_entropy)
    close_gradients(ours["loss_objective"] + ours["loss_entropy"], out.loss_objective + out.loss_entropy, model)


def test_out_of_a_replay_buffer(data: Any, model: nn.Module) -> None:
    loss = make_loss(model)
    loss.count(data)
    want = total(loss(data))
    buffer = ReplayBuffer(storage=LazyStackStorage(4), collate_fn=lambda x: x)
    buffer.extend(data)
    rows = [buffer[torch.tensor(index)] for index in ([2, 0], [3, 1])]
    close(sum(total(loss(part)) for part in rows), want)


def test_an_algorithm_on_rollouts(data: Any, model: nn.Module, ref_model: nn.Module) -> None:
    """Scored in the env already: nothing is scored again, and advantages are those of the outcome."""
    parts = make_algorithm("grpo", model, reference=ref_model, group_key="pair", kl_loss_coeff=0.7)
    data["pair"] = torch.tensor([0, 0, 1, 1])
    before = [step["next", "log_probs", "full"].clone() for step in data.unbind(0)]
    batch = parts.prepare(data)
    assert all(
        torch.equal(step["next", "log_probs", "full"], old) for step, old in zip(batch.unbind(0), before, strict=True)
    )
    rewards = torch.stack([step["next", "reward"].sum() for step in batch.unbind(0)]).reshape(2, 2)
    centred = rewards - rewards.mean(-1, keepdim=True)
    want = (centred / (rewards.std(-1, keepdim=True) + 1e-6)).flatten()
    close(torch.stack([step["advantage"].reshape(()) for step in batch.unbind(0)]), want)
    assert total(parts.loss(batch)).isfinite()
