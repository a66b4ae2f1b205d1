"""The nodes of the config groups. Fields and defaults are read from the constructors' signatures."""

from __future__ import annotations

import csv
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING
from torchrl.trainers.algorithms.configs.common import ConfigBase
from torchrl.trainers.algorithms.configs.objectives import LossConfig
from torchrl.trainers.algorithms.configs.transforms import TransformConfig

import torchrl_llm_kl
from torchrl_llm_kl import losses
from torchrl_llm_kl.configs._settings import PARTS, build

#: Annotations of a signature that a node has too; all others are Any.
_CHECKED: dict[str, type] = {"bool": bool, "int": int, "float": float, "str": str}


class _Node(ConfigBase):
    """A node of a group that torchrl does not have."""

    def __post_init__(self) -> None:
        """Do nothing: the base requires it."""


_BASES: dict[str, type] = {"transform": TransformConfig, "loss": LossConfig}


def _node(base: type, made: Callable[..., object], more: Sequence[str]) -> type:
    """A node with the fields of a constructor, and ``more`` fields of further arguments."""
    annotations: dict[str, object] = {"_target_": str, "_convert_": str, "class_": str}
    values: dict[str, object] = {"_target_": f"{build.__module__.rpartition('.')[0]}.build", "_convert_": "all"}
    values["class_"] = f"{made.__module__.partition('._')[0]}.{made.__name__}"
    for name, parameter in inspect.signature(made).parameters.items():
        if parameter.kind is not parameter.VAR_KEYWORD:
            annotations[name] = _CHECKED.get(str(parameter.annotation), Any)
            values[name] = MISSING if parameter.default is parameter.empty else parameter.default
            if name in PARTS or repr(parameter.default) == "<factory>":  # of a dataclass: no value here
                annotations[name], values[name] = Any, None  # into which a mapping or a list can be merged
    annotations |= dict.fromkeys(more, Any)
    values |= dict.fromkeys(more)
    return dataclass(type(f"{made.__name__}Config", (base,), {"__annotations__": annotations, **values}))


#: Group -> name -> node, a dataclass; ``NODES["transform"]["retrieve_kl"]`` describes :class:`~torchrl_llm_kl.RetrieveKL`.
#: A row of ``nodes.csv`` says what a node constructs, and which fields take further arguments.
NODES: dict[str, dict[str, type]] = {}
for _row in csv.DictReader(files(__package__).joinpath("nodes.csv").read_text(encoding="utf-8").splitlines()):
    _group, _name = _row["group"], _row["name"]
    _made = getattr(losses, _row["makes"], None) or getattr(torchrl_llm_kl, _row["makes"])
    NODES.setdefault(_group, {})[_name] = _node(_BASES.get(_group, _Node), _made, _row["more"].split())
    ConfigStore.instance().store(_name, NODES[_group][_name], group=_group, provider="torchrl_llm_kl")
