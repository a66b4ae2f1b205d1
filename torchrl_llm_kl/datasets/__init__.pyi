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
from torchrl_llm_kl.datasets._rows import (
    DataError as DataError,
    DataSource as DataSource,
    Layout as Layout,
    Row as Row,
    Rows as Rows,
    read_rows as read_rows,
)
from torchrl_llm_kl.datasets._saved import (
    load_batch as load_batch,
    save_batch as save_batch,
)

# isort: split
# For the layers above, not public:
from torchrl_llm_kl.datasets._rows import (
    FileRows as FileRows,
    RowError as RowError,
    as_list as as_list,
    check_unicode as check_unicode,
    layout_of as layout_of,
    read_messages as read_messages,
)
