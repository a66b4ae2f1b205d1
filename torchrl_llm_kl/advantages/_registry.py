"""The registry of advantages, and the decorator that registers a function and cleans its inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import check_is_mask, check_same_shape, widen
from torchrl_llm_kl._registry import Registry, Spec, UnknownNameError

if TYPE_CHECKING:
    from torchrl_llm_kl.advantages import AdvantageName

P = ParamSpec("P")
R = TypeVar("R")

# ------------------------------------------------------------------ the spec

Kind = Literal["outcome", "token", "trajectory"]

#: Inputs that identify or order rows. They are integers.
_IDENTITIES = ("group", "run", "step", "state", "role")
#: Parameters that hold data. All other parameters are hyper-parameters.
INPUTS = (
    *_IDENTITIES, "reward", "rewards", "length", "baseline", "mean_log_prob", "value", "old_log_prob", "teacher_log_prob",
    "base_log_prob", "entropy", "collision", "discriminator", "mask",
)  # fmt: skip


@dataclass(frozen=True)
class AdvantageSpec(Spec):
    """The inputs, outputs and hyper-parameters of an advantage.

    Args:
        name, hyper, only_with, source, types, defaults: see :class:`~torchrl_llm_kl._registry.Spec`.
        needs: the inputs that are always required.
        kind: ``"outcome"`` for one number per sequence, ``[B]``. ``"token"`` for one per token, ``[*B, T]``, with a mask.
            ``"trajectory"`` for one number per step of trajectories of several sequences, ``[B]``.
        per_sequence: for ``"token"``, the inputs that hold one number per sequence, ``[*B]``.
        optional: input -> the hyper-parameter that requires it.
        outputs: names of the results. The function returns a tuple if there are several.
        kept: an input that the transform keeps from batch to batch, one number for each ``role``. The function returns its next
            value as the last result.
    """

    needs: tuple[str, ...] = ()
    kind: Kind = "outcome"
    per_sequence: tuple[str, ...] = ()
    optional: Mapping[str, str] = field(default_factory=dict)
    outputs: tuple[str, ...] = ("advantage",)
    kept: str | None = None


# ------------------------------------------------------------------ the registry


class UnknownAdvantageError(UnknownNameError):
    """Unknown advantage. The message lists the registered names and suggests the nearest one."""


_REGISTRY = Registry[Callable[..., Any]]("advantage", error=UnknownAdvantageError)


def advantage(
    name: str,
    kind: Kind,
    *,
    outputs: tuple[str, ...] = ("advantage",),
    kept: str | None = None,
    per_sequence: tuple[str, ...] = (),
    optional: Mapping[str, str] | None = None,
    only_with: Mapping[str, tuple[str, tuple[object, ...]]] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register a pure function as an advantage. :class:`AdvantageSpec` explains the arguments.

    The decorated function receives all required inputs with equal shapes. Amounts are float32 or wider and have no graph, since
    an advantage is a weight and never differentiated. Amounts of tokens are exactly 0 where the mask is False. Identities are
    int64. Hyper-parameters are checked against their ``Literal`` or their range. The docstring must end with a paragraph
    ``Source: ...``.

    Example:
        >>> @advantage("reinforce", "outcome")
        ... def reinforce(reward: Tensor) -> Tensor:
        ...     return reward.clone()
        Traceback (most recent call last):
        ...
        ValueError: the advantage 'reinforce' is registered already: choose another name.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        inputs = [key for key in signature.parameters if key in INPUTS]
        spec = AdvantageSpec(
            name,
            needs=tuple(key for key in inputs if signature.parameters[key].default is inspect.Parameter.empty),
            only_with=only_with or {},
            kind=kind,
            per_sequence=per_sequence,
            optional=optional or {},
            outputs=outputs,
            kept=kept,
        ).reading(function, inputs)

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> R:
            hyper = {key: value for key, value in kwargs.items() if key not in inputs}
            spec.check(hyper)
            spec.check_used(hyper)
            given = signature.bind(*args, **{key: value for key, value in kwargs.items() if key in inputs})
            tensors: dict[str, Tensor] = {key: x for key, x in given.arguments.items() if x is not None}
            clean = clean_tokens(tensors, per_sequence) if kind == "token" else clean_rows(tensors)
            return cast("Callable[..., R]", function)(**clean, **hyper)

        call.spec = spec  # type: ignore[attr-defined]
        return cast("Callable[P, R]", _REGISTRY.add(name, call))

    return decorate


def advantage_spec(function: Callable[..., object] | AdvantageName) -> AdvantageSpec:
    """Return the spec of a registered advantage, by the function or its name.

    Raises:
        TypeError: if the function is not a registered advantage.

    Example:
        >>> from torchrl_llm_kl.advantages import gae
        >>> advantage_spec(gae).needs == advantage_spec("gae").needs == ("reward", "value", "mask")
        True
    """
    function = get_advantage(function) if isinstance(function, str) else function
    spec = getattr(function, "spec", None)
    if not isinstance(spec, AdvantageSpec):
        raise TypeError(f"expected a registered advantage, such as get_advantage('grpo'), got {function!r}.")
    return spec


def available_advantages() -> tuple[str, ...]:
    """The names of all advantages, sorted.

    Example:
        >>> available_advantages()[:3]
        ('asymre', 'best_of_group', 'clip_b')
    """
    return tuple(sorted(_REGISTRY))


def get_advantage(name: AdvantageName) -> Callable[..., Tensor | tuple[Tensor, Tensor]]:
    """Look an advantage up by name, one of :func:`available_advantages`.

    Returns:
        The function. It can be pickled.

    Raises:
        UnknownAdvantageError: a ``ValueError`` that lists the names and suggests the nearest one.

    Example:
        >>> get_advantage("rloo")(torch.tensor([0.0, 1.0]), torch.tensor([5, 5]))
        tensor([-1.,  1.])
    """
    return _REGISTRY[name]


# ------------------------------------------------------------------ clean inputs


def clean_rows(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Check inputs with one number per sequence, ``[B]``, or several for ``rewards``, ``[B, R]``.

    Returns amounts in float32 or wider without graph, and identities in int64.
    """
    for name, tensor in tensors.items():
        if tensor.ndim != (2 if name == "rewards" else 1):
            shape = "[B, R], several numbers" if name == "rewards" else "[B], one number"
            raise ValueError(f"{name} must be {shape} per sequence, got shape {tuple(tensor.shape)}.")
    check_same_shape(**{name: x[:, 0] if name == "rewards" else x for name, x in tensors.items()})
    return {name: _clean_input(name, x) for name, x in tensors.items()}


def clean_tokens(tensors: dict[str, Tensor], per_sequence: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Check inputs with one number per token, ``[*B, T]``. Those of ``per_sequence`` are ``[*B]``.

    Returns amounts in float32 or wider without graph, exactly 0 where the mask is False, and identities in int64.
    """
    mask = tensors["mask"]
    check_same_shape(**{"mask": mask, **{name: x for name, x in tensors.items() if name not in per_sequence}})
    for name in per_sequence:
        if tensors[name].shape != mask.shape[:-1]:
            raise ValueError(f"{name} must be [*B] for a mask [*B, T], got {tensors[name].shape} for {mask.shape}.")
    check_is_mask(mask=mask)
    clean = {name: x if x is mask else _clean_input(name, x) for name, x in tensors.items()}
    return {name: x if x is mask or name in per_sequence else torch.where(mask, x, 0) for name, x in clean.items()}


def _clean_input(name: str, x: Tensor) -> Tensor:
    if name not in _IDENTITIES:
        return widen(x.detach())[0]
    if x.dtype == torch.bool or x.is_floating_point() or x.is_complex():
        raise TypeError(f"{name} must be of an integer dtype, got {x.dtype}: equal numbers belong together.")
    return x.long()
