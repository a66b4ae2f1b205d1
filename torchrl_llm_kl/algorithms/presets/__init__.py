"""The presets, by family."""

from __future__ import annotations

from types import MappingProxyType

from torchrl_llm_kl.algorithms._algorithm import Algorithm
from torchrl_llm_kl.algorithms.presets import _agents, _from_data, _off_policy, _ppo_like

__all__ = ["ALGORITHMS"]

_FAMILIES = (_ppo_like, _off_policy, _from_data, _agents)

#: Every preset, by name. Read-only: :func:`dataclasses.replace` makes another one.
ALGORITHMS: MappingProxyType[str, Algorithm] = MappingProxyType(
    {name: getattr(family, name) for family in _FAMILIES for name in family.__all__}
)
