"""The linear head: log-probs, entropy, exact KL and top-k from hidden states, without the ``[N, V]`` logits."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from torchrl_llm_kl.head._checks import check_chunk, check_pair, check_targets, make_head
from torchrl_llm_kl.head._sweep import sweep
from torchrl_llm_kl.head._tiles import Plan
from torchrl_llm_kl.head._top_k import top_k

__all__ = ["HeadOutput", "PairOutput", "TopK", "linear_kl", "linear_log_prob", "linear_pair", "linear_top_k"]

# Positions and tokens of a tile, measured (benchmarks/head.py): half of it runs as fast, but where other processes hold
# the cores every parallel kernel may wait for a thread, and a smaller tile means more kernels. The other one is a guess.
_CPU_CHUNK = (1024, 4096)
_CHUNK = (2048, 8192)


class HeadOutput(NamedTuple):
    """What :func:`linear_log_prob` returns; ``[N]`` each, float32 or wider."""

    log_prob: Tensor
    entropy: Tensor | None


class PairOutput(NamedTuple):
    """What :func:`linear_pair` returns; ``[N]`` each, float32 or wider; None if not asked for."""

    kl: Tensor
    log_prob: Tensor | None
    ref_log_prob: Tensor | None
    entropy: Tensor | None


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


def linear_log_prob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    scale: float = 1.0,
    soft_cap: float | None = None,
    entropy: bool = False,
    product_dtype: torch.dtype | None = None,
    chunk: tuple[int, int] | None = None,
) -> HeadOutput:
    """Log-probs of given tokens, and the entropy, under ``softcap(scale * (hidden @ weight.T + bias)) / temperature``.

    Works through tiles of positions and tokens with an online softmax in float32 or wider, and makes the logits again
    in backward: neither holds more than a few tiles besides inputs and gradients. Gradients reach hidden states, weight
    and bias, of log-prob and entropy together, and are summed in float32 or wider. Differentiable once.

    The product is made as the model's own head makes it: by default in the dtype of the inputs (under autocast, in
    autocast's), so that half precision rounds each logit; all that follows is float32. In backward it rounds each
    tile's part of a gradient as well as the sum, where plain torch rounds once. ``product_dtype=torch.float32`` leaves
    only the last rounding; tiles are converted one at a time.

    Args:
        hidden: what the head reads; ``[N, H]``.
        weight: of the head; ``[V, H]``.
        targets: token ids, any integer dtype; ``[N]``.
        bias: of the head; ``[V]``. ``-inf`` rules a token out.
        temperature: divides the logits, last.
        scale: multiplies product and bias, first.
        soft_cap: ``c`` of ``c * tanh(logit / c)``.
        entropy: whether to compute it too, about 2% more time.
        product_dtype: of the matrix products, see above.
        chunk: positions and tokens of a tile; changes memory and speed only. By default chosen by device.

    Returns:
        Log-prob and entropy (None unless asked for), nats, ``[N]``; not masked, not reduced.

    Raises:
        ValueError: if shapes disagree, an option is out of range, or, on CPU, a target is outside the vocabulary. On
            other devices, where looking would wait for the device, such a target's log-prob is NaN.
        TypeError: if dtypes disagree or are not of the right kind.

    Example:
        >>> weight = torch.tensor([[3.0], [1.0]]).log()  # probabilities 3/4 and 1/4 at a hidden state of 1
        >>> linear_log_prob(torch.ones(2, 1), weight, torch.tensor([0, 1]), entropy=True)
        HeadOutput(log_prob=tensor([-0.2877, -1.3863]), entropy=tensor([0.5623, 0.5623]))

    Source: online softmax: Milakov and Gimelshein, arXiv 1805.02867; logits made again in backward: Wijmans et al.,
    arXiv 2411.09009.
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
    targets = check_targets(targets, head)
    plan = Plan(_chunk(chunk, hidden), entropy=entropy)
    log_prob, entropy_value, _, _ = sweep(plan, targets, head)
    assert log_prob is not None
    return HeadOutput(log_prob, entropy_value)


