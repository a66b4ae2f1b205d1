"""The nodes of the config groups. Fields and defaults are those of the constructors, read from their signatures."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING
from torchrl.trainers.algorithms.configs.common import ConfigBase
from torchrl.trainers.algorithms.configs.objectives import LossConfig
from torchrl.trainers.algorithms.configs.transforms import TransformConfig

import torchrl_llm_kl as package
from torchrl_llm_kl.configs._settings import PARTS, build
from torchrl_llm_kl.losses import EntropyBonus, KLToReference, KLToSampler

#: Group, name, what is constructed, and the fields that take further arguments of it.
_TABLE: tuple[tuple[str, str, Callable[..., Any], tuple[str, ...]], ...] = (
    ("transform", "retrieve_kl", package.RetrieveKL, ("service",)),
    ("transform", "retrieve_log_prob", package.RetrieveLogProb, ("service",)),
    ("transform", "kl_computation", package.KLComputation, ()),
    ("transform", "llm_kl_reward", package.KLRewardTransform, ("service",)),  # torchrl's own is kl_reward
    ("transform", "advantage", package.Advantage, ("hyper",)),
    ("loss", "policy", package.PolicyLoss, ("hyper", "set_keys")),
    ("loss", "value", package.ValueLoss, ("set_keys",)),
    ("term", "kl_to_reference", KLToReference, ()),
    ("term", "kl_to_sampler", KLToSampler, ()),
    ("term", "entropy_bonus", EntropyBonus, ()),
    ("sampling", "base", package.Sampling, ()),
    ("options", "base", package.ScoreOptions, ()),
    ("extra", "entropy", package.Entropy, ()),
    ("extra", "moments", package.Moments, ()),
    ("extra", "top_k", package.TopK, ()),
    ("extra", "kept_tokens", package.KeptTokens, ()),
    ("extra", "routed_experts", package.RoutedExperts, ()),
    ("extra", "sampler_log_probs", package.SamplerLogProbs, ()),
    ("extra", "after_prompt", package.AfterPrompt, ()),
    ("extra", "adapters", package.Adapters, ()),
    ("extra", "kl_keys", package.KLKeys, ()),
    ("algorithm", "base", package.make_algorithm, ("overrides",)),
    ("coefficient", "fixed", package.FixedKLCoefficient, ()),
    ("coefficient", "adaptive", package.AdaptiveKLCoefficient, ()),
    ("coefficient", "pi", package.PIKLCoefficient, ()),
    ("coefficient", "dual", package.DualKLCoefficient, ()),
    ("coefficient", "adaptive_entropy", package.AdaptiveEntropyCoefficient, ()),
)
#: Annotations of a signature that a node has too; all others are Any.
_CHECKED: dict[str, Any] = {"bool": bool, "int": int, "float": float, "str": str}


class _Node(ConfigBase):
    """A node of a group that torchrl does not have."""

    def __post_init__(self) -> None:
        """Do nothing: the base requires it."""


_BASES: dict[str, type] = {"transform": TransformConfig, "loss": LossConfig}


def _node(base: type, made: Callable[..., Any], more: tuple[str, ...]) -> type:
    """A node with the fields of a constructor, and ``more`` fields of further arguments."""
    path = f"{made.__module__.partition('._')[0]}.{made.__name__}"
    annotations: dict[str, Any] = {"_target_": str, "_convert_": str, "class_": str}
    values: dict[str, Any] = {"_target_": f"{build.__module__.rpartition('.')[0]}.build", "_convert_": "all"}
    values["class_"] = path
    for parameter in inspect.signature(made).parameters.values():
        if parameter.kind is not parameter.VAR_KEYWORD:
            annotations[parameter.name] = _CHECKED.get(str(parameter.annotation), Any)
            values[parameter.name] = MISSING if parameter.default is parameter.empty else parameter.default
            if repr(parameter.default) == "<factory>":  # of a dataclass: no value here
                values[parameter.name] = None
    for extra in (
        *more,
        *(name for name in PARTS if name in values),
    ):  # None: a mapping or a list can be merged into it
        annotations[extra], values[extra] = Any, None
    return dataclass(type(f"{made.__name__}Config", (base,), {"__annotations__": annotations, **values}))


#: Group -> name -> node, a dataclass; ``NODES["transform"]["retrieve_kl"]`` describes :class:`~torchrl_llm_kl.RetrieveKL`.
NODES: dict[str, dict[str, type]] = {}
for _group, _name, _made, _more in _TABLE:
    NODES.setdefault(_group, {})[_name] = _node(_BASES.get(_group, _Node), _made, _more)
    ConfigStore.instance().store(_name, NODES[_group][_name], group=_group, provider="torchrl_llm_kl")
