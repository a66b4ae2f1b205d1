"""One model for many processes, over Ray."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchrl_llm_kl._registry import no_attribute

if TYPE_CHECKING:
    from torchrl_llm_kl.service._errors import (
        EngineLost,
        PoisonedRequest,
        ProtocolError,
        ServiceClosedError,
        ServiceConfigError,
        ServiceError,
        ServiceOverloaded,
        ServiceTimeout,
        WeightVersionError,
    )
    from torchrl_llm_kl.service._service import ScoringService
    from torchrl_llm_kl.service._transforms import RayKLRewardTransform, RayRetrieveKL, RayRetrieveLogProb
    from torchrl_llm_kl.service._weight_sync import ServiceWeightSyncScheme, ServiceWeightUpdater
    from torchrl_llm_kl.service.client._push import PushedVersion
    from torchrl_llm_kl.service.client._remote import RemoteModel, RemoteScorer
    from torchrl_llm_kl.service.engines._gang import GangEngine
    from torchrl_llm_kl.service.engines._http import HTTPEngine

__all__ = [
    "EngineLost",
    "GangEngine",
    "HTTPEngine",
    "PoisonedRequest",
    "ProtocolError",
    "PushedVersion",
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
]

# Names load on first use: a control actor starts without torch, a replica without torchrl's collectors.
_HOME = {
    "client._remote": ("RemoteModel", "RemoteScorer"),
    "_errors": (
        "EngineLost",
        "PoisonedRequest",
        "ProtocolError",
        "ServiceClosedError",
        "ServiceConfigError",
        "ServiceError",
        "ServiceOverloaded",
        "ServiceTimeout",
        "WeightVersionError",
    ),
    "engines._gang": ("GangEngine",),
    "engines._http": ("HTTPEngine",),
    "client._push": ("PushedVersion",),
    "_service": ("ScoringService",),
    "_transforms": ("RayKLRewardTransform", "RayRetrieveKL", "RayRetrieveLogProb"),
    "_weight_sync": ("ServiceWeightSyncScheme", "ServiceWeightUpdater"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOME.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise no_attribute(__name__, name, __all__)
