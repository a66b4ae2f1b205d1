"""Arithmetic on one number per token: masked sums and bounded ratios for objectives, and the reduction to a loss.

Shapes are ``[*B, T]``, with any batch dimensions ``*B`` before the ``T`` tokens of a sequence.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import (
    Scalar,
    check_choice,
    check_is_mask,
    check_is_number,
    check_is_scalar,
    check_range,
    check_same_shape,
    wide_dtype,
    widen,
)

#: How a loss is summed over tokens. See the table of :func:`aggregate`.
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "none"]
#: Every :data:`Aggregation`.
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)


def aggregate(
    value: Tensor,
    mask: Tensor,
    mode: Aggregation = "token-mean",
    *,
    denominator: float | Tensor | None = None,
    max_len: int | None = None,
) -> Tensor:
    r"""Reduce one number per token to a loss.

    ========================== ================================================================ =====================
    mode                       value                                                            denominator
    ========================== ================================================================ =====================
    ``token-mean``             sum over all tokens / tokens                                     tokens
    ``seq-mean-token-sum``     mean over sequences of the sum over tokens                       sequences
    ``seq-mean-token-mean``    mean over sequences of the mean over tokens                      sequences
    ``seq-mean-token-sum-norm`` sum over all tokens / (sequences * ``max_len``)                 sequences * max_len
    ``none``                   the values, 0 where the mask is False                            (not used)
    ========================== ================================================================ =====================

    Only masked-in tokens, and sequences with at least one of them, are counted. With the ``denominator`` of the whole batch
    (:func:`count`) the results of its parts add up to the result of the whole. The batch may be split in any way: into
    micro-batches, over ranks, with different padding.

    Args:
        value: one value per token, ``[*B, T]``. Masked-out entries have no influence, not even NaN.
        mask: bool ``[*B, T]``.
        mode: a row of the table.

    Keyword Args:
        denominator: divisor to use instead of the count of this mask, a number or a 0-dim tensor.
        max_len: the longest possible response in tokens, ``T`` by default. A given denominator already includes it.

    Returns:
        0-dim, or ``[*B, T]`` for ``none``. Half precision is summed and returned in float32. If the mask is empty and no
        denominator is given, the result is 0 without gradient, and a warning is issued.

    Raises:
        ValueError: if the mode is unknown, the shapes differ, or the denominator cannot be used.

    Example:
        >>> value = torch.tensor([[1.0, 2.0], [6.0, float("nan")]])
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> aggregate(value, mask), aggregate(value, mask, "seq-mean-token-mean")
        (tensor(3.), tensor(3.7500))
        >>> sum(aggregate(v, m, denominator=count(mask)) for v, m in zip(value[:, None], mask[:, None]))
        tensor(3.)

    Source: names and meanings of the modes are verl's. The last one is from Liu et al. 2025 (Dr. GRPO, arXiv 2503.20783).
    """
    check_choice(AGGREGATIONS, mode=mode)
    check_same_shape(value=value, mask=mask)
    check_is_mask(mask=mask)
    if mode == "none":
        if denominator is not None:
            raise ValueError(f"aggregation 'none' has no denominator, got {denominator}: leave it out.")
        return torch.where(mask, widen(value)[0], 0)
    if denominator is None:
        # On an accelerator, reading the mask would be a host sync.
        if mask.device.type == "cpu" and not torch.compiler.is_compiling() and not bool(mask.any()):
            warnings.warn("the mask is empty: the loss is 0.", stacklevel=2)
        denominator = count(mask, mode, max_len=max_len)
    check_is_scalar(denominator=denominator)
    if not isinstance(denominator, Tensor):
        if not 0 <= denominator < math.inf:
            raise ValueError(f"denominator must be a count of tokens or sequences, got {denominator}.")
        denominator = torch.tensor(denominator, dtype=wide_dtype(value.dtype), device=value.device)
    return aggregate_each([value], mask, mode, denominator)[0]


def aggregate_each(values: Sequence[Tensor], mask: Tensor, mode: str, denominator: Tensor) -> tuple[Tensor, ...]:
    """:func:`aggregate` of ``K`` values with one mask. ``denominator`` is 0-dim for all of them, or ``[K]``."""
    # Stacked, so that several terms need no more kernel launches than one.
    (value,) = widen(torch.stack(list(values)))
    value = torch.where(mask, value, 0)
    if mode == "seq-mean-token-mean":
        value = value / mask.sum(-1, keepdim=True).clamp(min=1)
    # Where the count is 0 the sum is 0 too, so any other divisor gives 0.
    if denominator.is_floating_point():  # a stored denominator may be a fraction of a count
        denominator = denominator.to(value.dtype)
        divisor = denominator + (denominator == 0)
    else:
        divisor = denominator.clamp(min=1)
    return (value.flatten(1).sum(1) / divisor).unbind()


def count(mask: Tensor, mode: Aggregation = "token-mean", *, max_len: int | None = None) -> Tensor:
    """The divisor of :func:`aggregate` for this mask, 0-dim int64 on its device. The arguments are as in ``aggregate``.

    Add the counts of all micro-batches and of all ranks, and pass the sum to each of them as ``denominator``.

    Raises:
        ValueError: if the mode is unknown or ``max_len`` is not positive.
        TypeError: if the mask is not boolean.

    Example:
        >>> mask = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
        >>> [int(count(mask, mode)) for mode in AGGREGATIONS[:4]]
        [3, 2, 2, 6]
    """
    check_choice(AGGREGATIONS, mode=mode)
    check_is_mask(mask=mask)
    check_range(1, max_len=max_len)
    if mode in ("token-mean", "none"):
        return mask.sum()
    sequences = mask.any(-1).sum()
    if mode == "seq-mean-token-sum-norm":
        return sequences * (mask.shape[-1] if max_len is None else max_len)
    return sequences


# ------------------------------------------------------------------ for objectives

#: Cap of log-ratios, in nats: exp(80) is 5.5e34, which leaves room in float32 for a factor such as the advantage.
LARGEST_LOG_RATIO = 80.0


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """``exp`` of a log-ratio, which is capped at 80 nats, without gradient above.

    Otherwise the exponential could be infinite in float32, and the gradient of a clipped infinity is NaN.
    """
    return log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()


def clean(value: Tensor, mask: Tensor) -> Tensor:
    """Set values to 0 or False where the mask is False, and widen numbers to float32."""
    if value.dtype == torch.bool:
        return value & mask
    return torch.where(mask, widen(value)[0], 0)  # a product with the mask would keep NaN and inf


def check_inputs(mask: Tensor, **named: Tensor) -> None:
    """Check that inputs are numbers with the shape of the mask, and that the mask is boolean."""
    check_same_shape(mask=mask, **named)
    check_is_mask(mask=mask)
    check_is_number(**named)


def checked(mask: Tensor, **named: Tensor) -> tuple[Tensor, ...]:
    """Check inputs with :func:`check_inputs`, then :func:`clean` them."""
    check_inputs(mask, **named)
    return tuple(clean(x, mask) for x in named.values())


def sequence_sum(value: Tensor, mask: Tensor) -> Tensor:
    """Sum of each sequence, ``[*B, 1]``."""
    return torch.where(mask, value, 0).sum(-1, keepdim=True)


def prefix_sum(value: Tensor, mask: Tensor) -> Tensor:
    """Sum of each token's value and the values before it in its sequence, ``[*B, T]``. Masked-out tokens count as 0."""
    return torch.where(mask, value, 0).cumsum(-1)


