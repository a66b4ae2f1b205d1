"""KL-regularised post-training of language models on TorchRL.

Public names load on first use. ``import torchrl_llm_kl`` takes little time and imports neither transformers nor ray.
"""

from __future__ import annotations

from torchrl_llm_kl._exports import PLUGINS, lazy_names

__version__ = "0.1.0"

# The Ray variants of the transforms, which `service_backend="ray"` builds.
PLUGINS.append(f"{__name__}.service._transforms")

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