def linear_kl(
    hidden: Tensor,
    weight: Tensor,
    ref_hidden: Tensor,
    ref_weight: Tensor,
    *,
    direction: Literal["reverse", "forward"] = "reverse",
    bias: Tensor | None = None,
    ref_bias: Tensor | None = None,
    temperature: float = 1.0,
    scale: float = 1.0,
    ref_scale: float = 1.0,
    soft_cap: float | None = None,
    ref_soft_cap: float | None = None,
    product_dtype: torch.dtype | None = None,
    chunk: tuple[int, int] | None = None,
) -> Tensor:
    """Exact KL of two heads over the whole vocabulary, at each position; ``[N]``.

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


def linear_pair(
    hidden: Tensor,
    weight: Tensor,
    ref_hidden: Tensor,
    ref_weight: Tensor,
    targets: Tensor | None = None,
    *,
    direction: Literal["reverse", "forward"] = "reverse",
    bias: Tensor | None = None,
    ref_bias: Tensor | None = None,
    temperature: float = 1.0,
    scale: float = 1.0,
    ref_scale: float = 1.0,
    soft_cap: float | None = None,
    ref_soft_cap: float | None = None,
    entropy: bool = False,
    product_dtype: torch.dtype | None = None,
    chunk: tuple[int, int] | None = None,
) -> PairOutput:
    """Exact KL of policy and reference, log-probs of given tokens under both, and the policy's entropy, in one sweep.

    ``"reverse"`` is ``KL(policy || reference)``, ``"forward"`` is ``KL(reference || policy)``. Value and *gradient* are
    those of the sum over the vocabulary: nothing is sampled at the position itself. Memory, precision and dtypes are
    those of :func:`linear_log_prob`. Gradients reach whatever requires them, of either head.

    Args:
        hidden: what the policy's head reads; ``[N, H]``.
        weight: the policy's head; ``[V, H]``.
        ref_hidden: what the reference's head reads; ``[N, H_ref]``.
        ref_weight: the reference's head; ``[V, H_ref]``.
        targets: token ids whose log-probs are wanted too; ``[N]``.
        direction: which of the two is weighed with.
        bias: of the policy's head; ``[V]``.
        ref_bias: of the reference's head; ``[V]``.
        temperature: divides both models' logits, as at sampling.
        scale: multiplies the policy's product and bias.
        ref_scale: multiplies the reference's.
        soft_cap: of the policy's logits.
        ref_soft_cap: of the reference's.
        entropy: whether to compute the policy's.
        product_dtype: of both matrix products; by default each head's own.
        chunk: positions and tokens of a tile; changes memory and speed only.

    Returns:
        Nats, ``[N]`` each; None for what was not asked for. A token that only the second distribution of the KL rules
        out makes the KL ``inf``, with a NaN gradient; one that both or only the first rules out counts 0.

    Raises:
        ValueError: if shapes or vocabularies disagree, or an option or a target is out of range.
        TypeError: if dtypes disagree or are not of the right kind.

    Example:
        >>> weight, ref_weight = torch.zeros(2, 1), torch.tensor([[3.0], [1.0]]).log()
        >>> linear_pair(torch.ones(1, 1), weight, torch.ones(1, 1), ref_weight, torch.tensor([0])).ref_log_prob
        tensor([-0.2877])

    Source: the inner sum made exact: Amini et al., arXiv 2504.10637.
    """
    if direction not in ("reverse", "forward"):
        raise ValueError(f"unknown direction {direction!r}; expected 'reverse' or 'forward'.")
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
    plan = Plan(_chunk(chunk, hidden), entropy=entropy, forward_kl=direction == "forward")
    log_prob, entropy_value, ref_log_prob, kl = sweep(plan, checked, policy, ref)
    assert kl is not None
    return PairOutput(kl, log_prob, ref_log_prob, entropy_value)


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
    chunk: tuple[int, int] | None = None,
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
        chunk: positions and tokens of a tile; changes memory and speed only.

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
    return TopK(*top_k(head, k, _chunk(chunk, hidden)))


def _chunk(chunk: tuple[int, int] | None, hidden: Tensor) -> tuple[int, int]:
    if chunk is None:
        return _CPU_CHUNK if hidden.device.type == "cpu" else _CHUNK
    return check_chunk(chunk)
