"""Argument checks and masked arithmetic that every layer shares.

Shapes: ``[*B, T]`` is one number per token, with any batch dimensions ``*B`` before the ``T`` tokens.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional

from torchrl_llm_kl._registry import Range, did_you_mean

#: A hyper-parameter: a number, or a 0-dim tensor that a schedule changes in place.
Scalar = float | Tensor
#: Hyper-parameters in a range, which the decorators of registered functions check; ``Number``: not NaN.
Number = Annotated[Scalar, Range()]
NonNegative = Annotated[Scalar, Range(0.0)]
NonPositive = Annotated[Scalar, Range(high=0.0)]
Positive = Annotated[Scalar, Range(above=0.0)]
Share = Annotated[Scalar, Range(0.0, 1.0)]
PositiveShare = Annotated[Scalar, Range(high=1.0, above=0.0)]
AboveOne = Annotated[Scalar, Range(above=1.0)]
#: The same for numbers alone.
Amount = Annotated[float, Range(0.0)]
PositiveAmount = Annotated[float, Range(above=0.0)]
Fraction = Annotated[float, Range(0.0, 1.0)]
InnerShare = Annotated[float, Range(above=0.0, below=1.0)]

# ------------------------------------------------------------------ checks


def check_same_shape(**named_tensors: Tensor | None) -> None:
    """Raise a ValueError with both shapes unless every given tensor has the shape of the first; None is skipped.

    Broadcasting ``[B, T]`` against ``[B, 1]`` would silently produce a wrong number, so nothing here broadcasts.

    Example:
        >>> import torch
        >>> check_same_shape(log_prob=torch.zeros(2, 3), ref_log_prob=torch.zeros(2, 1))
        Traceback (most recent call last):
        ...
        ValueError: log_prob has shape (2, 3) but ref_log_prob has shape (2, 1); they must be equal.
    """
    given = [(name, tuple(tensor.shape)) for name, tensor in named_tensors.items() if tensor is not None]
    for name, shape in given[1:]:
        first, expected = given[0]
        if shape != expected:
            raise ValueError(f"{first} has shape {expected} but {name} has shape {shape}; they must be equal.")


def check_is_mask(**named: Tensor | None) -> None:
    """Raise a TypeError for the first given tensor that is not boolean."""
    for name, tensor in named.items():
        if tensor is not None and tensor.dtype != torch.bool:
            raise TypeError(f"{name} must be boolean, got {tensor.dtype}: pass {name}.bool().")


def check_is_number(**named: Tensor | None) -> None:
    """Raise a TypeError for the first given tensor that is boolean."""
    for name, tensor in named.items():
        if tensor is not None and tensor.dtype == torch.bool:
            raise TypeError(f"{name} must hold numbers, got a boolean tensor: pass {name}.float().")


def check_is_scalar(**named: object) -> None:
    """Raise a ValueError for the first tensor that is not 0-dim, which would broadcast over tokens; others pass."""
    for name, value in named.items():
        if isinstance(value, Tensor) and value.ndim:
            raise ValueError(
                f"{name} must be one number, got a tensor of shape {tuple(value.shape)}: pass a 0-dim tensor."
            )


def check_range(low: float = -math.inf, high: float = math.inf, *, above: float = -math.inf, **named: object) -> None:
    """Raise a ValueError unless each named number lies in ``[low, high]`` and is greater than ``above``; see :class:`Range`."""
    for name, value in named.items():
        Range(low, high, above).check(name, value)


#: Types that models compute in; torch has others, of 8 bits and fewer, for storage.
FLOAT_TYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
}
#: The smallest temperature: logits over a smaller one overflow float32.
COLDEST = 1e-6


def check_temperature(temperature: float) -> None:
    """Raise a ValueError for a temperature that is not a finite number of at least :data:`COLDEST`."""
    if not 0 < temperature < math.inf:  # no function of math: torch.compile traces this
        raise ValueError(f"temperature must be a positive number, got {temperature}: greedy sampling has no log-prob.")
    if temperature < COLDEST:
        raise ValueError(f"temperature must be at least {COLDEST:g}, got {temperature}: the logits would overflow.")


def check_choice(choices: Collection[object], **named: object) -> None:
    """Raise a ValueError unless each named value is one of ``choices``."""
    for name, value in named.items():
        if value not in choices:
            hint = did_you_mean(value, map(str, choices)) if isinstance(value, str) else ""
            raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.{hint}")


def check_not_a_name(*allowed: str, **named: object) -> None:
    """Raise an error that says how to load the model, for the first string where one is expected; ``allowed`` ones pass."""
    for name, value in named.items():
        if isinstance(value, str) and value not in allowed:
            kinds = " or ".join(["a model", *map(repr, allowed)])
            raise (ValueError if allowed else TypeError)(
                f"{name} must be {kinds}, got {value!r}: load it first, AutoModelForCausalLM.from_pretrained({value!r})."
            )


def read_device(device: torch.device | str | int, name: str = "device") -> torch.device:
    """The device that an argument names.

    Raises:
        ValueError: if it names none, or one that this process does not have; the message lists those that it has.

    Example:
        >>> read_device("cpu")
        device(type='cpu')
    """
    try:
        named = torch.device(device)
        if (named.index or 0) < torch.get_device_module(named).device_count():  # it does not start the device
            return named
    except (RuntimeError, TypeError):  # unknown to torch, without an accelerator, or meta
        pass
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    count = 0 if accelerator is None else torch.accelerator.device_count()
    present = ", ".join(["cpu", *(f"{accelerator}:{i}" for i in range(count))])
    shown = repr(device if isinstance(device, int) else str(device))
    have = f"process (torch {torch.__version__}), which has {present}"
    raise ValueError(f"{name}={shown} is not a device of this {have}: pass one of these.")


def all_finite(*tensors: Tensor) -> bool:
    """Whether every number is finite; one host synchronisation for all tensors if so."""
    return math.isfinite(finite_total(*tensors)) or all(bool(x.isfinite().all()) for x in tensors)


def finite_total(*tensors: Tensor) -> Tensor:
    """A sum in float32, which is finite unless a number is not, or it overflows: one cheap pass; 0-dim."""
    sums = [x.sum(dtype=torch.float32) for x in tensors]
    return functools.reduce(torch.add, sums) if sums else torch.zeros(())


class NotFiniteError(ValueError):
    """A number is NaN or infinite; raised by :func:`check_finite`."""


def check_finite(
    named: Mapping[str, Tensor], *, read: Tensor | None = None, place: Callable[[int], str], advice: str
) -> None:
    """Raise a :class:`NotFiniteError` that names the first NaN or infinite number; one host synchronisation if all are finite.

    Args:
        named: tensors of one shape; the keys name them in the message.

    Keyword Args:
        read: bool, same shape: True where a number is used; others may be anything. None: everywhere.
        place: describes a flat index, such as ``"sequence 2, position 7"``.
        advice: how to fix it, as a sentence.

    Example:
        >>> import torch
        >>> check_finite({"the reward": torch.tensor([0.0, torch.nan])}, place="row {}".format, advice="Drop the row.")
        Traceback (most recent call last):
        ...
        torchrl_llm_kl._numerics.NotFiniteError: the reward is nan at row 1: expected a finite number. Drop the row.
    """
    if not named:
        return
    used = {name: x.detach() if read is None else torch.where(read, x.detach(), 0) for name, x in named.items()}
    if all_finite(*used.values()):
        return
    for name, value in used.items():
        bad = ~value.isfinite().reshape(-1)
        if bool(bad.any()):
            at = int(bad.nonzero()[0])
            number = float(value.reshape(-1)[at])
            raise NotFiniteError(f"{name} is {number} at {place(at)}: expected a finite number. {advice}")


# ------------------------------------------------------------------ between the host and an accelerator


def to_host(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors on the CPU, without graph; all that are elsewhere come in one copy, a single host synchronisation.

    Example:
        >>> import torch
        >>> to_host(torch.tensor([1, 2]), torch.tensor([True]))
        (tensor([1, 2]), tensor([True]))
    """
    out = [tensor.detach() for tensor in tensors]
    # The widest first: each then begins at a multiple of its width.
    away = sorted((i for i, x in enumerate(out) if x.device.type != "cpu"), key=lambda i: -out[i].element_size())
    if len(away) < 2 or len({out[i].device for i in away}) > 1:
        return tuple(x.cpu() for x in out)
    raw = torch.cat([out[i].reshape(-1).view(torch.uint8) for i in away]).cpu()
    for i, some in zip(away, raw.split([out[i].nbytes for i in away]), strict=True):
        out[i] = some.view(out[i].dtype).view(out[i].shape)
    return tuple(out)


