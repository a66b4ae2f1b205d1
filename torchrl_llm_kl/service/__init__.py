"""One model for many processes, over Ray."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchrl_llm_kl.service._client import RemoteModel, RemoteScorer
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
from torchrl_llm_kl.service._gang import GangEngine
from torchrl_llm_kl.service._http import HTTPEngine
from torchrl_llm_kl.service._push import PushedVersion
from torchrl_llm_kl.service._service import ScoringService
from torchrl_llm_kl.service._transforms import RayKLRewardTransform, RayRetrieveKL, RayRetrieveLogProb

if TYPE_CHECKING:
    from torchrl_llm_kl.service._weight_sync import ServiceWeightSyncScheme, ServiceWeightUpdater

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


def __getattr__(name: str) -> Any:
    if name in ("ServiceWeightSyncScheme", "ServiceWeightUpdater"):  # keeps torchrl's collectors out of actors
        return getattr(import_module("torchrl_llm_kl.service._weight_sync"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
