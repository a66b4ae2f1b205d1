"""What makes a function an advantage: checked and cleaned inputs, names of other libraries, a place in the registry."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

from torch import Tensor

from torchrl_llm_kl.advantages._hyper import translate
from torchrl_llm_kl.advantages._inputs import clean_rows, clean_tokens
from torchrl_llm_kl.advantages._spec import INPUTS, AdvantageSpec, Kind

__all__ = [
    "UnknownAdvantageError",
    "advantage",
    "advantage_spec",
    "available_advantages",
    "get_advantage",
]

P = ParamSpec("P")
R = TypeVar("R")

#: Names of whole advantages in Trinity-RFT that differ from those here.
_OTHER_NAMES = {"ppo": "gae", "reinforceplusplus": "reinforce_plus_plus", "multi_step_grpo": "step_wise_grpo"}

_REGISTRY: dict[str, Callable[..., Any]] = {}


class UnknownAdvantageError(ValueError):
    """The name is not registered; the message lists those that are."""


def advantage(
    name: str,
    kind: Kind,
    *,
    outputs: tuple[str, ...] = ("advantage",),
    optional: Mapping[str, str] | None = None,
    aliases: Mapping[str, str] | None = None,
    obsolete: Mapping[str, str] | None = None,
    refused: Mapping[str, tuple[Any, str]] | None = None,
    source: str,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Turn pure maths into a registered advantage.

    The function below the decorator sees clean inputs: amounts are float32 or wider and without graph (an advantage is a
    weight, never something to differentiate), equal in shape, and for tokens exactly 0 where the mask is False; identities
    are int64; what it needs is there. See :class:`AdvantageSpec` for the arguments.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters
        inputs = [key for key in parameters if key in INPUTS]
        spec = AdvantageSpec(
            name,
            kind,
            needs=tuple(key for key in inputs if parameters[key].default is inspect.Parameter.empty),
            optional=dict(optional or {}),
            outputs=outputs,
            hyper=tuple(key for key in parameters if key not in INPUTS),
            aliases=dict(aliases or {}),
            obsolete=dict(obsolete or {}),
            refused=dict(refused or {}),
            source=source,
        )

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> R:
            given = _named(spec, args, kwargs)
            hyper = translate(spec, {key: value for key, value in given.items() if key not in inputs})
            tensors = {key: given[key] for key in inputs if given.get(key) is not None}
            for key in spec.needs:
                if key not in tensors:
                    raise ValueError(f"{name} needs {key}: pass {key}=, {'[*B, T]' if kind == 'token' else '[B]'}")
            clean = clean_tokens(tensors) if kind == "token" else clean_rows(tensors)
            return cast("Callable[..., R]", function)(**clean, **hyper)

        call.spec = spec  # type: ignore[attr-defined]
        if name in _REGISTRY:
            raise ValueError(f"there is an advantage {name!r} already")
        _REGISTRY[name] = call
        return cast("Callable[P, R]", call)

    return decorate


def _named(spec: AdvantageSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    if len(args) > len(spec.needs):
        raise TypeError(
            f"{spec.name} takes {len(spec.needs)} positional arguments, {', '.join(spec.needs)}: got {len(args)}"
        )
    for key in spec.needs[: len(args)]:
        if key in kwargs:
            raise TypeError(f"{spec.name} got {key!r} twice")
    return {**dict(zip(spec.needs, args, strict=False)), **kwargs}


def advantage_spec(function: Callable[..., Any]) -> AdvantageSpec:
    """What is known of an advantage.

    Raises:
        TypeError: if the function is not a registered advantage.
    """
    spec = getattr(function, "spec", None)
    if not isinstance(spec, AdvantageSpec):
        raise TypeError(f"expected an advantage of this package, such as get_advantage('grpo'), got {function!r}")
    return spec


def available_advantages() -> tuple[str, ...]:
    """The name of every advantage. :func:`get_advantage` knows some by Trinity-RFT's name too."""
    return tuple(sorted(_REGISTRY))


def get_advantage(name: str) -> Callable[..., Tensor | tuple[Tensor, Tensor]]:
    """Look an advantage up by name.

    Args:
        name: one of :func:`available_advantages`, or Trinity-RFT's ``ppo`` (``gae``), ``reinforceplusplus``,
            ``multi_step_grpo`` (``step_wise_grpo``).

    Returns:
        The function itself: two look-ups give the same object, and it can be pickled.

    Raises:
        UnknownAdvantageError: a ``ValueError``; lists the names and the nearest one.

    Example:
        >>> from torchrl_llm_kl.advantages import gae, get_advantage
        >>> get_advantage("gae") is get_advantage("ppo") is gae
        True
    """
    own = _OTHER_NAMES.get(name, name)
    if own in _REGISTRY:
        return _REGISTRY[own]
    near = difflib.get_close_matches(str(name), [*_REGISTRY, *_OTHER_NAMES], n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise UnknownAdvantageError(f"unknown advantage {name!r}; known: {', '.join(available_advantages())}.{hint}")