def send(data: Tensor, device: torch.device) -> Tensor:
    """Asynchronous host-to-device copy; a tensor that is on a device already is moved if it is on another one."""
    if data.device.type != "cpu" or device.type == "cpu":
        return data.to(device)
    return data.pin_memory().to(device, non_blocking=True)


# ------------------------------------------------------------------ arithmetic


def widen(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Bring tensors to their common dtype, float32 at least.

    A bfloat16 log-prob near -8 has an error of 0.03 nats; the difference of two of them must not be rounded again.

    Example:
        >>> import torch
        >>> [t.dtype for t in widen(torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.float16))]
        [torch.float32, torch.float32]
    """
    dtype = wide_dtype(*(t.dtype for t in tensors))
    return tuple(t.to(dtype) for t in tensors)


def wide_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Return the dtype that :func:`widen` converts to: the common one, float32 at least."""
    return functools.reduce(torch.promote_types, dtypes, torch.float32)


def from_zero(sums: Tensor) -> Tensor:
    """Cumulative sums with a leading 0; ``[S]`` to ``[S + 1]``."""
    return functional.pad(sums, (1, 0))


def masked_mean(value: Tensor, mask: Tensor) -> Tensor:
    """Mean over the masked-in tokens, 0 if there are none; 0-dim."""
    return torch.where(mask, value, 0).sum() / mask.sum().clamp(min=1)


def is_dtensor(tensor: Tensor | None) -> bool:
    """Whether a tensor is sharded or replicated over ranks; torch imports the class late, and none exists before."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
