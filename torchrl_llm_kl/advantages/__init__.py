"""Advantages: pure functions of rewards, values and log-probs, and the transform that ties them to TensorDict keys."""

from __future__ import annotations

from torchrl_llm_kl.advantages._asymre import asymre
from torchrl_llm_kl.advantages._best_of_group import best_of_group
from torchrl_llm_kl.advantages._dapo import informative_groups, overlong_penalty
from torchrl_llm_kl.advantages._gae import gae
from torchrl_llm_kl.advantages._gigpo import gigpo
from torchrl_llm_kl.advantages._grpo import dr_grpo, grpo
from torchrl_llm_kl.advantages._jsd import jsd
from torchrl_llm_kl.advantages._keys import DEFAULT_KEYS
from torchrl_llm_kl.advantages._on_policy_distill import on_policy_distill
from torchrl_llm_kl.advantages._opmd import opmd
from torchrl_llm_kl.advantages._rec import rec
from torchrl_llm_kl.advantages._registry import (
    UnknownAdvantageError,
    advantage,
    advantage_spec,
    available_advantages,
    get_advantage,
)
from torchrl_llm_kl.advantages._reinforce import reinforce, remax
from torchrl_llm_kl.advantages._reinforce_plus_plus import reinforce_plus_plus
from torchrl_llm_kl.advantages._rloo import rloo
from torchrl_llm_kl.advantages._spec import AdvantageSpec
from torchrl_llm_kl.advantages._step_wise_grpo import step_wise_grpo
from torchrl_llm_kl.advantages._transform import Advantage

__all__ = [
    "DEFAULT_KEYS",
    "Advantage",
    "AdvantageSpec",
    "UnknownAdvantageError",
    "advantage",
    "advantage_spec",
    "asymre",
    "available_advantages",
    "best_of_group",
    "dr_grpo",
    "gae",
    "get_advantage",
    "gigpo",
    "grpo",
    "informative_groups",
    "jsd",
    "on_policy_distill",
    "opmd",
    "overlong_penalty",
    "rec",
    "reinforce",
    "reinforce_plus_plus",
    "remax",
    "rloo",
    "step_wise_grpo",
]
