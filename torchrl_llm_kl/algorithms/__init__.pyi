"""Names of the package: it loads them on first use, type checkers read them here."""

from torchrl_llm_kl.algorithms import (
    elsewhere as elsewhere,
    presets as presets,
)
from torchrl_llm_kl.algorithms._algorithm import (
    Algorithm as Algorithm,
    AlgorithmOverrides as AlgorithmOverrides,
)
from torchrl_llm_kl.algorithms._make import (
    make_algorithm as make_algorithm,
)
from torchrl_llm_kl.algorithms._parts import (
    AlgorithmParts as AlgorithmParts,
    mix_buffers as mix_buffers,
)
from torchrl_llm_kl.algorithms._schema import (
    SCHEMAS as SCHEMAS,
    Entry as Entry,
    Schema as Schema,
    SchemaError as SchemaError,
)
from torchrl_llm_kl.algorithms.elsewhere import (
    Setting as Setting,
    Translation as Translation,
    from_trinity as from_trinity,
    from_trl as from_trl,
    from_verl as from_verl,
)
from torchrl_llm_kl.algorithms.presets import (
    ALGORITHMS as ALGORITHMS,
    AlgorithmName as AlgorithmName,
    UnknownAlgorithmError as UnknownAlgorithmError,
    algorithm_table as algorithm_table,
    flag_table as flag_table,
    get_algorithm as get_algorithm,
    source_table as source_table,
)

# isort: split
# For the layers above, not public:
from torchrl_llm_kl.algorithms._algorithm import (
    apply_overrides as apply_overrides,
)
