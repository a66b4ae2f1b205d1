"""The linear head of a language model: log-probs, entropy, KL and top-k from hidden states, never the ``[N, V]`` logits."""

from torchrl_llm_kl.head._linear import (
    HeadOutput,
    PairOutput,
    TopK,
    linear_kl,
    linear_log_prob,
    linear_pair,
    linear_top_k,
)

__all__ = ["HeadOutput", "PairOutput", "TopK", "linear_kl", "linear_log_prob", "linear_pair", "linear_top_k"]
