"""Settings of TRL, Trinity-RFT and verl as arguments of make_algorithm."""

from __future__ import annotations

from torchrl_llm_kl.algorithms.elsewhere._translation import Setting, Translation
from torchrl_llm_kl.algorithms.elsewhere._trinity import from_trinity
from torchrl_llm_kl.algorithms.elsewhere._trl import from_trl
from torchrl_llm_kl.algorithms.elsewhere._verl import from_verl

__all__ = ["Setting", "Translation", "from_trinity", "from_trl", "from_verl"]
