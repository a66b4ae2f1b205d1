"""Names of the package: it loads them on first use, type checkers read them here."""

from torchrl_llm_kl.datasets._batches import (
    OnSkip as OnSkip,
    SkippedRowsWarning as SkippedRowsWarning,
    from_completions as from_completions,
    from_conversations as from_conversations,
    from_pairs as from_pairs,
)
from torchrl_llm_kl.datasets._encoding import (
    Answer as Answer,
    Encoder as Encoder,
    EncodingArgs as EncodingArgs,
    Skip as Skip,
    Skipped as Skipped,
)
from torchrl_llm_kl.datasets._rollouts import (
    from_rollouts as from_rollouts,
)
from torchrl_llm_kl.datasets._rows import (
    DataSource as DataSource,
    Row as Row,
    Rows as Rows,
    read_rows as read_rows,
)
from torchrl_llm_kl.datasets._saved import (
    load_batch as load_batch,
    save_batch as save_batch,
)
from torchrl_llm_kl.datasets._values import (
    DataError as DataError,
    Layout as Layout,
)

# isort: split
# For the layers above, not public:
from torchrl_llm_kl.datasets._rows import (
    FileRows as FileRows,
)
from torchrl_llm_kl.datasets._values import (
    RowError as RowError,
    as_list as as_list,
    check_unicode as check_unicode,
    layout_of as layout_of,
    read_messages as read_messages,
    row_variables as row_variables,
    standard_row as standard_row,
)
