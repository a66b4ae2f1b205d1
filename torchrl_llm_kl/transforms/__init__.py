"""TorchRL transforms: retrieve log-probs, compute the KL, penalise the reward."""

from torchrl_llm_kl.transforms._kl_computation import KLComputation
from torchrl_llm_kl.transforms._kl_reward import KLRewardTransform
from torchrl_llm_kl.transforms._retrieve_kl import RetrieveKL
from torchrl_llm_kl.transforms._retrieve_log_prob import RetrieveLogProb
from torchrl_llm_kl.transforms._retrieve_value import RetrieveValue

__all__ = ["KLComputation", "KLRewardTransform", "RetrieveKL", "RetrieveLogProb", "RetrieveValue"]
