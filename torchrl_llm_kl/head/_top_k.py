"""The most probable tokens and the sum of the rest, from hidden states and a head."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_llm_kl.head._checks import make_chunk, make_head
from torchrl_llm_kl.head._operators import run_top_k

__all__ = ["TopK", "linear_top_k"]


class TopK(NamedTuple):
    """What :func:`linear_top_k` returns.

    Args:
        indices: tokens, most probable first; ``[N, k]``.
        log_probs: nats; ``[N, k]``.
        tail_log_prob: log of the probability of all other tokens together; ``[N]``, ``-inf`` if there are none.
    """

    indices: Tensor
    log_probs: Tensor
    tail_log_prob: Tensor


@torch.no_grad()
def linear_top_k(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    scale: float = 1.0,
    soft_cap: float | None = None,
    product_dtype: torch.dtype | None = None,
    chunk: tuple[int, int] | int | None = None,
) -> TopK:
    """The ``k`` most probable tokens of each position, and the log-probability of all others together.

    The tail is the log-sum-exp of the logits outside the top ``k``, never ``log(1 - x)``: it is as exact when it is
    ``1e-30`` as when it is one half. The result has no history.

    Args:
        hidden: what the head reads; ``[N, H]``.
        weight: of the head; ``[V, H]``.
        k: from 1 to ``V``.
        bias: of the head; ``[V]``.
        temperature: divides the logits, last.
        scale: multiplies product and bias, first.
        soft_cap: ``c`` of ``c * tanh(logit / c)``.
        product_dtype: of the matrix product, see :func:`linear_log_prob`.
        chunk: positions and tokens of a tile, or positions alone; changes memory and speed only.

    Returns:
        ``indices [N, k]``, ``log_probs [N, k]`` (nats, descending) and ``tail_log_prob [N]``.

    Raises:
        ValueError: if shapes disagree or an option is out of range.
        TypeError: if dtypes disagree or are not of the right kind.

    Example:
        >>> weight = torch.tensor([[1.0], [5.0], [2.0]]).log()
        >>> top = linear_top_k(torch.ones(1, 1), weight, 1)
        >>> top.indices, top.log_probs.exp(), top.tail_log_prob.exp()
        (tensor([[1]]), tensor([[0.6250]]), tensor([0.3750]))
    """
    head = make_head(
        "",
        hidden,
        weight,
        bias,
        temperature=temperature,
        scale=scale,
        soft_cap=soft_cap,
        product_dtype=product_dtype,
    )
    if not 1 <= k <= weight.shape[0]:
        raise ValueError(f"k is {k}; expected 1 to {weight.shape[0]}, the size of the vocabulary.")
    return TopK(*run_top_k(head, k, make_chunk(chunk, hidden)))
