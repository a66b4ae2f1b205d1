"""A transform that writes the reward after the KL changes one number per token: it is named in a warning."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs import (
    BinarizeReward,
    Compose,
    DoubleToFloat,
    RewardClipping,
    RewardScaling,
    RewardSum,
    SignTransform,
    Transform,
)

from torchrl_llm_kl import KLComputation, KLRewardTransform, RetrieveKL, RetrieveLogProb
from toy_rollouts import collect, make_env, steps

AMOUNT = 0.25


class Bonus(Transform):
    """Adds a constant to the reward."""

    def __init__(self, key: str = "reward") -> None:
        super().__init__(in_keys=[key], out_keys=[key])

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        key = self.out_keys[0]
        reward = next_tensordict.get(key, None, as_list=True) if next_tensordict.batch_dims else next_tensordict[key]
        if isinstance(reward, list):
            for row, value in zip(next_tensordict.unbind(0), reward, strict=True):
                row[key] = value + AMOUNT
            return next_tensordict
        return next_tensordict.set(key, reward + AMOUNT)


def order_warnings(run: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in caught if "after the KL" in str(w.message)]


def test_an_amount_added_after_the_kl(
    tokenizer: Any, policy: Any, policy_model: nn.Module, ref_model: nn.Module
) -> None:
    """Before: once; after: once per token position, with one warning for all steps."""
    rewards = {}
    for place in ("before", "after"):
        kl = RetrieveKL(policy_model, ref_model, coeff=0.5)
        transforms = (Bonus(), kl) if place == "before" else (kl, Bonus())
        run = partial(collect, tokenizer, policy, *transforms, turns=2)
        found = order_warnings(lambda run=run, place=place: rewards.update({place: run()}))
        assert len(found) == (place == "after"), found
    assert "Bonus comes after the KL was charged to 'reward'" in found[0]
    assert "Append Bonus before the KL transform" in found[0]
    for right, wrong in zip(steps(rewards["before"]), steps(rewards["after"]), strict=True):
        number = wrong["next", "reward"].numel()
        more = wrong["next", "reward"].sum() - right["next", "reward"].sum()
        assert number > 10
        assert more.item() == pytest.approx((number - 1) * AMOUNT, abs=1e-4)


TRANSFORMS: dict[str, tuple[Any, bool]] = {
    "RewardClipping": (lambda: RewardClipping(-1, 1), True),
    "RewardScaling": (lambda: RewardScaling(loc=0.5, scale=2.0), True),
    "SignTransform": (lambda: SignTransform(in_keys=["reward"]), True),
    "BinarizeReward": (BinarizeReward, True),
    "Bonus": (Bonus, True),
    # A factor is that of the sum; no change; other entries.
    "factor": (lambda: RewardScaling(loc=0.0, scale=2.0), False),
    "DoubleToFloat": (DoubleToFloat, False),
    "RewardSum": (lambda: RewardSum(in_keys=["reward"], out_keys=["episode_reward"]), False),
    "other": (lambda: Bonus("other"), False),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("how", ["env", "composition", "appended", "part"])
def test_every_reward_transform(
    name: str, how: str, policy_model: nn.Module, ref_model: nn.Module, tokenizer: Any
) -> None:
    """Wherever it comes after: found when the first step runs, so the transform itself is not needed."""
    make, warns = TRANSFORMS[name]
    later, kl = make(), RetrieveKL(policy_model, ref_model)
    if how == "env":
        env = make_env(tokenizer, kl, later)
    elif how == "composition":
        env = make_env(tokenizer, Compose(kl), Compose(Compose(later)))
    elif how == "part":
        kl = KLComputation()
        env = make_env(tokenizer, RetrieveLogProb(policy_model), kl, later)
    else:
        env = make_env(tokenizer, kl).append_transform(later)
    found = order_warnings(kl.check_order)
    assert [name in text for text in found] == [True] * warns
    assert order_warnings(kl.check_order) == []
    del env


def test_no_warning(tokenizer: Any, policy_model: nn.Module, ref_model: nn.Module) -> None:
    """Before the KL, with the reward left alone, broadcast as torchrl does, or written elsewhere; and one that comes later."""
    for settings in ({"add_to_reward": False}, {"reward_placement": "broadcast"}, {"reward_key": "penalised"}):
        kl = RetrieveKL(policy_model, ref_model, **settings)
        env = make_env(tokenizer, Bonus(), kl, RewardClipping(-1, 1))
        assert order_warnings(kl.check_order) == []
    kl = KLRewardTransform(ref_model, out_keys=["penalised"])
    env = make_env(tokenizer, kl, Bonus())
    assert order_warnings(kl.check_order) == []
    kl = KLRewardTransform(ref_model)
    own = {"kl_key": "kl", "ref_log_probs_full_key": ("other", "full")}
    env = make_env(tokenizer, kl, RetrieveKL(policy_model, ref_model, **own))
    assert order_warnings(kl.check_order) == []
    env = env.append_transform(Bonus())
    env.full_reward_spec  # noqa: B018  # computed again
    assert len(order_warnings(kl.check_order)) == 1


def test_in_a_replay_buffer(policy_model: nn.Module, ref_model: nn.Module) -> None:
    tokens = TensorDict(full=torch.tensor([[3, 4, 5, 6]]), prompt=torch.tensor([[3, 4]]), batch_size=[1])
    data = TensorDict(tokens=tokens, next=TensorDict(reward=torch.ones(1, 1), batch_size=[1]), batch_size=[1])
    buffer = ReplayBuffer(storage=LazyStackStorage(1), batch_size=1)
    buffer.append_transform(RetrieveKL(policy_model, ref_model))
    buffer.append_transform(RewardClipping(-1, 1, in_keys=[("next", "reward")], out_keys=["reward"]))
    buffer.extend(data)
    assert len(order_warnings(buffer.sample)) == 1
