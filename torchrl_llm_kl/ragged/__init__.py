"""Variable-length data: one flat form, and its conversions from and to all others."""

from torchrl_llm_kl.ragged._containers import Container, Dense, Jagged, Rows, Strided, same_rows
from torchrl_llm_kl.ragged._ragged import PaddingSide, Ragged, check_padding_side, segment_sum
from torchrl_llm_kl.ragged._tensordict import has_entry, own_leaves, read_column, read_node, read_ragged, write_ragged

__all__ = [
    "Container",
    "Dense",
    "Jagged",
    "PaddingSide",
    "Ragged",
    "Rows",
    "Strided",
    "check_padding_side",
    "has_entry",
    "own_leaves",
    "read_column",
    "read_node",
    "read_ragged",
    "same_rows",
    "segment_sum",
    "write_ragged",
]
