"""One model for many processes, over Ray."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrl_llm_kl.service._client import RemoteModel, RemoteScorer
    from torchrl_llm_kl.service._errors import (
        ServiceClosedError,
        ServiceConfigError,
        ServiceError,
        ServiceOverloaded,
        ServiceTimeout,
        WeightVersionError,
    )
    from torchrl_llm_kl.service._fingerprint import fingerprint_of
    from torchrl_llm_kl.service._service import ScoringService
    from torchrl_llm_kl.service._transforms import RayKLRewardTransform, RayRetrieveKL, RayRetrieveLogProb
    from torchrl_llm_kl.service._weight_sync import ServiceWeightSyncScheme, ServiceWeightUpdater

__all__ = [
    "RayKLRewardTransform",
    "RayRetrieveKL",
    "RayRetrieveLogProb",
    "RemoteModel",
    "RemoteScorer",
    "ScoringService",
    "ServiceClosedError",
    "ServiceConfigError",
    "ServiceError",
    "ServiceOverloaded",
    "ServiceTimeout",
    "ServiceWeightSyncScheme",
    "ServiceWeightUpdater",
    "WeightVersionError",
    "fingerprint_of",
]

# Names load on first use: a control actor starts without torch, a replica without torchrl's collectors.
_HOME = {
    "_client": ("RemoteModel", "RemoteScorer"),
    "_errors": (
        "ServiceClosedError",
        "ServiceConfigError",
        "ServiceError",
        "ServiceOverloaded",
        "ServiceTimeout",
        "WeightVersionError",
    ),
    "_fingerprint": ("fingerprint_of",),
    "_service": ("ScoringService",),
    "_transforms": ("RayKLRewardTransform", "RayRetrieveKL", "RayRetrieveLogProb"),
    "_weight_sync": ("ServiceWeightSyncScheme", "ServiceWeightUpdater"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOME.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
