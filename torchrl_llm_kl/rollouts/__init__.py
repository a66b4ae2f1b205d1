"""Reading and writing a rollout's TensorDict: keys, tokens and masks, entries, rewards and denominators."""

from __future__ import annotations

from torchrl_llm_kl.rollouts._context import (
    Context,
    InContext,
    check_context as check_context,
    in_context,
)
from torchrl_llm_kl.rollouts._entries import (
    MissingEntryError as MissingEntryError,
    describe_entries as describe_entries,
    find_key,
    find_log_probs as find_log_probs,
    is_distributed as is_distributed,
    leading_zeros as leading_zeros,
    leaves as leaves,
    outcomes as outcomes,
    per_sequence,
    per_token,
    read_result as read_result,
    require_key,
    sequence_ids_of as sequence_ids_of,
    sequence_integers as sequence_integers,
    sequence_sums as sequence_sums,
    with_a_row as with_a_row,
)
from torchrl_llm_kl.rollouts._kept import read_kept as read_kept, write_kept as write_kept
from torchrl_llm_kl.rollouts._keys import (
    ATTENTION_MASK as ATTENTION_MASK,
    TOKENS_FULL as TOKENS_FULL,
    ModelInterface,
    sub_key as sub_key,
)
from torchrl_llm_kl.rollouts._rendered import (
    Scope,
    TokenisingOptions,
    in_layout as in_layout,
    read_conversations as read_conversations,
)
from torchrl_llm_kl.rollouts._response import ResponseTokens, mismatch
from torchrl_llm_kl.rollouts._rewards import (
    RewardPlacement,
    read_denominators as read_denominators,
    token_reward,
    write_denominators as write_denominators,
)
from torchrl_llm_kl.rollouts._routing import read_routing as read_routing
from torchrl_llm_kl.rollouts._teachers import (
    TOP_K_NAMES as TOP_K_NAMES,
    TeacherOutcomes as TeacherOutcomes,
    read_top_k as read_top_k,
    top_k_entries as top_k_entries,
)
from torchrl_llm_kl.rollouts._tokens import (
    Located,
    MaskingStrategy,
    TokenReader as TokenReader,
    assistant_mask as assistant_mask,
    first_difference as first_difference,
    locate,
    prompt_ids as prompt_ids,
    response_mask as response_mask,
    zeros_of_first_tokens as zeros_of_first_tokens,
)

__all__ = [
    "Context",
    "InContext",
    "Located",
    "MaskingStrategy",
    "MissingEntryError",
    "ModelInterface",
    "ResponseTokens",
    "RewardPlacement",
    "Scope",
    "TokenisingOptions",
    "find_key",
    "in_context",
    "locate",
    "mismatch",
    "per_sequence",
    "per_token",
    "require_key",
    "token_reward",
]
