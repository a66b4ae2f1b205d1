"""Rows of files, datasets and lists; SFT and preference data as TensorDicts, and what was left out; batches on disk."""

from __future__ import annotations

from torchrl_llm_kl.datasets._batches import (
    OnSkip,
    SkippedRowsWarning,
    from_completions,
    from_conversations,
    from_pairs,
)
from torchrl_llm_kl.datasets._encoding import Answer, Encoder, EncodingArgs, Skip, Skipped
from torchrl_llm_kl.datasets._rows import (
    DataError,
    DataSource,
    FileRows as FileRows,
    Layout,
    Row,
    Rows,
    as_list as as_list,
    layout_of as layout_of,
    read_rows,
)
from torchrl_llm_kl.datasets._saved import load_batch, save_batch

__all__ = [
    "Answer",
    "DataError",
    "DataSource",
    "Encoder",
    "EncodingArgs",
    "Layout",
    "OnSkip",
    "Row",
    "Rows",
    "Skip",
    "Skipped",
    "SkippedRowsWarning",
    "from_completions",
    "from_conversations",
    "from_pairs",
    "load_batch",
    "read_rows",
    "save_batch",
]
