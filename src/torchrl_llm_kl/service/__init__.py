"""One model for many processes, over Ray."""

from __future__ import annotations

from torchrl_llm_kl.service._client import RemoteModel, RemoteScorer
from torchrl_llm_kl.service._errors import (
    ServiceClosedError,
    ServiceConfigError,
    ServiceError,
    ServiceOverloaded,
    ServiceTimeout,
    WeightVersionError,
)
from torchrl_llm_kl.service._service import ScoringService
from torchrl_llm_kl.service._transforms import RayKLRewardTransform, RayRetrieveKL, RayRetrieveLogProb

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
    "WeightVersionError",
]
