"""The nodes of the config groups. Fields and defaults are those of the constructors, read from their signatures."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING
from torchrl.trainers.algorithms.configs.common import ConfigBase
from torchrl.trainers.algorithms.configs.objectives import LossConfig
from torchrl.trainers.algorithms.configs.transforms import TransformConfig

import torchrl_llm_kl
from torchrl_llm_kl.configs._settings import PARTS, build
from torchrl_llm_kl.losses import EntropyBonus, KLToReference, KLToSampler

T = TypeVar("T")
#: Group -> name -> node.
NODES: dict[str, dict[str, type]] = {}
#: Annotations of a signature that a node has too; all others are Any.
_CHECKED: dict[str, Any] = {"bool": bool, "int": int, "float": float, "str": str}


def _node(group: str, name: str, made: Callable[..., Any], *more: str) -> Callable[[type[T]], type[T]]:
    """Give a class the fields of a constructor, and ``more`` fields of further arguments; register it."""

    def decorate(cls: type[T]) -> type[T]:
        path = f"{made.__module__.partition('._')[0]}.{made.__name__}"
        annotations: dict[str, Any] = {"_target_": str, "_convert_": str, "class_": str}
        values: dict[str, Any] = {"_target_": f"{build.__module__.rpartition('.')[0]}.build", "_convert_": "all"}
        values["class_"] = path
        for parameter in inspect.signature(made).parameters.values():
            if parameter.kind is not parameter.VAR_KEYWORD:
                annotations[parameter.name] = _CHECKED.get(str(parameter.annotation), Any)
                values[parameter.name] = MISSING if parameter.default is parameter.empty else parameter.default
        for extra in (
            *more,
            *(name for name in PARTS if name in values),
        ):  # None: a mapping or a list may be merged into it
            annotations[extra], values[extra] = Any, None
        cls.__annotations__ = annotations
        for key, value in values.items():
            setattr(cls, key, value)
        finished = dataclass(cls)
        NODES.setdefault(group, {})[name] = finished
        ConfigStore.instance().store(group=group, name=name, node=finished, provider="torchrl_llm_kl")
        return finished

    return decorate


class _Node(ConfigBase):
    """A node of a group that torchrl does not have."""

    def __post_init__(self) -> None:
        """Do nothing: the base requires it."""


# ------------------------------------------------------------------ transforms


@_node("transform", "retrieve_kl", torchrl_llm_kl.RetrieveKL, "service")
class RetrieveKLConfig(TransformConfig):
    """``transform=retrieve_kl``: :class:`~torchrl_llm_kl.RetrieveKL`.

    ``service`` has the service's arguments (``actor_name``, ...) with ``service_backend: ray``.
    """


@_node("transform", "retrieve_log_prob", torchrl_llm_kl.RetrieveLogProb, "service")
class RetrieveLogProbConfig(TransformConfig):
    """``transform=retrieve_log_prob``: :class:`~torchrl_llm_kl.RetrieveLogProb`.

    ``service`` as in :class:`RetrieveKLConfig`.
    """


@_node("transform", "kl_computation", torchrl_llm_kl.KLComputation)
class KLComputationConfig(TransformConfig):
    """``transform=kl_computation``: :class:`~torchrl_llm_kl.KLComputation`."""


@_node("transform", "llm_kl_reward", torchrl_llm_kl.KLRewardTransform, "service")
class KLRewardTransformConfig(TransformConfig):
    """``transform=llm_kl_reward``: :class:`~torchrl_llm_kl.KLRewardTransform`; torchrl's own is ``transform=kl_reward``."""


@_node("transform", "advantage", torchrl_llm_kl.Advantage, "hyper")
class AdvantageConfig(TransformConfig):
    """``transform=advantage``: :class:`~torchrl_llm_kl.Advantage`; ``hyper`` has the advantage's hyper-parameters."""


# ------------------------------------------------------------------ losses and their parts


@_node("loss", "policy", torchrl_llm_kl.PolicyLoss, "hyper", "set_keys")
class PolicyLossConfig(LossConfig):
    """``loss=policy``: :class:`~torchrl_llm_kl.PolicyLoss`.

    ``hyper`` has the objective's hyper-parameters, ``set_keys`` the arguments of the method of this name. ``terms`` and
    ``corrections`` are a list, or a mapping with names of your own, which the defaults list can fill:
    ``- term@loss.terms.kl: kl_to_reference``.
    """


@_node("loss", "value", torchrl_llm_kl.ValueLoss, "set_keys")
class ValueLossConfig(LossConfig):
    """``loss=value``: :class:`~torchrl_llm_kl.ValueLoss`, of a critic."""


@_node("term", "kl_to_reference", KLToReference)
class KLToReferenceConfig(_Node):
    """``term=kl_to_reference``: :class:`~torchrl_llm_kl.losses.KLToReference`."""


@_node("term", "kl_to_sampler", KLToSampler)
class KLToSamplerConfig(_Node):
    """``term=kl_to_sampler``: :class:`~torchrl_llm_kl.losses.KLToSampler`."""


@_node("term", "entropy_bonus", EntropyBonus)
class EntropyBonusConfig(_Node):
    """``term=entropy_bonus``: :class:`~torchrl_llm_kl.losses.EntropyBonus`."""


@_node("sampling", "base", torchrl_llm_kl.Sampling)
class SamplingConfig(_Node):
    """``sampling=base``: :class:`~torchrl_llm_kl.Sampling`, of transforms and losses alike."""


@_node("algorithm", "base", torchrl_llm_kl.make_algorithm, "overrides")
class AlgorithmConfig(_Node):
    """``algorithm=base``: :func:`~torchrl_llm_kl.make_algorithm`; ``overrides`` has the changes of the preset."""


# ------------------------------------------------------------------ coefficients


@_node("coefficient", "fixed", torchrl_llm_kl.FixedKLCoefficient)
class FixedKLCoefficientConfig(_Node):
    """``coefficient=fixed``: :class:`~torchrl_llm_kl.FixedKLCoefficient`."""


@_node("coefficient", "adaptive", torchrl_llm_kl.AdaptiveKLCoefficient)
class AdaptiveKLCoefficientConfig(_Node):
    """``coefficient=adaptive``: :class:`~torchrl_llm_kl.AdaptiveKLCoefficient`."""


@_node("coefficient", "pi", torchrl_llm_kl.PIKLCoefficient)
class PIKLCoefficientConfig(_Node):
    """``coefficient=pi``: :class:`~torchrl_llm_kl.PIKLCoefficient`."""


@_node("coefficient", "dual", torchrl_llm_kl.DualKLCoefficient)
class DualKLCoefficientConfig(_Node):
    """``coefficient=dual``: :class:`~torchrl_llm_kl.DualKLCoefficient`."""


@_node("coefficient", "adaptive_entropy", torchrl_llm_kl.AdaptiveEntropyCoefficient)
class AdaptiveEntropyCoefficientConfig(_Node):
    """``coefficient=adaptive_entropy``: :class:`~torchrl_llm_kl.AdaptiveEntropyCoefficient`, of an entropy bonus."""
