"""Algorithms: named presets of objective, advantage and KL, and how to make one with its models."""

from __future__ import annotations

from torchrl_llm_kl.algorithms._algorithm import Algorithm
from torchrl_llm_kl.algorithms._make import UnknownAlgorithmError, get_algorithm, make_algorithm
from torchrl_llm_kl.algorithms._mixing import mix_buffers
from torchrl_llm_kl.algorithms._parts import AlgorithmParts
from torchrl_llm_kl.algorithms._schema import SCHEMAS, Entry, Schema, SchemaError
from torchrl_llm_kl.algorithms._table import algorithm_table, flag_table, source_table
from torchrl_llm_kl.algorithms.presets import ALGORITHMS

__all__ = [
    "ALGORITHMS",
    "SCHEMAS",
    "Algorithm",
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
