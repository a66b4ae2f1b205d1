"""Forward and backward sweep as one differentiable function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchrl_llm_kl.head._operators import run_backward, run_forward
from torchrl_llm_kl.head._tiles import Head, LogitMap, Plan, SweepOutput, Swept

__all__ = ["sweep"]


def sweep(plan: Plan, targets: Tensor | None, policy: Head, ref: Head | None = None) -> SweepOutput:
    """Everything asked about one or two heads; differentiable once.

    Targets given: log-probs of them. A reference given: the divergence too.
    """
    tensors = [targets, *policy[:3], *(ref[:3] if ref is not None else (None, None, None))]
    maps = (policy.map,) if ref is None else (policy.map, ref.map)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return SweepOutput(*_Sweep.apply(plan, maps, *tensors))
    return _output(plan, run_forward(plan, maps, tensors))


class _Sweep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, maps: Sequence[LogitMap], *tensors: Tensor | None) -> Any:
        ctx.plan, ctx.maps = plan, maps
        ctx.set_materialize_grads(False)
        swept = run_forward(plan, maps, tensors)
        ctx.save_for_backward(*tensors, *swept)
        return tuple(_output(plan, swept))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        saved = ctx.saved_tensors  # once: under checkpointing each look unpacks, and a second one is an error
        tensors, swept = saved[:7], Swept(*saved[7:])
        needed = ctx.needs_input_grad[3:]
        return None, None, None, *run_backward(ctx.plan, ctx.maps, tensors, swept, grads, needed)


def _output(plan: Plan, swept: Swept) -> SweepOutput:
    kl, ref_kl = swept.kl, swept.ref_kl
    if kl is not None and ref_kl is not None:
        kl = plan.shares[0] * kl + plan.shares[1] * ref_kl
    return SweepOutput(swept.log_prob, swept.entropy, swept.ref_log_prob, ref_kl if kl is None else kl)
