"""Advantages: pure functions of rewards, values and log-probs, and the transform that reads and writes them by key.

The functions come in three groups: outcomes of sequences (``grpo``, ``rloo``, ...), tokens (``gae``, ``jsd``, ...) and steps of
trajectories (``gigpo``, ...). The modules ``_group``, ``_token`` and ``_trajectory`` document the inputs of each group once.
"""

from __future__ import annotations

from torchrl_llm_kl._exports import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)

from torchrl_llm_kl.advantages import _group, _token, _trajectory  # noqa: E402, F401  (their functions register themselves)
