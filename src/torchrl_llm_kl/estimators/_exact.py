"""The KL itself: a sum over the whole vocabulary at each position, in memory for a few positions only."""

from __future__ import annotations

import functools
import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from torchrl_llm_kl._checks import check_same_shape
from torchrl_llm_kl.estimators._chunked import map_rows
from torchrl_llm_kl.estimators._numerics import widen

Direction = Literal["reverse", "forward", "jensen_shannon"]
_DIRECTIONS: tuple[Direction, ...] = ("reverse", "forward", "jensen_shannon")
_CHUNK_SIZE = 256


def exact_kl(
    hidden: Tensor,
    ref_hidden: Tensor,
    weight: Tensor,
    ref_weight: Tensor,
    *,
    bias: Tensor | None = None,
    ref_bias: Tensor | None = None,
    direction: Direction = "reverse",
    beta: float = 0.5,
    temperature: float = 1.0,
    chunk_size: int = _CHUNK_SIZE,
) -> Tensor:
    r"""Full-vocabulary divergence at each position, from the hidden states and the two heads.

    ``"reverse"`` is :math:`KL(\pi \| \pi_{ref})`, ``"forward"`` is :math:`KL(\pi_{ref} \| \pi)`, and
    ``"jensen_shannon"`` is :math:`\beta KL(\pi_{ref} \| m) + (1-\beta) KL(\pi \| m)` with the mixture
    :math:`m = \beta\pi_{ref} + (1-\beta)\pi`. So ``beta`` is the weight of the *reference*; 0.5 is symmetric and at
    most ``log 2``. Divided by ``beta`` it tends to the forward KL as ``beta`` tends to 0; divided by ``1 - beta``, to
    the reverse KL as ``beta`` tends to 1.

    Nothing is sampled at the position itself: value and *gradient* are the chosen divergence and its gradient given the
    prefix, whoever wrote the prefix. Made for a **loss** and for logging. In a **reward** alone it does not reach the
    token of its own position (its policy gradient there is zero), only the earlier tokens that led to this prefix.

    Logits are made by the heads in their own dtype, as the models make them, then upcast; softmax, sums and the
    accumulated gradients of heads are float32 or wider. No tensor larger than ``[chunk_size, V]`` exists besides inputs
    and gradients, in forward and in backward, which recomputes. Differentiable once.

    Args:
        hidden: last hidden state of the policy; ``[*B, T, H]``, the dtype of ``weight``.
        ref_hidden: the reference's at the same positions; ``[*B, T, H_ref]``, without history if the reference is
            frozen.
        weight: head of the policy; ``[V, H]``.
        ref_weight: head of the reference; ``[V, H_ref]``.
        bias: of the policy's head; ``[V]``.
        ref_bias: of the reference's head; ``[V]``.
        direction: which divergence.
        beta: weight of the reference in the mixture, inside (0, 1); only for ``"jensen_shannon"``.
        temperature: divides both models' logits, as at sampling.
        chunk_size: positions at a time; changes memory and speed only.

    Returns:
        Nats per position, ``[*B, T]``; not masked, not reduced. A logit of ``-inf`` in both models counts 0; a token
        that only the second distribution of a KL rules out makes that KL ``inf``.

    Raises:
        ValueError: if vocabularies, positions or head sizes disagree, or an option is out of range.

    Example:
        >>> hidden = ref_hidden = torch.ones(1, 2, 1)
        >>> weight, ref_weight = torch.zeros(2, 1), torch.tensor([[3.0], [1.0]]).log()
        >>> exact_kl(hidden, ref_hidden, weight, ref_weight)  # (1/2, 1/2) against (3/4, 1/4)
        tensor([[0.1438, 0.1438]])

    Source: the exact inner sum: Amini et al., arXiv 2504.10637 (Rao-Blackwell); ``beta``: Agarwal et al.,
    arXiv 2306.13649, generalized Jensen-Shannon with the teacher as first distribution.
    """
    _check_vocabularies(weight.shape[0], ref_weight.shape[0], "weight", "ref_weight")
    _check_head("", hidden, weight, bias)
    _check_head("ref_", ref_hidden, ref_weight, ref_bias)
    _check_positions(hidden, ref_hidden, "hidden", "ref_hidden")
    divergence = _make_divergence(direction, beta, temperature)

    def of_rows(h: Tensor, ref_h: Tensor, w: Tensor, ref_w: Tensor, b: Tensor | None, ref_b: Tensor | None) -> Tensor:
        return divergence(F.linear(h, w, b), F.linear(ref_h, ref_w, ref_b))

    rows = (hidden.flatten(0, -2), ref_hidden.flatten(0, -2))
    flat = map_rows(of_rows, rows, (weight, ref_weight, bias, ref_bias), chunk_size=chunk_size)
    return flat.view(hidden.shape[:-1])


