"""Your own task: prompts from a file or a list, rewards from Python functions, tools over several turns, as an env."""

from __future__ import annotations

from torchrl_llm_kl._exports import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
