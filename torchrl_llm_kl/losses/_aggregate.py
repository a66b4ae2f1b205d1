"""From one number per token to one number: the only place where losses are reduced."""

from __future__ import annotations

import warnings
from typing import Literal, get_args

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import check_same_shape
from torchrl_llm_kl.losses._term import check_is_mask

__all__ = ["AGGREGATIONS", "Aggregation", "aggregate", "check_aggregation", "count"]

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "none"]
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)


def aggregate(
    value: Tensor,
    mask: Tensor,
    mode: str = "token-mean",
    *,
    denominator: float | Tensor | None = None,
    max_len: int | None = None,
) -> Tensor:
    r"""Reduce one number per token to a loss.

    ========================== ================================================================ =====================
    mode                       value                                                            denominator counts
    ========================== ================================================================ =====================
    ``token-mean``             sum over all tokens / tokens                                     tokens
    ``seq-mean-token-sum``     mean over sequences of the sum over tokens                       sequences
    ``seq-mean-token-mean``    mean over sequences of the mean over tokens                      sequences
    ``seq-mean-token-sum-norm`` sum over all tokens / (sequences * ``max_len``)                 sequences * max_len
    ``none``                   the values, 0 where the mask is False                            (not used)
    ========================== ================================================================ =====================

    Tokens and sequences that count are those of the mask: a sequence without any does not exist. With the ``denominator``
    of the whole batch (:func:`count`), the results of its parts add up to that of the whole, however it was split: in
    micro-batches, over ranks, with other padding.

    Args:
        value: per token; ``[*B, T]``. What stands where the mask is False has no influence, not even NaN.
        mask: bool ``[*B, T]``.
        mode: one of :data:`AGGREGATIONS`.

    Keyword Args:
        denominator: by how much to divide instead of what this mask counts; a number or a 0-dim tensor.
        max_len: the longest that a sequence may become, in tokens, for ``seq-mean-token-sum-norm``; ``T`` by default.

    Returns:
        0-dim, or ``[*B, T]`` for ``none``; half precision is added up, and returned, in float32. 0 without gradient, and a
        warning, if nothing counts at all and no denominator is given.

    Raises:
        ValueError: if the mode is unknown, the shapes differ, or a denominator is given that cannot be used.

    Example:
        >>> value = torch.tensor([[1.0, 2.0], [6.0, float("nan")]])
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> aggregate(value, mask), aggregate(value, mask, "seq-mean-token-mean")
        (tensor(3.), tensor(3.7500))
        >>> sum(aggregate(v, m, denominator=count(mask)) for v, m in zip(value[:, None], mask[:, None]))
        tensor(3.)

    Source: the modes' names and meanings are verl's; Liu et al. 2025 (Dr. GRPO, arXiv 2503.20783) for the last one.
    """
    check_aggregation(mode)
    check_same_shape(value=value, mask=mask)
    check_is_mask(mask=mask)
    if value.dtype in (torch.float16, torch.bfloat16):
        value = value.float()
    value = torch.where(mask, value, 0)
    if mode == "none":
        if denominator is not None:
            raise ValueError(f"aggregation 'none' divides by nothing, got denominator={denominator}")
        return value
    if mode == "seq-mean-token-mean":
        value = value / mask.sum(-1, keepdim=True).clamp(min=1)
    if denominator is None:
        if mask.device.type == "cpu" and not torch.compiler.is_compiling() and not bool(mask.any()):
            warnings.warn("no token counts: the mask is False everywhere and the loss is 0", stacklevel=2)
        denominator = count(mask, mode, max_len=max_len)
    elif max_len is not None:
        raise ValueError("got both denominator and max_len: the denominator already counts max_len (see count)")
    if not isinstance(denominator, Tensor):
        if not denominator >= 0:
            raise ValueError(f"denominator must be a count of tokens or sequences, got {denominator}")
        denominator = torch.tensor(denominator, dtype=value.dtype, device=value.device)
    denominator = denominator.to(value.dtype)
    # A count of 0 goes with a sum of 0.
    return value.sum() / torch.where(denominator == 0, 1, denominator)


def count(mask: Tensor, mode: str = "token-mean", *, max_len: int | None = None) -> Tensor:
    """What :func:`aggregate` divides by: the denominator of a whole batch, for its parts.

    Add the counts of all micro-batches, and of all ranks, before handing the sum to each of them.

    Args:
        mask: bool ``[*B, T]``.
        mode: one of :data:`AGGREGATIONS`.

    Keyword Args:
        max_len: as for :func:`aggregate`.

    Returns:
        0-dim int64 on the device of the mask.

    Raises:
        ValueError: if the mode is unknown or ``max_len`` is not positive.

    Example:
        >>> mask = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
        >>> [int(count(mask, mode)) for mode in AGGREGATIONS[:4]]
        [3, 2, 2, 6]
    """
    check_aggregation(mode)
    if max_len is not None and max_len < 1:
        raise ValueError(f"max_len must be at least 1 token, got {max_len}")
    if mode in ("token-mean", "none"):
        return mask.sum()
    sequences = mask.any(-1).sum()
    if mode == "seq-mean-token-sum-norm":
        return sequences * (mask.shape[-1] if max_len is None else max_len)
    return sequences


def check_aggregation(mode: str) -> None:
    """Raise a ValueError that lists the modes unless ``mode`` is one of them."""
    if mode not in AGGREGATIONS:
        raise ValueError(f"unknown aggregation {mode!r}; known: {', '.join(AGGREGATIONS)}")
