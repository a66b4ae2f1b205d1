"""Names of the package: it loads them on first use, type checkers read them here."""

from torchrl_llm_kl.algorithms.elsewhere._others import (
    from_nemo_rl as from_nemo_rl,
    from_prime_rl as from_prime_rl,
    from_slime as from_slime,
)
from torchrl_llm_kl.algorithms.elsewhere._translation import (
    Setting as Setting,
    Translation as Translation,
)
from torchrl_llm_kl.algorithms.elsewhere._trinity import (
    from_trinity as from_trinity,
)
from torchrl_llm_kl.algorithms.elsewhere._trl import (
    from_trl as from_trl,
)
from torchrl_llm_kl.algorithms.elsewhere._verl import (
    from_verl as from_verl,
)
