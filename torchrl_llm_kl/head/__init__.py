"""The linear head of a language model: log-probs, entropy, KL and top-k from hidden states, never the ``[N, V]`` logits."""

from __future__ import annotations

from torchrl_llm_kl._exports import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
