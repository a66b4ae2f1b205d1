"""``best_of_group`` keeps the best answers of each group, and no others."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from torchrl_llm_kl.advantages import Advantage, best_of_group


def test_ties_negative_rewards_and_a_group_of_one() -> None:
    reward = torch.tensor([-3.0, 0.5, -1.0, 0.5, -7.0, -1.0, -2.0])
    group = torch.tensor([9, 2, 9, 2, 4, 9, 2])
    assert best_of_group(reward, group).tolist() == [0, 1, 1, 1, 1, 1, 0]


def test_as_a_mask_for_a_loss() -> None:
    rewards = torch.tensor([[1.0], [2.0], [0.0], [-1.0]])
    data = TensorDict(next=TensorDict(reward=rewards, batch_size=[4]), batch_size=[4])
    Advantage("best_of_group", group_size=2, keys={"advantage": "loss_mask"})(data)
    assert data["loss_mask"].squeeze(-1).tolist() == [0, 1, 1, 0]
    assert "advantage" not in data
