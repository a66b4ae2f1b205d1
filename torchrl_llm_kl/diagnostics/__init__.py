"""Diagnoses of a batch of rollouts: measures, causes of faults, and a page that shows its tokens."""

from __future__ import annotations

from torchrl_llm_kl._exports import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
