"""Algorithms: typed presets of objective, advantage and KL, bound to models by :func:`make_algorithm`."""

from __future__ import annotations

from torchrl_llm_kl.algorithms._algorithm import Algorithm, AlgorithmOverrides, apply_overrides as apply_overrides
from torchrl_llm_kl.algorithms._make import make_algorithm
from torchrl_llm_kl.algorithms._parts import AlgorithmParts, mix_buffers
from torchrl_llm_kl.algorithms._schema import SCHEMAS, Entry, Schema, SchemaError
from torchrl_llm_kl.algorithms.elsewhere import Setting, Translation, from_trinity, from_trl, from_verl
from torchrl_llm_kl.algorithms.presets import (
    ALGORITHMS,
    AlgorithmName,
    UnknownAlgorithmError,
    algorithm_table,
    flag_table,
    get_algorithm,
    source_table,
)

__all__ = [
    "ALGORITHMS",
    "SCHEMAS",
    "Algorithm",
    "AlgorithmName",
    "AlgorithmOverrides",
    "AlgorithmParts",
    "Entry",
    "Schema",
    "SchemaError",
    "Setting",
    "Translation",
    "UnknownAlgorithmError",
    "algorithm_table",
    "flag_table",
    "from_trinity",
    "from_trl",
    "from_verl",
    "get_algorithm",
    "make_algorithm",
    "mix_buffers",
    "source_table",
]
