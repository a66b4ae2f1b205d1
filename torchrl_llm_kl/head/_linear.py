"""Log-probs of given tokens, and the entropy, from hidden states and a head."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_llm_kl.head._autograd import sweep
from torchrl_llm_kl.head._checks import check_targets, make_chunk, make_head
from torchrl_llm_kl.head._tiles import Plan

__all__ = ["HeadOutput", "linear_log_prob"]


class HeadOutput(NamedTuple):
    """What :func:`linear_log_prob` returns; ``[N]`` each, float32 or wider."""

    log_prob: Tensor
    entropy: Tensor | None


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
    chunk: tuple[int, int] | int | None = None,
) -> HeadOutput:
    """Log-probs of given tokens, and the entropy, under ``softcap(scale * (hidden @ weight.T + bias)) / temperature``.

    Works through tiles of positions and tokens with an online softmax in float32 or wider, and makes the logits again
    in backward: neither holds more than a few tiles besides inputs and gradients. Gradients reach hidden states, weight
    and bias, of log-prob and entropy together, and are summed in float32 or wider. Differentiable once.

    The product is made as the model's own head makes it: by default in the dtype of the inputs (under autocast, in
    autocast's), so that half precision rounds each logit; all that follows is float32. In backward it rounds each
    tile's part of a gradient as well as the sum, where plain torch rounds once. ``product_dtype=torch.float32`` leaves
    only the last rounding; tiles are converted one at a time.

    In a compiled function each sweep is one operator: no graph break, and other numbers of positions share a graph.

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
        chunk: positions and tokens of a tile, or positions alone; changes memory and speed only. By default chosen by device.

    Returns:
        Log-prob and entropy (None unless asked for), nats, ``[N]``; not masked, not reduced.

    Raises:
        ValueError: if shapes disagree, an option is out of range, or, on CPU, a target is outside the vocabulary. On
            other devices, where looking would wait for the device, and in a compiled function such a target's log-prob
            is NaN.
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
    plan = Plan(make_chunk(chunk, hidden), entropy=entropy)
    log_prob, entropy_value, _, _ = sweep(plan, targets, head)
    assert log_prob is not None
    return HeadOutput(log_prob, entropy_value)
