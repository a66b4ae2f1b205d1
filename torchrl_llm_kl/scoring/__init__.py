"""The log-prob engine: token ids in, per-token log-probs out, with or without gradient."""

from __future__ import annotations

from torchrl_llm_kl._exports import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
