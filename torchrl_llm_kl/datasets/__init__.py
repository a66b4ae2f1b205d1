"""Rows of files, datasets and lists, SFT and preference data as TensorDicts, and batches on disk."""

from __future__ import annotations

from torchrl_llm_kl._exports import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
