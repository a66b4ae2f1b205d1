"""The registry of advantages: the decorator that registers one and cleans its inputs, the spec, and the typed names."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
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

#: Inputs that group or order rows: integers.
_IDENTITIES = ("group", "run", "step", "state", "role")
#: Parameters that hold data. All others are hyper-parameters.
INPUTS = (
    *_IDENTITIES, "reward", "rewards", "length", "baseline", "mean_log_prob", "value", "old_log_prob", "teacher_log_prob",
    "entropy", "collision", "discriminator", "mask",
)  # fmt: skip


@dataclass(frozen=True)
class AdvantageSpec(Spec):
    """The inputs, outputs and hyper-parameters of an advantage.

    Args:
        name, hyper, only_with, source, types, defaults: see :class:`~torchrl_llm_kl._registry.Spec`.
        needs: inputs that it always requires.
        kind: ``"outcome"``: one number per sequence, ``[B]``; ``"token"``: one per token, ``[*B, T]`` with a mask;
            ``"trajectory"``: one per step of trajectories of several sequences, ``[B]``.
        per_sequence: inputs of an advantage of tokens that hold one number per sequence, ``[*B]``.
        optional: inputs that only a hyper-parameter requires: input -> hyper-parameter.
        outputs: names of the results; the function returns a tuple if there are several.
        kept: an input, equal for the rows of a ``role``, that the transform keeps from batch to batch: the function returns
            its next value last.
    """

    needs: tuple[str, ...] = ()
    kind: Kind = "outcome"
    per_sequence: tuple[str, ...] = ()
    optional: Mapping[str, str] = field(default_factory=dict)
    outputs: tuple[str, ...] = ("advantage",)
    kept: str | None = None


# ------------------------------------------------------------------ the registry


class UnknownAdvantageError(UnknownNameError):
    """Unknown advantage; the message lists the registered names and suggests the nearest one."""


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
    """Turn a pure function into a registered advantage; see :class:`AdvantageSpec` for the arguments.

    The decorated function receives clean inputs: all required ones, of equal shapes. Amounts are float32 or wider, without
    graph (an advantage is a weight and never differentiated), and for tokens exactly 0 where the mask is False. Identities
    are int64. A hyper-parameter that is annotated with a ``Literal`` has one of its values. The docstring ends
    with a paragraph ``Source: ...``.

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
            given = signature.bind_partial(*args, **{key: value for key, value in kwargs.items() if key in inputs})
            tensors: dict[str, Tensor] = {key: x for key, x in given.arguments.items() if x is not None}
            for key in spec.needs:
                if key not in tensors:
                    raise ValueError(f"{name} needs {key}: pass {key}=, {_shape_of(key, spec)}.")
            clean = clean_tokens(tensors, per_sequence) if kind == "token" else clean_rows(tensors)
            return cast("Callable[..., R]", function)(**clean, **hyper)

        call.spec = spec  # type: ignore[attr-defined]
        return cast("Callable[P, R]", _REGISTRY.add(name, call))

    return decorate


def _shape_of(key: str, spec: AdvantageSpec) -> str:
    if spec.kind == "token":
        return "[*B]" if key in spec.per_sequence else "[*B, T]"
    return "[B, R]" if key == "rewards" else "[B]"


def advantage_spec(function: Callable[..., object] | AdvantageName) -> AdvantageSpec:
    """The spec of a registered advantage, or of the advantage of a name.

    Raises:
        TypeError: if the function is not a registered advantage.

    Example:
        >>> from torchrl_llm_kl.advantages import gae
        >>> advantage_spec(gae).needs == advantage_spec("gae").needs == ("reward", "value", "mask")
        True
    """
    if isinstance(function, str):
        function = get_advantage(function)
    spec = getattr(function, "spec", None)
    if not isinstance(spec, AdvantageSpec):
        raise TypeError(f"expected an advantage of this package, such as get_advantage('grpo'), got {function!r}.")
    return spec