def sequence_mean(value: Tensor, mask: Tensor) -> Tensor:
    """Mean of each sequence, ``[*B, 1]``. 0 for a sequence without masked-in tokens."""
    return sequence_sum(value, mask) / mask.sum(-1, keepdim=True).clamp(min=1)


def clamp(value: Tensor, low: Scalar | None = None, high: Scalar | None = None) -> Tensor:
    """``value.clamp(low, high)``, where each bound may be a number or a 0-dim tensor, also on the CPU.

    Unlike arithmetic, the clamp kernels of an accelerator do not accept a CPU tensor as a bound.
    """
    low, high = (
        x.item() if isinstance(x, Tensor) and x.device.type == "cpu" != value.device.type else x for x in (low, high)
    )
    if isinstance(low, Tensor) == isinstance(high, Tensor):
        return value if low is None is high else value.clamp(low, high)  # type: ignore[arg-type]
    if low is not None:
        value = value.clamp_min(low)
    return value if high is None else value.clamp_max(high)


def clip_fractions(low: Tensor, high: Tensor, mask: Tensor, **others: Tensor) -> dict[str, Tensor]:
    """Shares of tokens clipped on either side: ``clip_fraction`` and its ``_low`` and ``_high`` parts, and ``others``."""
    # One stack and one sum: a mean for each flag would be several kernels.
    flags = {"clip_fraction": low | high, "clip_fraction_low": low, "clip_fraction_high": high, **others}
    counts = (torch.stack([*flags.values(), mask]) & mask).flatten(1).sum(1)
    return dict(zip(flags, (counts[:-1] / counts[-1].clamp(min=1)).unbind(), strict=True))
