"""What makes a function an objective: checked and cleaned inputs, names of other libraries, a place in the registry."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, ParamSpec, cast

from torch import Tensor

from torchrl_llm_kl._numerics import check_same_shape
from torchrl_llm_kl.losses._numerics import clean
from torchrl_llm_kl.losses._term import LossTerm, check_is_mask

__all__ = [
    "PER_ROW",
    "PER_TOKEN",
    "ObjectiveSpec",
    "UnknownObjectiveError",
    "available_objectives",
    "get_objective",
    "objective",
    "spec_of",
    "term",
    "translate",
]

P = ParamSpec("P")
Terms = tuple[LossTerm, ...]

#: Inputs of one number per token, beside ``log_prob`` and ``mask``. Everything else is a hyper-parameter.
PER_TOKEN = (
    "old_log_prob",
    "ref_log_prob",
    "advantage",
    "expert_mask",
    "sampler_log_prob",
    "entropy",
    "selected",
    "kl",
)
#: Inputs of one value per sequence, of the shape of ``mask`` without its last dimension.
PER_ROW = ("pair_id", "chosen")
# Every objective accepts these, whether it reads them or not: they can be called alike.
_CONTRACT = frozenset(PER_TOKEN[:4])
_BOOLEAN = frozenset({"expert_mask", "selected", "chosen"})
_INPUTS = frozenset({"log_prob", "mask", *PER_TOKEN, *PER_ROW})


@dataclass(frozen=True)
class ObjectiveSpec:
    """What is known of an objective beside its function.

    Args:
        name: in the registry.
        needs: per-token inputs without which it cannot be calculated.
        aggregation: how its source sums it over tokens.
        aliases: other names of hyper-parameters: each stands for one of the function's own, or for several at once.
        obsolete: hyper-parameters of other libraries that nothing needs here, with the reason.
        source: where the formula comes from.
        per_row: inputs that it reads beside those per token; ``[*B]``.
    """

    name: str
    needs: tuple[str, ...]
    aggregation: str
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    obsolete: Mapping[str, str] = field(default_factory=dict)
    source: str = ""
    per_row: tuple[str, ...] = ()


_REGISTRY: dict[str, Callable[..., Terms]] = {}


class UnknownObjectiveError(ValueError):
    """The name is not registered; the message lists those that are."""


def objective(
    name: str,
    *,
    needs: Sequence[str] = (),
    aggregation: str = "token-mean",
    aliases: Mapping[str, str | Sequence[str]] | None = None,
    obsolete: Mapping[str, str] | None = None,
    source: str,
) -> Callable[[Callable[P, Terms]], Callable[P, Terms]]:
    """Turn pure maths into a registered objective.

    The function below the decorator sees clean inputs: all per-token tensors have the shape of the mask, floating-point ones
    are float32 or wider and exactly 0 where the mask is False, ``mask``, ``expert_mask`` and ``selected`` are boolean, and
    what it needs is there. So it holds the formula and nothing else, and NaN behind the mask reaches neither a sum nor a
    gradient.

    Args:
        name: in the registry.

    Keyword Args:
        needs: see :class:`ObjectiveSpec`; what is needed only for some hyper-parameters is checked by the function.
        aggregation: see :class:`ObjectiveSpec`.
        aliases: see :class:`ObjectiveSpec`.
        obsolete: see :class:`ObjectiveSpec`.
        source: see :class:`ObjectiveSpec`.
    """
    spec = ObjectiveSpec(
        name,
        tuple(needs),
        aggregation,
        {other: (own,) if isinstance(own, str) else tuple(own) for other, own in (aliases or {}).items()},
        dict(obsolete or {}),
        source,
    )

    def decorate(function: Callable[P, Terms]) -> Callable[P, Terms]:
        if name in _REGISTRY:
            raise ValueError(f"there is an objective {name!r} already")
        _REGISTRY[name] = call = _checked(spec, function)
        return cast("Callable[P, Terms]", call)

    return decorate


def term(name: str, *, needs: Sequence[str] = (), source: str) -> Callable[[Callable[P, Terms]], Callable[P, Terms]]:
    """The same for what is added to an objective: a penalty, a bonus. It is in no registry."""
    spec = ObjectiveSpec(name, tuple(needs), "token-mean", source=source)
    return lambda function: cast("Callable[P, Terms]", _checked(spec, function))


def _checked(spec: ObjectiveSpec, function: Callable[..., Terms]) -> Callable[..., Terms]:
    own = tuple(inspect.signature(function).parameters)
    spec = replace(spec, per_row=tuple(key for key in PER_ROW if key in own))

    @wraps(function)
    def call(log_prob: Tensor, mask: Tensor, **inputs: Any) -> Terms:
        hyper = translate(spec, own, {key: value for key, value in inputs.items() if key not in _INPUTS})
        tensors = {key: inputs[key] for key in PER_TOKEN if inputs.get(key) is not None}
        rows = {key: inputs[key] for key in PER_ROW if inputs.get(key) is not None}
        check_same_shape(mask=mask, log_prob=log_prob, **tensors)
        check_is_mask(mask=mask, **{key: value for key, value in (tensors | rows).items() if key in _BOOLEAN})
        for key, value in rows.items():
            if value.shape != mask.shape[:-1]:
                expected = f"one value per sequence, {tuple(mask.shape[:-1])}"
                raise ValueError(f"{spec.name}: {key} has shape {tuple(value.shape)}, expected {expected}")
        for key in spec.needs:
            if key not in tensors:
                raise ValueError(f"{spec.name} needs {key}: pass {key}=, of the shape of log_prob")
        for key in (tensors | rows).keys() - _CONTRACT - set(own):
            raise TypeError(f"{spec.name} has no input {key!r}; it has {', '.join(own)}")
        cleaned = {key: clean(tensor, mask) for key, tensor in tensors.items() if key in own}
        return function(clean(log_prob, mask), mask, **cleaned, **rows, **hyper)

    call.spec = spec  # type: ignore[attr-defined]
    return call


def translate(spec: ObjectiveSpec, own: Sequence[str], hyper: Mapping[str, Any]) -> dict[str, Any]:
    """Hyper-parameters under the function's own names.

    Raises:
        TypeError: if there is no such hyper-parameter, or one is given under two names.
    """
    given: dict[str, Any] = {}
    # A bound for one side wins over one for both.
    for key in sorted(hyper, key=lambda key: -len(spec.aliases.get(key, (key,)))):
        if key in spec.obsolete:
            warnings.warn(f"{spec.name}: {key} has no effect here: {spec.obsolete[key]}", stacklevel=4)
            continue
        targets = spec.aliases.get(key, (key,))
        for target in targets:
            if target not in own or target in _INPUTS:
                raise TypeError(_unknown(spec, own, key))
            if target in given and len(targets) == 1 and not _covered(spec, hyper, key, target):
                raise TypeError(f"{spec.name}: {key!r} and {target!r} are the same hyper-parameter: pass one of them")
            if hyper[key] is not None or len(targets) == 1:
                given[target] = hyper[key]
    return given


def _covered(spec: ObjectiveSpec, hyper: Mapping[str, Any], key: str, target: str) -> bool:
    """Whether ``target`` was set so far only by names that stand for several hyper-parameters."""
    others = [other for other in hyper if other != key and target in spec.aliases.get(other, (other,))]
    return all(len(spec.aliases.get(other, (other,))) > 1 for other in others)


def _unknown(spec: ObjectiveSpec, own: Sequence[str], key: str) -> str:
    known = [name for name in own if name not in _INPUTS]
    near = difflib.get_close_matches(key, [*known, *spec.aliases], n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    also = f" (or {', '.join(spec.aliases)})" if spec.aliases else ""
    return f"{spec.name} has no hyper-parameter {key!r}; it has {', '.join(known) or 'none'}{also}.{hint}"


def spec_of(function: Callable[..., Terms]) -> ObjectiveSpec | None:
    """What is known of an objective; None for a function that was not registered."""
    return getattr(function, "spec", None)


def available_objectives() -> tuple[str, ...]:
    """Every name that :func:`get_objective` accepts."""
    _load()
    return tuple(sorted(_REGISTRY))


def get_objective(name: str) -> Callable[..., Terms]:
    """Look an objective up by name.

    Objectives are called as ``(log_prob, mask, *, old_log_prob=None, ref_log_prob=None, advantage=None, expert_mask=None,
    **hyper)`` on tensors of one shape ``[*B, T]`` and return a tuple of :class:`~torchrl_llm_kl.losses.LossTerm`.

    Args:
        name: one of :func:`available_objectives`.

    Returns:
        The function itself: two look-ups give the same object, and it can be pickled.

    Raises:
        UnknownObjectiveError: a ``ValueError``; lists the names and the nearest one.

    Example:
        >>> from torchrl_llm_kl.losses import ppo
        >>> get_objective("ppo") is ppo
        True
    """
    _load()
    if name in _REGISTRY:
        return _REGISTRY[name]
    near = difflib.get_close_matches(str(name), _REGISTRY, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise UnknownObjectiveError(f"unknown objective {name!r}; known: {', '.join(sorted(_REGISTRY))}.{hint}")


def _load() -> None:
    from torchrl_llm_kl.losses import objectives  # noqa: F401  (registers them)