def check_hyperparameters(function: Callable[..., object], inputs: Sequence[str], hyper: Mapping[str, Any]) -> None:
    """Compute an advantage of this package for four rows, so that it raises here for a value that it refuses.

    Args:
        function: a registered advantage; one of a user's own may need other data, and is not called.
        inputs: those that it reads.
        hyper: its hyper-parameters. A generator draws nothing here.
    """
    if not function.__module__.startswith("torchrl_llm_kl.") or not hyper:
        return
    settings = dict(hyper)
    for name, value in hyper.items():
        if isinstance(value, torch.Generator):
            settings[name] = torch.Generator()
        elif isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() == 1:  # no host sync
            settings[name] = value.item()
    spec, row = advantage_spec(function), torch.arange(4)
    identities = {"group": row // 4, "run": row // 2, "step": row % 2, "state": row % 2, "role": row}
    weights = hyper.get("reward_weights")
    several = {"rewards": (4, len(weights) if isinstance(weights, Sequence) else 2)}
    data: dict[str, Tensor] = {}
    for name in inputs:
        shape = several.get(name, (4, 2) if spec.kind == "token" and name not in spec.per_sequence else (4,))
        data[name] = torch.linspace(-1.0, 0.0, math.prod(shape)).reshape(shape)
    data |= {name: identities[name] for name in identities if name in inputs}
    if "mask" in inputs:
        data["mask"] = torch.ones(4, 2, dtype=torch.bool)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            function(**data, **settings)
        except TypeError as error:
            raise TypeError(f"{spec.name} refuses {dict(hyper)!r:.100}: {error}") from error


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
        The function itself, always the same object; it can be pickled.

    Raises:
        UnknownAdvantageError: a ``ValueError``; lists the names and suggests the nearest one.

    Example:
        >>> get_advantage("rloo")(torch.tensor([0.0, 1.0]), torch.tensor([5, 5]))
        tensor([-1.,  1.])
    """
    return _REGISTRY[name]


# ------------------------------------------------------------------ clean inputs


def clean_rows(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Check one number per sequence, ``[B]``; amounts in float32 or wider without graph, identities in int64.

    ``rewards`` holds several, ``[B, R]``.
    """
    for name, tensor in tensors.items():
        if name == "rewards" and (tensor.ndim != 2 or tensor.shape[1] == 0):
            raise ValueError(f"rewards must be [B, R], R rewards per sequence, got shape {tuple(tensor.shape)}.")
        if name != "rewards" and tensor.ndim != 1:
            raise ValueError(f"{name} must be [B], one number per sequence, got shape {tuple(tensor.shape)}.")
    check_same_shape(**{name: x[:, 0] if name == "rewards" else x for name, x in tensors.items()})
    return {name: _clean_input(name, x) for name, x in tensors.items()}


def clean_tokens(tensors: dict[str, Tensor], per_sequence: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Check one number per token, ``[*B, T]``; float32 or wider without graph, exactly 0 where the mask is False.

    Inputs ``per_sequence`` are ``[*B]``.
    """
    mask = tensors["mask"]
    check_same_shape(**{"mask": mask, **{name: x for name, x in tensors.items() if name not in per_sequence}})
    for name in per_sequence:
        if tensors[name].shape != mask.shape[:-1]:
            raise ValueError(
                f"{name} must have one number per sequence, {tuple(mask.shape[:-1])}, got shape {tuple(tensors[name].shape)}."
            )
    check_is_mask(mask=mask)
    clean = {name: x if x is mask else _clean_input(name, x) for name, x in tensors.items()}
    return {name: x if x is mask or name in per_sequence else torch.where(mask, x, 0) for name, x in clean.items()}


def _clean_input(name: str, x: Tensor) -> Tensor:
    if name not in _IDENTITIES:
        return widen(x.detach())[0]
    if x.dtype == torch.bool or x.is_floating_point() or x.is_complex():
        raise TypeError(f"{name} must be of an integer dtype, got {x.dtype}: equal numbers belong together.")
    return x.long()
