"""Exact divergence of a policy and a reference, and log-probs and entropy beside it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_llm_kl.head._autograd import sweep
from torchrl_llm_kl.head._checks import Direction, check_pair, check_targets, make_chunk, make_head, make_shares
from torchrl_llm_kl.head._tiles import Plan

__all__ = ["PairOutput", "linear_kl", "linear_pair"]


class PairOutput(NamedTuple):
    """What :func:`linear_pair` returns; ``[N]`` each, float32 or wider; None if not asked for."""

    kl: Tensor
    log_prob: Tensor | None
    ref_log_prob: Tensor | None
    entropy: Tensor | None


def linear_pair(
    hidden: Tensor,
    weight: Tensor,
    ref_hidden: Tensor,
    ref_weight: Tensor,
    targets: Tensor | None = None,
    *,
    direction: Direction = "reverse",
    beta: float = 0.5,
    bias: Tensor | None = None,
    ref_bias: Tensor | None = None,
    temperature: float = 1.0,
    scale: float = 1.0,
    ref_scale: float = 1.0,
    soft_cap: float | None = None,
    ref_soft_cap: float | None = None,
    entropy: bool = False,
    product_dtype: torch.dtype | None = None,
    chunk: tuple[int, int] | int | None = None,
) -> PairOutput:
    r"""Exact KL of policy and reference, log-probs of given tokens under both, and the policy's entropy, in one sweep.

    ``"reverse"`` is :math:`KL(\pi \| \pi_{ref})`, ``"forward"`` is :math:`KL(\pi_{ref} \| \pi)`, and
    ``"jensen_shannon"`` is :math:`\beta KL(\pi_{ref} \| m) + (1-\beta) KL(\pi \| m)` with
    :math:`m = \beta\pi_{ref} + (1-\beta)\pi`. The mixture shows only in whole rows: forward takes tiles of all tokens
    and fewer positions (64, or as many as give a tile of the same size), and converts a head as a whole where the
    product's dtype is another one.
    Value and *gradient* are those of the sum over the vocabulary: nothing is sampled at the position itself. Memory,
    precision and dtypes are those of :func:`linear_log_prob`. Gradients reach whatever requires them, of either head.

    Args:
        hidden: what the policy's head reads; ``[N, H]``.
        weight: the policy's head; ``[V, H]``.
        ref_hidden: what the reference's head reads; ``[N, H_ref]``.
        ref_weight: the reference's head; ``[V, H_ref]``.
        targets: token ids whose log-probs are wanted too; ``[N]``.
        direction: which divergence ``kl`` is.
        beta: weight of the reference in the mixture, inside (0, 1); only for ``"jensen_shannon"``.
        bias: of the policy's head; ``[V]``.
        ref_bias: of the reference's head; ``[V]``.
        temperature: divides both models' logits, as at sampling.
        scale: multiplies the policy's product and bias.
        ref_scale: multiplies the reference's.
        soft_cap: of the policy's logits.
        ref_soft_cap: of the reference's.
        entropy: whether to compute the policy's.
        product_dtype: of both matrix products; by default each head's own.
        chunk: positions and tokens of a tile, or positions alone; changes memory and speed only.

    Returns:
        Nats, ``[N]`` each; None for what was not asked for. A token that only the second distribution of a KL rules
        out makes it ``inf``, with a NaN gradient; one that both or only the first rules out counts 0.

    Raises:
        ValueError: if shapes or vocabularies disagree, or an option or a target is out of range.
        TypeError: if dtypes disagree or are not of the right kind.

    Example:
        >>> weight, ref_weight = torch.zeros(2, 1), torch.tensor([[3.0], [1.0]]).log()
        >>> linear_pair(torch.ones(1, 1), weight, torch.ones(1, 1), ref_weight, torch.tensor([0])).ref_log_prob
        tensor([-0.2877])

    Source: the inner sum made exact: Amini et al., arXiv 2504.10637; ``beta``: Agarwal et al., arXiv 2306.13649, with the
    teacher as first distribution.
    """
    policy = make_head(
        "",
        hidden,
        weight,
        bias,
        temperature=temperature,
        scale=scale,
        soft_cap=soft_cap,
        product_dtype=product_dtype,
    )
    ref = make_head(
        "ref_",
        ref_hidden,
        ref_weight,
        ref_bias,
        temperature=temperature,
        scale=ref_scale,
        soft_cap=ref_soft_cap,
        product_dtype=product_dtype,
    )
    check_pair(policy, ref)
    checked = None if targets is None else check_targets(targets, policy)
    plan = Plan(make_chunk(chunk, hidden), entropy=entropy, shares=make_shares(direction, beta))
    log_prob, entropy_value, ref_log_prob, kl = sweep(plan, checked, policy, ref)
    assert kl is not None
    return PairOutput(kl, log_prob, ref_log_prob, entropy_value)


def linear_kl(
    hidden: Tensor,
    weight: Tensor,
    ref_hidden: Tensor,
    ref_weight: Tensor,
    *,
    direction: Direction = "reverse",
    beta: float = 0.5,
    bias: Tensor | None = None,
    ref_bias: Tensor | None = None,
    temperature: float = 1.0,
    scale: float = 1.0,
    ref_scale: float = 1.0,
    soft_cap: float | None = None,
    ref_soft_cap: float | None = None,
    product_dtype: torch.dtype | None = None,
    chunk: tuple[int, int] | int | None = None,
) -> Tensor:
    """Exact divergence of two heads over the whole vocabulary, at each position; ``[N]``.

    The ``kl`` of :func:`linear_pair`, which says what the arguments mean.

    Returns:
        Nats, ``[N]``; not masked, not reduced.

    Raises:
        ValueError: as :func:`linear_pair`.
        TypeError: as :func:`linear_pair`.

    Example:
        >>> weight, ref_weight = torch.zeros(2, 1), torch.tensor([[3.0], [1.0]]).log()
        >>> linear_kl(torch.ones(1, 1), weight, torch.ones(1, 1), ref_weight)  # (1/2, 1/2) against (3/4, 1/4)
        tensor([0.1438])
    """
    return linear_pair(
        hidden,
        weight,
        ref_hidden,
        ref_weight,
        direction=direction,
        beta=beta,
        bias=bias,
        ref_bias=ref_bias,
        temperature=temperature,
        scale=scale,
        ref_scale=ref_scale,
        soft_cap=soft_cap,
        ref_soft_cap=ref_soft_cap,
        product_dtype=product_dtype,
        chunk=chunk,
    ).kl
