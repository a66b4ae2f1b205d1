"""The KL itself: a sum over the whole vocabulary at each position, in memory for a few positions only."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import check_same_shape
from torchrl_llm_kl.head import Direction, linear_kl, logits_kl


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
    chunk_size: int | None = None,
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
    and gradients, in forward and in backward, which recomputes: :func:`torchrl_llm_kl.head.linear_kl` works through
    tiles of positions and tokens. Differentiable once.

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
        chunk_size: positions at a time, by default chosen by device; changes memory and speed only.

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
    _check_chunk_size(chunk_size)
    _check_head("", hidden, weight)
    _check_head("ref_", ref_hidden, ref_weight)
    _check_positions(hidden, ref_hidden)
    double = [torch.float64 in (hidden.dtype, weight.dtype), torch.float64 in (ref_hidden.dtype, ref_weight.dtype)]
    flat = linear_kl(
        hidden.flatten(0, -2),
        weight,
        ref_hidden.flatten(0, -2),
        ref_weight,
        direction=direction,
        beta=beta,
        bias=bias,
        ref_bias=ref_bias,
        temperature=temperature,
        product_dtype=torch.float64 if double[0] != double[1] else None,
        chunk=chunk_size,
    )
    return flat.view(hidden.shape[:-1])


def exact_kl_from_logits(
    logits: Tensor,
    ref_logits: Tensor,
    *,
    direction: Direction = "reverse",
    beta: float = 0.5,
    temperature: float = 1.0,
    chunk_size: int | None = None,
) -> Tensor:
    r"""Full-vocabulary divergence at each position, from logits that exist already.

    Means, gradients and placement are those of :func:`exact_kl`; the float32 copies are made chunk by chunk.

    Args:
        logits: of the policy, any constant may be added to a row; ``[*B, T, V]``.
        ref_logits: of the reference; same shape, without history if the reference is frozen.
        direction: which divergence, see :func:`exact_kl`.
        beta: weight of the reference in the mixture, inside (0, 1); only for ``"jensen_shannon"``.
        temperature: divides both models' logits.
        chunk_size: positions at a time, by default chosen by device; changes memory and speed only.

    Returns:
        Nats per position, ``[*B, T]``; not masked, not reduced; float32 or wider.

    Raises:
        ValueError: if the shapes disagree or an option is out of range.

    Example:
        >>> exact_kl_from_logits(torch.tensor([[3.0, 1.0]]).log(), torch.zeros(1, 2), direction="forward")
        tensor([0.1438])

    Source: as :func:`exact_kl`.
    """
    _check_chunk_size(chunk_size)
    if logits.shape[-1] != ref_logits.shape[-1]:
        raise ValueError(
            f"logits covers a vocabulary of {logits.shape[-1]} tokens but ref_logits one of {ref_logits.shape[-1]}; an "
            "exact KL needs the same tokens in the same order. If one head is only padded, cut both to the common "
            "vocabulary."
        )
    check_same_shape(logits=logits, ref_logits=ref_logits)
    rows = [t.flatten(0, -2) if t.ndim > 1 else t[None] for t in (logits, ref_logits)]
    flat = logits_kl(*rows, direction=direction, beta=beta, temperature=temperature, chunk=chunk_size)
    return flat.view(logits.shape[:-1])


def _check_chunk_size(chunk_size: int | None) -> None:
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1 position, got {chunk_size}.")


def _check_head(prefix: str, hidden: Tensor, weight: Tensor) -> None:
    if hidden.ndim < 2 or weight.ndim != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{prefix}hidden has shape {tuple(hidden.shape)} and {prefix}weight has shape {tuple(weight.shape)}; "
            "expected [*B, T, H] and [V, H]."
        )


def _check_positions(hidden: Tensor, ref_hidden: Tensor) -> None:
    if hidden.shape[:-1] != ref_hidden.shape[:-1]:
        raise ValueError(
            f"hidden has shape {tuple(hidden.shape)} but ref_hidden has shape {tuple(ref_hidden.shape)}; "
            "all but the last dimension must be equal."
        )
