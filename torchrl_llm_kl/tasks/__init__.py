"""Your own task: prompts from a file or a list, rewards from Python functions, as an env."""

from __future__ import annotations

from torchrl_llm_kl.tasks._env import InputMode, make_env
from torchrl_llm_kl.tasks._prompts import Prompt, PromptError, PromptOrder, Prompts
from torchrl_llm_kl.tasks._rewards import FunctionReward, Reward, RewardError, RewardFunction

__all__ = [
    "FunctionReward",
    "InputMode",
    "Prompt",
    "PromptError",
    "PromptOrder",
    "Prompts",
    "Reward",
    "RewardError",
    "RewardFunction",
    "make_env",
]
