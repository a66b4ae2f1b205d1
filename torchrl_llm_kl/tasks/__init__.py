"""Builds an env from your own task: prompts, rewards from Python functions, and tools over several turns."""

from __future__ import annotations

from torchrl_llm_kl._exports import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
