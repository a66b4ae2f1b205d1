"""The linear head of a language model: log-probs, entropy, KL and top-k from hidden states, never the ``[N, V]`` logits."""

from __future__ import annotations

from torchrl_llm_kl.head._functions import (
    Direction,
    linear_kept,
    linear_kl,
    linear_log_prob,
    linear_outcomes,
    linear_pair,
    linear_top_k,
    logits_kl,
)
from torchrl_llm_kl.head._support import WHOLE as WHOLE, Kept, Truncation, dropped as dropped, floor_of as floor_of
from torchrl_llm_kl.head._tiles import HeadOutput, OutcomesOutput, PairOutput, TopK

__all__ = [
    "Direction",
    "HeadOutput",
    "Kept",
    "OutcomesOutput",
    "PairOutput",
    "TopK",
    "Truncation",
    "linear_kept",
    "linear_kl",
    "linear_log_prob",
    "linear_outcomes",
    "linear_pair",
    "linear_top_k",
    "logits_kl",
]
