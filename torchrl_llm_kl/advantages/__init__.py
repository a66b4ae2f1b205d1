"""Advantages: pure functions of rewards, values and log-probs, and the transform that reads and writes them by key.

Functions of one shape share their inputs: outcomes of sequences (``grpo``, ``rloo``, ...), tokens (``gae``, ``jsd``, ...) and
steps of trajectories (``gigpo``, ...). Their modules, ``_group``, ``_token`` and ``_trajectory``, document each input once.
"""

from __future__ import annotations

from torchrl_llm_kl._exports import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)

from torchrl_llm_kl.advantages import _group, _token, _trajectory  # noqa: E402, F401  (they register themselves)
