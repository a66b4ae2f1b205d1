"""Exact divergence of a policy and a reference from logits that exist already."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_llm_kl.head._autograd import sweep
from torchrl_llm_kl.head._checks import Direction, check_temperature, make_chunk, make_shares
from torchrl_llm_kl.head._tiles import Head, LogitMap, Plan, wide

__all__ = ["logits_kl"]


def logits_kl(
    logits: Tensor,
    ref_logits: Tensor,
    *,
    direction: Direction = "reverse",
    beta: float = 0.5,
    temperature: float = 1.0,
    chunk: tuple[int, int] | int | None = None,
) -> Tensor:
    """:func:`linear_kl` where the logits exist already: the same sweep, without a product.

    Besides inputs and gradients only a few tiles exist, in float32 or wider. Differentiable once.

    Args:
        logits: of the policy; ``[N, V]``.
        ref_logits: of the reference; same shape.
        direction: which divergence, see :func:`linear_pair`.
        beta: weight of the reference in the mixture, inside (0, 1); only for ``"jensen_shannon"``.
        temperature: divides both models' logits.
        chunk: positions and tokens of a tile, or positions alone; changes memory and speed only.

    Returns:
        Nats, ``[N]``; not masked, not reduced; ``inf`` and NaN where :func:`linear_pair` has them.

    Raises:
        ValueError: if the shapes disagree or an option is out of range.

    Example:
        >>> logits_kl(torch.tensor([[3.0, 1.0]]).log(), torch.zeros(1, 2), direction="forward")
        tensor([0.1438])

    Source: as :func:`linear_pair`.
    """
    if logits.ndim != 2 or logits.shape != ref_logits.shape or logits.shape[1] == 0:
        raise ValueError(
            f"logits has shape {tuple(logits.shape)} and ref_logits has shape {tuple(ref_logits.shape)}; expected the "
            "same [N, V] with V at least 1. Flatten the positions first."
        )
    check_temperature(temperature)
    both = LogitMap(wide(torch.promote_types(logits.dtype, ref_logits.dtype)), float(temperature))
    plan = Plan(make_chunk(chunk, logits), shares=make_shares(direction, beta))
    kl = sweep(plan, None, Head(logits, None, None, both), Head(ref_logits, None, None, both)).kl
    assert kl is not None
    return kl
