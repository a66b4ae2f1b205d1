from torchrl_llm_kl.rollouts import MissingEntryError
from torchrl_llm_kl.rollouts._entries import _names as entries

__all__ = ["MissingEntryError", "entries"]
