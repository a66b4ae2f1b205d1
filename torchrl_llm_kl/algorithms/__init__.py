"""Algorithms: typed presets of objective, advantage and KL, bound to models by :func:`make_algorithm`."""

from __future__ import annotations

from torchrl_llm_kl._exports import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
