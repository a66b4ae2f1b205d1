"""Hydra's config groups of transforms, losses and coefficients, as torchrl has them for its own.

Importing this package registers them. It needs hydra-core: ``pip install 'torchrl-llm-kl[hydra]'``.
"""

from __future__ import annotations

try:
    import hydra  # noqa: F401
except ImportError as error:
    raise ImportError("config groups need hydra-core: pip install 'torchrl-llm-kl[hydra]'.") from error

from torchrl_llm_kl.configs._nodes import NODES
from torchrl_llm_kl.configs._settings import build

__all__ = ["NODES", "build"]
