"""Log-probs from one fused kernel on a GPU, where liger-kernel is installed and supports the head.

The kernel is liger-kernel's linear cross entropy without reduction. Like the tiles it takes blocks of positions, rounds each
logit as the head's product does, and recomputes the logits in the backward. But it reads each logit once in a forward
and three times in a backward, and the tiles read it more often.

Source: P.-L. Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training", arXiv 2410.10989.
"""

from __future__ import annotations

import importlib.util
import math
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchrl_llm_kl._registry import install_hint
from torchrl_llm_kl.head._operators import sweep
from torchrl_llm_kl.head._tiles import Head, Plan, Tokens

_DEVICES = ("cuda",)  # ROCm's devices have this type too
# In float32 most of the time goes into the product, and only the tiles keep the digits of nearly certain tokens. In float16
# the kernel rounds each token's gradient, which overflows with a scaled loss.
_DTYPES = (torch.bfloat16,)
# The check's gradient of the weight has so many tokens. That of a whole weight takes twice the memory of the head.
_FEW_TOKENS = 512


def obstacle(head: Head) -> str | None:
    """The reason why the fused kernel cannot compute a head's log-probs, or None if it can."""
    hidden, weight = head.hidden, head.weight
    assert weight is not None, "log-probs from logits have no product"
    if head.part is not None or head.positions == 0 or torch.compiler.is_compiling():
        return "the head is sharded, compiled or without positions"
    if head.bias is not None:
        return "the kernel rounds a logit twice if the head has a bias"
    if hidden.device.type not in _DEVICES:
        return f"the fused kernel does not run on {hidden.device.type}"
    if not _is_installed():
        return f"liger-kernel is not installed ({install_hint('gpu')})"
    if not {hidden.dtype, weight.dtype} <= {head.dtype} & {*_DTYPES}:
        return f"states, weight and product are {hidden.dtype}, {weight.dtype} and {head.dtype}, not bfloat16"
    if math.frexp(head.slope)[0] != 0.5:
        return f"a scale of {head.slope:.6g} would round the hidden states: only powers of 2 are exact"
    return None


@cache
def _is_installed() -> bool:
    return importlib.util.find_spec("liger_kernel") is not None


class _Once(torch.autograd.Function):
    """The identity. Its gradient has none: a second derivative of the kernel would silently lack terms."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def fused_log_prob(head: Head, targets: Tensor) -> Tensor:
    """Log-probs of the targets, ``[N]`` in float32, differentiable once. A target outside the vocabulary has NaN.

    ``c tanh(x / c) / t`` is ``b tanh(y / b)`` for ``b = c / t`` and ``y = x / t``, so the temperature goes into the hidden
    states. liger-kernel counts the targets on the host, which waits for the device once in each direction.
    """
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    hidden = head.hidden if head.slope == 1.0 else head.hidden * head.slope
    inside = (targets >= 0) & (targets < head.vocab)
    # Triton launches a kernel on the current device. In a backward that is the device of the tensors.
    with torch.autocast(hidden.device.type, enabled=False), torch.accelerator.device_index(hidden.device.index):
        known, cap = targets.where(inside, 0), head.soft_cap and head.gain
        loss: Tensor = liger_fused_linear_cross_entropy(
            hidden, head.weight, known, reduction="none", softcap=cap, accum_dtype=head.wide
        )
    return _Once.apply(-loss.where(inside, torch.nan))


@torch.inference_mode(False)
@torch.enable_grad()
def failure(head: Head, tile: tuple[int, int]) -> str | None:
    """How the kernel differs from the tiles in values or gradients, or None if rounding explains the differences.

    Each log-prob has another weight in the gradients, since liger-kernel before 0.8.2 gives all tokens the same weight. Each
    row is compared: log-probs, and the gradients of hidden states and weight.
    """
    assert head.weight is not None
    place, results = torch.arange(head.positions, device=head.hidden.device), list[list[Tensor]]()
    weights = 1.0 + place / head.positions
    for fused in (False, True):
        try:
            hidden, weight = (x.detach().clone().requires_grad_() for x in (head.hidden, head.weight[:_FEW_TOKENS]))
            values = list[Tensor]()
            for each in (head._replace(hidden=hidden), head._replace(hidden=hidden, weight=weight)):
                targets = place * 7919 % each.vocab
                tiled = None if fused else sweep(Plan(tile), each, None, Tokens(targets)).log_prob
                values.append(fused_log_prob(each, targets) if tiled is None else tiled)
            gradients = torch.autograd.grad(values, (hidden, weight), [weights] * 2)
        except Exception as error:  # of a compiler or a driver
            return f"{type(error).__name__}: {error}"
        results.append([each.detach().float().reshape(len(each), -1) for each in (*values, *gradients)])
    norms = [((b - a).norm(dim=1).max(), a.norm(dim=1).max()) for a, b in zip(*results, strict=True)]
    bound = 4 * torch.finfo(head.dtype).eps
    found = torch.stack([torch.stack(pair) for pair in norms]).tolist()
    if all(difference <= bound * norm for difference, norm in found):
        return None
    differences = ", ".join(f"{difference:.1g} of {norm:.1g}" for difference, norm in found)
    return f"differences in values and gradients are {differences}, more than rounding"
