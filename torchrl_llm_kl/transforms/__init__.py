"""TorchRL transforms: retrieve log-probs and values, compute the KL, charge it to the reward."""

from __future__ import annotations

from torchrl_llm_kl.transforms._base import RayVariant as RayVariant  # for the service's transforms
from torchrl_llm_kl.transforms._kl_computation import KLComputation
from torchrl_llm_kl.transforms._kl_reward import KLRewardTransform
from torchrl_llm_kl.transforms._record_kept import RecordKept
from torchrl_llm_kl.transforms._retrieve_kl import RetrieveKL
from torchrl_llm_kl.transforms._retrieve_log_prob import RetrieveLogProb, RetrieveValue

__all__ = ["KLComputation", "KLRewardTransform", "RecordKept", "RetrieveKL", "RetrieveLogProb", "RetrieveValue"]
