from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.rollouts import RewardPlacement, check_reward_placement, token_reward

__all__ = ["RewardPlacement", "check_reward_placement", "penalised_reward", "token_reward"]


def penalised_reward(
    reward: Any | None, kl: Ragged, mask: Tensor | None, coeff: nn.Module, placement: RewardPlacement
) -> Ragged:
    """``reward - coeff * KL`` for each token; ``[N, 1]``. See :func:`token_reward` for the reward."""
    placed = token_reward(reward, kl, mask, placement)
    weight = coeff().to(kl.values.device)
    return kl.like(torch.addcmul(placed.values, weight, kl.values.unsqueeze(-1), value=-1))