def exact_kl_from_logits(
    logits: Tensor,
    ref_logits: Tensor,
    *,
    direction: Direction = "reverse",
    beta: float = 0.5,
    temperature: float = 1.0,
    chunk_size: int = _CHUNK_SIZE,
) -> Tensor:
    r"""Full-vocabulary divergence at each position, from logits that exist already.

    Means, gradients and placement are those of :func:`exact_kl`; the float32 copies are made chunk by chunk.

    Args:
        logits: of the policy, any constant may be added to a row; ``[*B, T, V]``.
        ref_logits: of the reference; same shape, without history if the reference is frozen.
        direction: which divergence, see :func:`exact_kl`.
        beta: weight of the reference in the mixture, inside (0, 1); only for ``"jensen_shannon"``.
        temperature: divides both models' logits.
        chunk_size: positions at a time; changes memory and speed only.

    Returns:
        Nats per position, ``[*B, T]``; not masked, not reduced; float32 or wider.

    Raises:
        ValueError: if the shapes disagree or an option is out of range.

    Example:
        >>> exact_kl_from_logits(torch.tensor([[3.0, 1.0]]).log(), torch.zeros(1, 2), direction="forward")
        tensor([0.1438])

    Source: as :func:`exact_kl`.
    """
    _check_vocabularies(logits.shape[-1], ref_logits.shape[-1], "logits", "ref_logits")
    check_same_shape(logits=logits, ref_logits=ref_logits)
    rows = (logits.flatten(0, -2), ref_logits.flatten(0, -2)) if logits.ndim > 1 else (logits[None], ref_logits[None])
    flat = map_rows(_make_divergence(direction, beta, temperature), rows, (), chunk_size=chunk_size)
    return flat.view(logits.shape[:-1])


def _make_divergence(direction: Direction, beta: float, temperature: float) -> functools.partial[Tensor]:
    if direction not in _DIRECTIONS:
        raise ValueError(f"unknown direction {direction!r}; expected one of {', '.join(map(repr, _DIRECTIONS))}.")
    if not 0 < beta < 1:
        raise ValueError(f"beta must be inside (0, 1), got {beta}; the ends are direction='forward' and 'reverse'.")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}.")
    return functools.partial(_divergence, direction=direction, beta=beta, temperature=temperature)


def _divergence(logits: Tensor, ref_logits: Tensor, *, direction: Direction, beta: float, temperature: float) -> Tensor:
    logits, ref_logits = widen(logits, ref_logits)
    log_p = (logits / temperature).log_softmax(-1)
    log_q = (ref_logits / temperature).log_softmax(-1)
    if direction == "reverse":
        return _kl(log_p, log_q)
    if direction == "forward":
        return _kl(log_q, log_p)
    # logaddexp(-inf, -inf) has a NaN gradient; a token that neither can emit is in neither sum, so any value will do.
    impossible = log_p.isneginf() & log_q.isneginf()
    log_m = torch.logaddexp(log_p + math.log1p(-beta), log_q.masked_fill(impossible, 0.0) + math.log(beta))
    return beta * _kl(log_q, log_m) + (1 - beta) * _kl(log_p, log_m)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    p = log_p.exp()
    # 0 * log(0) is 0: both factors are masked before the product, where a NaN could reach the gradient.
    difference = (log_p - log_q).masked_fill(p == 0, 0.0)
    return (p * difference).sum(-1)


def _check_vocabularies(vocab: int, ref_vocab: int, name: str, ref_name: str) -> None:
    if vocab != ref_vocab:
        raise ValueError(
            f"{name} covers a vocabulary of {vocab} tokens but {ref_name} one of {ref_vocab}; an exact KL needs the "
            "same tokens in the same order. If one head is only padded, cut both to the common vocabulary."
        )


def _check_head(prefix: str, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if hidden.ndim < 2 or weight.ndim != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{prefix}hidden has shape {tuple(hidden.shape)} and {prefix}weight has shape {tuple(weight.shape)}; "
            "expected [*B, T, H] and [V, H]."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{prefix}bias has shape {tuple(bias.shape)}; expected ({weight.shape[0]},) as {prefix}weight."
        )


def _check_positions(hidden: Tensor, ref_hidden: Tensor, name: str, ref_name: str) -> None:
    if hidden.shape[:-1] != ref_hidden.shape[:-1]:
        raise ValueError(
            f"{name} has shape {tuple(hidden.shape)} but {ref_name} has shape {tuple(ref_hidden.shape)}; "
            "all but the last dimension must be equal."
        )
