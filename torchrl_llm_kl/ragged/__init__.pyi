"""Names of the package: it loads them on first use, type checkers read them here."""

from torchrl_llm_kl.ragged._ragged import (
    Container as Container,
    Dense as Dense,
    Jagged as Jagged,
    PaddingSide as PaddingSide,
    Ragged as Ragged,
    Rows as Rows,
    Strided as Strided,
    check_padding_side as check_padding_side,
    same_rows as same_rows,
    segment_sum as segment_sum,
)
from torchrl_llm_kl.ragged._tensordict import (
    has_entry as has_entry,
    on_host as on_host,
    own_leaves as own_leaves,
    read_column as read_column,
    read_node as read_node,
    read_ragged as read_ragged,
    write_ragged as write_ragged,
)

# isort: split
# For the layers above, not public:
from torchrl_llm_kl.ragged._tensordict import (
    EntryTypeError as EntryTypeError,
    Node as Node,
    fields_of as fields_of,
    node_of as node_of,
    unbind_rows as unbind_rows,
)
