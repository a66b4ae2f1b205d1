"""Names of the package: it loads them on first use, type checkers read them here."""

from torchrl_llm_kl.rollouts._context import (
    Context as Context,
    InContext as InContext,
    in_context as in_context,
)
from torchrl_llm_kl.rollouts._entries import (
    MisalignedEntryError as MisalignedEntryError,
    MissingEntryError as MissingEntryError,
    ModelInterface as ModelInterface,
    find_key as find_key,
    per_sequence as per_sequence,
    per_token as per_token,
    require_key as require_key,
)
from torchrl_llm_kl.rollouts._rendered import (
    Scope as Scope,
    TokenisingOptions as TokenisingOptions,
)
from torchrl_llm_kl.rollouts._response import (
    ResponseTokens as ResponseTokens,
    RewardPlacement as RewardPlacement,
    mismatch as mismatch,
    token_reward as token_reward,
)
from torchrl_llm_kl.rollouts._tokens import (
    Located as Located,
    MaskingStrategy as MaskingStrategy,
    batch_mean as batch_mean,
    locate as locate,
)

# isort: split
# For the layers above, not public:
from torchrl_llm_kl.rollouts._entries import (
    ATTENTION_MASK as ATTENTION_MASK,
    TOKENS_FULL as TOKENS_FULL,
    describe_entries as describe_entries,
    find_log_probs as find_log_probs,
    find_result as find_result,
    is_distributed as is_distributed,
    leading_unscored as leading_unscored,
    leaves as leaves,
    outcomes as outcomes,
    read_result as read_result,
    sequence_ids_of as sequence_ids_of,
    sequence_integers as sequence_integers,
    sequence_sums as sequence_sums,
    sub_key as sub_key,
    with_a_row as with_a_row,
)
from torchrl_llm_kl.rollouts._records import (
    drop_stale as drop_stale,
    read_images as read_images,
    read_kept as read_kept,
    read_routing as read_routing,
    read_top_k as read_top_k,
    top_k_entries as top_k_entries,
    write_kept as write_kept,
)
from torchrl_llm_kl.rollouts._rendered import (
    in_layout as in_layout,
    read_conversations as read_conversations,
)
from torchrl_llm_kl.rollouts._response import (
    read_denominators as read_denominators,
    write_denominators as write_denominators,
)
from torchrl_llm_kl.rollouts._tokens import (
    TokenReader as TokenReader,
    assistant_mask as assistant_mask,
    first_difference as first_difference,
    prompt_ids as prompt_ids,
    response_mask as response_mask,
    zeros_of_first_tokens as zeros_of_first_tokens,
)
