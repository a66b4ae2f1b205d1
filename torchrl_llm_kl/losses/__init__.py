"""Losses: per-token objectives, their reduction, and the modules that bind them to TensorDict keys."""

from __future__ import annotations

from torchrl_llm_kl._exports import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)

from torchrl_llm_kl.losses import corrections, objectives, terms  # noqa: E402, F401  (they register themselves)
