"""Masks of the assistant's tokens, from chat templates with or without ``{% generation %}`` blocks or from lengths."""

from __future__ import annotations

from torchrl_llm_kl._exports import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
