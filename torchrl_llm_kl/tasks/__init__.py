"""Your own task: prompts from a file or a list, rewards from Python functions, tools over several turns, as an env."""

from __future__ import annotations

from torchrl_llm_kl.tasks._env import InputMode, Reply, make_env
from torchrl_llm_kl.tasks._groups import whole_groups
from torchrl_llm_kl.tasks._prompts import Prompt, PromptError, PromptOrder, Prompts
from torchrl_llm_kl.tasks._rewards import FunctionReward, Reward, RewardError, RewardFunction
from torchrl_llm_kl.tasks._tools import ToolCall, ToolParser

__all__ = [
    "FunctionReward",
    "InputMode",
    "Prompt",
    "PromptError",
    "PromptOrder",
    "Prompts",
    "Reply",
    "Reward",
    "RewardError",
    "RewardFunction",
    "ToolCall",
    "ToolParser",
    "make_env",
    "whole_groups",
]
