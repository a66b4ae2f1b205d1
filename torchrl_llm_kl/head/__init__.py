"""The linear head of a language model: log-probs, entropy, KL and top-k from hidden states, never the ``[N, V]`` logits."""

from torchrl_llm_kl.head._checks import Direction
from torchrl_llm_kl.head._linear import HeadOutput, linear_log_prob
from torchrl_llm_kl.head._logits import logits_kl
from torchrl_llm_kl.head._pair import PairOutput, linear_kl, linear_pair
from torchrl_llm_kl.head._top_k import TopK, linear_top_k

__all__ = [
    "Direction",
    "HeadOutput",
    "PairOutput",
    "TopK",
    "linear_kl",
    "linear_log_prob",
    "linear_pair",
    "linear_top_k",
    "logits_kl",
]
