"""What a batch of rollouts shows of the KL, the sampler and the masks."""

from __future__ import annotations

from torchrl_llm_kl.diagnostics._columns import KEYS as KEYS, TokenColumns, read_columns
from torchrl_llm_kl.diagnostics._inspector import Inspection, inspect_tokens

__all__ = ["Inspection", "TokenColumns", "inspect_tokens", "read_columns"]
