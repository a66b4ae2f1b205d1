"""What a batch of rollouts shows of the KL, the sampler and the masks."""

from __future__ import annotations

from torchrl_llm_kl.diagnostics._columns import KEYS as KEYS, TokenColumns, read_columns

__all__ = ["TokenColumns", "read_columns"]
