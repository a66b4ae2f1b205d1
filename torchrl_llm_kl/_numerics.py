"""Argument checks and masked arithmetic for all layers.

Shapes: ``[*B, T]`` is one number per token, with any batch dimensions ``*B`` before the ``T`` tokens.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Mapping
from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional

from torchrl_llm_kl._registry import Range, check_choice as check_choice

#: A hyper-parameter is a number, or a 0-dim tensor that a schedule changes in place.
Scalar = float | Tensor
#: Hyper-parameters with a range, which the decorators of registered functions check. ``Number`` only excludes NaN.
Number = Annotated[Scalar, Range()]
NonNegative = Annotated[Scalar, Range(0.0)]
NonPositive = Annotated[Scalar, Range(high=0.0)]
Positive = Annotated[Scalar, Range(above=0.0)]
Share = Annotated[Scalar, Range(0.0, 1.0)]
PositiveShare = Annotated[Scalar, Range(high=1.0, above=0.0)]
AboveOne = Annotated[Scalar, Range(above=1.0)]
#: The same ranges for numbers that cannot be tensors.
Amount = Annotated[float, Range(0.0)]
PositiveAmount = Annotated[float, Range(above=0.0)]
Fraction = Annotated[float, Range(0.0, 1.0)]
InnerShare = Annotated[float, Range(above=0.0, below=1.0)]

# ------------------------------------------------------------------ checks


def check_same_shape(**named_tensors: Tensor | None) -> None:
    """Raise a ValueError unless all given tensors have one shape. None is skipped.

    Broadcasting ``[B, T]`` against ``[B, 1]`` would silently produce wrong numbers.

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
    """Raise a ValueError for the first tensor that is not 0-dim, since it would broadcast over tokens."""
    for name, value in named.items():
        if isinstance(value, Tensor) and value.ndim:
            raise ValueError(
                f"{name} must be one number, got a tensor of shape {tuple(value.shape)}: pass a 0-dim tensor."
            )


def check_range(
    low: float = -math.inf,
    high: float = math.inf,
    *,
    above: float = -math.inf,
    below: float | None = None,
    **named: object,
) -> None:
    """Raise a ValueError for the first named number outside the :class:`Range`."""
    for name, value in named.items():
        Range(low, high, above, below).check(name, value)


#: Types that models compute in. torch has more types, of 8 bits and fewer, for storage.
FLOAT_TYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
}
#: The smallest temperature. With a smaller one logits overflow float32.
COLDEST = 1e-6


def check_temperature(temperature: float) -> None:
    """Raise a ValueError for a temperature that is not a finite number of at least :data:`COLDEST`."""
    if not COLDEST <= temperature < math.inf:  # no function of math: torch.compile traces this
        raise ValueError(f"temperature must be a finite number of at least {COLDEST:g}, got {temperature}.")


def check_not_a_name(*allowed: str, **named: object) -> None:
    """Raise an error with advice if a model was given by name. Strings in ``allowed`` pass."""
    for name, value in named.items():
        if isinstance(value, str) and value not in allowed:
            kinds = " or ".join(["a model", *map(repr, allowed)])
            raise (ValueError if allowed else TypeError)(
                f"{name} must be {kinds}, got {value!r}: load it first, AutoModelForCausalLM.from_pretrained({value!r})."
            )


def read_device(device: torch.device | str | int, name: str = "device") -> torch.device:
    """Return the device that an argument names.

    Raises:
        ValueError: if this process has no such device. The message lists the devices that it has.

    Example:
        >>> read_device("cpu")
        device(type='cpu')
    """
    try:
        named = torch.device(device)
        if (named.index or 0) < torch.get_device_module(
            named
        ).device_count():  # counting does not initialise the device
            return named
    except (RuntimeError, TypeError):  # an unknown name, no accelerator, or the meta device
        pass
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    count = 0 if accelerator is None else torch.accelerator.device_count()
    present = ", ".join(["cpu", *(f"{accelerator}:{i}" for i in range(count))])
    shown = repr(device if isinstance(device, int) else str(device))
    have = f"process (torch {torch.__version__}), which has {present}"
    raise ValueError(f"{name}={shown} is not a device of this {have}: pass one of these.")


def all_finite(*tensors: Tensor) -> bool:
    """Whether every number is finite. One host synchronisation for all tensors if so."""
    return math.isfinite(finite_total(*tensors)) or all(bool(x.isfinite().all()) for x in tensors)


def finite_total(*tensors: Tensor) -> Tensor:
    """A 0-dim float32 sum in one cheap pass. It is finite unless a number is not finite or the sum overflows."""
    sums = [x.sum(dtype=torch.float32) for x in tensors]
    return functools.reduce(torch.add, sums) if sums else torch.zeros(())


class NotFiniteError(ValueError):
    """A number is NaN or infinite."""


def check_finite(
    named: Mapping[str, Tensor], *, read: Tensor | None = None, place: Callable[[int], str], advice: str
) -> None:
    """Raise a :class:`NotFiniteError` for the first NaN or infinite number. One host synchronisation if all are finite.

    Args:
        named: name for the message -> tensor. All tensors have one shape.

    Keyword Args:
        read: bool of the same shape, True where numbers are used. Other numbers are not checked. None checks all.
        place: returns the description of a flat index, such as ``"sequence 2, position 7"``.
        advice: how to fix the problem, as a sentence.

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
    """Return the tensors on the CPU, without graph. All tensors on one device come in a single copy.

    Example:
        >>> import torch
        >>> to_host(torch.tensor([1, 2]), torch.tensor([True]))
        (tensor([1, 2]), tensor([True]))
    """
    out = [tensor.detach() for tensor in tensors]
    away = [i for i, x in enumerate(out) if x.device.type != "cpu"]
    if len(away) < 2 or len({out[i].device for i in away}) > 1:
        return tuple(x.cpu() for x in out)
    # Widest elements first, so that each tensor begins at a multiple of its element size, as `view` requires.
    away.sort(key=lambda i: -out[i].element_size())
    raw = torch.cat([out[i].reshape(-1).view(torch.uint8) for i in away]).cpu()
    for i, some in zip(away, raw.split([out[i].nbytes for i in away]), strict=True):
        out[i] = some.view(out[i].dtype).view(out[i].shape)
    return tuple(out)


def send(data: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device, asynchronously from the host."""
    if data.device.type != "cpu" or device.type == "cpu":
        return data.to(device)
    return data.pin_memory().to(device, non_blocking=True)


# ------------------------------------------------------------------ arithmetic


def widen(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Convert tensors to their common dtype, at least float32.

    A bfloat16 log-prob near -8 has an error of 0.03 nats. The difference of two of them must not be rounded again.

    Example:
        >>> import torch
        >>> [t.dtype for t in widen(torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.float16))]
        [torch.float32, torch.float32]
    """
    dtype = wide_dtype(*(t.dtype for t in tensors))
    return tuple(t.to(dtype) for t in tensors)


def wide_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Return the dtype that :func:`widen` converts to."""
    return functools.reduce(torch.promote_types, dtypes, torch.float32)


def from_zero(sums: Tensor) -> Tensor:
    """Cumulative sums with a leading 0: ``[S]`` becomes ``[S + 1]``."""
    return functional.pad(sums, (1, 0))


def masked_mean(value: Tensor, mask: Tensor) -> Tensor:
    """The 0-dim mean over the masked-in tokens. 0 if there are none."""
    return torch.where(mask, value, 0).sum() / mask.sum().clamp(min=1)


def is_dtensor(tensor: Tensor | None) -> bool:
    """Whether a tensor is sharded or replicated over ranks. The class is not imported for this check, which would take long."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
