"""Hydra's config groups of transforms, losses and coefficients, as torchrl has them for its own.

Importing this package registers them. It needs hydra-core, of the extra ``hydra``.
"""

from __future__ import annotations

from torchrl_llm_kl._registry import install_hint

try:
    import hydra  # noqa: F401
except ImportError as error:
    raise ImportError(f"config groups need hydra-core: {install_hint('hydra')}.") from error

from torchrl_llm_kl.configs._nodes import NODES
from torchrl_llm_kl.configs._settings import build

__all__ = ["NODES", "build"]
