"""TorchRL transforms: retrieve log-probs and values, compute the KL, charge it to the reward."""

from __future__ import annotations

from torchrl_llm_kl._exports import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
