"""The log-prob engine: token ids in, per-token log-probs out, with or without gradient."""

from torchrl_llm_kl.scoring._plan import plan_micro_batches
from torchrl_llm_kl.scoring._scorer import LogProbScorer

__all__ = ["LogProbScorer", "plan_micro_batches"]
