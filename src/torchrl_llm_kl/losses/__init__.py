"""Losses: objectives per token, how they are summed, and the modules that tie them to TensorDict keys."""

from __future__ import annotations

from torchrl_llm_kl.losses._aggregate import AGGREGATIONS, aggregate, count
from torchrl_llm_kl.losses._objective import (
    ObjectiveSpec,
    UnknownObjectiveError,
    available_objectives,
    get_objective,
    objective,
    spec_of,
)
from torchrl_llm_kl.losses._term import LossTerm
from torchrl_llm_kl.losses.objectives import *  # noqa: F403
from torchrl_llm_kl.losses.objectives import __all__ as _objectives

__all__ = [
    "AGGREGATIONS",
    "LossTerm",
    "ObjectiveSpec",
    "UnknownObjectiveError",
    "aggregate",
    "available_objectives",
    "count",
    "get_objective",
    "objective",
    "spec_of",
    *_objectives,
]
