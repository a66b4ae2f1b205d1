"""One model for many processes, over Ray.

Names load on first use, so that the keeper of a service starts without torch, and a replica without torchrl's collectors.
"""

from __future__ import annotations

from torchrl_llm_kl._exports import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
