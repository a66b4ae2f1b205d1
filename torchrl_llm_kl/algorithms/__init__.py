"""Algorithms: typed presets of objective, advantage and KL, bound to models by :func:`make_algorithm`."""

from __future__ import annotations

from torchrl_llm_kl.algorithms._algorithm import Algorithm, AlgorithmOverrides
from torchrl_llm_kl.algorithms._make import make_algorithm
from torchrl_llm_kl.algorithms._parts import AlgorithmParts, mix_buffers
from torchrl_llm_kl.algorithms._schema import SCHEMAS, Entry, Schema, SchemaError
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
    "UnknownAlgorithmError",
    "algorithm_table",
    "flag_table",
    "get_algorithm",
    "make_algorithm",
    "mix_buffers",
    "source_table",
]
