"""The log-prob engine: token ids in, per-token log-probs out, with or without gradient."""

from torchrl_llm_kl.scoring._critic import TokenCritic
from torchrl_llm_kl.scoring._plan import plan_micro_batches
from torchrl_llm_kl.scoring._scorer import DEFAULT_MEMORY, LogProbScorer
from torchrl_llm_kl.scoring._scores import Scores

__all__ = ["DEFAULT_MEMORY", "LogProbScorer", "Scores", "TokenCritic", "plan_micro_batches"]
