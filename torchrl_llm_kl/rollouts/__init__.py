"""Reading and writing a rollout's TensorDict: keys, tokens and masks, entries, rewards and denominators."""

from __future__ import annotations

from torchrl_llm_kl._exports import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
