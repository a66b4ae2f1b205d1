"""Checks that the ranks of a step train one model with the gradient of the whole batch."""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchrl_llm_kl.rollouts import is_distributed, read_denominators, write_denominators

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

V = TypeVar("V")
#: Tensors that must be equal on all ranks -> advice if they are not.
_ADVICE = {
    "parameters": "Start all ranks from the same weights: the same seed or checkpoint, or a broadcast from rank 0. If they "
    "were equal at the start, the gradients were not averaged",
    "buffers": "Hyper-parameters and coefficients are buffers: set them, and update adaptive ones, alike on all ranks",
    "gradients": "A model that was unwrapped from DistributedDataParallel averages none. Wrap the loss, whose forward then "
    "synchronises them: loss = DistributedDataParallel(PolicyLoss(model, ...)), or average p.grad over the ranks",
}


def compare_ranks(loss: Any, parts: Sequence[TensorDictBase], group: ProcessGroup | None, tolerance: float) -> None:
    """See :meth:`~torchrl_llm_kl.losses.PolicyLoss.check_ranks`. ``loss`` is a ``PolicyLoss`` or a ``ValueLoss``."""
    if not is_distributed() and os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        raise RuntimeError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but torch.distributed is not initialised: each process trains its own "
            "model. Call torch.distributed.init_process_group first."
        )
    ranks = dist.get_world_size(group) if is_distributed() else 1
    _compare_tensors(loss, group, ranks)
    if not parts:
        return
    truth, counted = _true_gradient(loss, parts, group, ranks)
    gradients = [p.grad for p in loss.parameters() if p.requires_grad]
    # Three inner products: the script's gradient with itself, with the true gradient, and the true gradient with itself.
    products = torch.zeros(3, dtype=torch.float64)
    for a, b in zip(gradients, truth, strict=True):
        a, b = torch.zeros_like(b) if a is None else a.double(), b.double()
        products += torch.stack([(a * a).sum(), (a * b).sum(), (b * b).sum()]).cpu()
    square, inner, true_square = products.tolist()
    if max(square - 2 * inner + true_square, 0.0) <= tolerance**2 * true_square:
        return
    cosine = inner / math.sqrt(square * true_square) if square and true_square else 0.0
    if cosine < 1 - tolerance**2 / 2 or not true_square:
        advice = "Pass all parts of this step, and call this before clipping and after unscaling the gradient."
        if counted is None:
            advice += " Ranks and micro-batches were not counted: call loss.count(batch) before the batch is split."
        raise RuntimeError(
            f"the gradient does not belong to the {len(parts)} parts of this rank and the others': the cosine of the two "
            f"is {cosine:.4g}, expected 1. {advice}"
        )
    scale = inner / true_square
    raise RuntimeError(
        f"the gradient is {scale:.4g} times the batch's of {ranks} rank(s) and {len(parts)} part(s) on this one: "
        f"{_cause(scale, counted, ranks, len(parts))}."
    )


def _cause(scale: float, counted: float | None, ranks: int, parts: int) -> str:
    """The likely reason why a gradient is ``scale`` times the right one."""
    if counted is None:
        return "each part was divided by its own count. Call loss.count(batch) before it is split"
    # The factor that the script applied to the gradients of counted parts: 1 if ranks add up, 1 / ranks if they average.
    done = scale * counted
    for what, other, factor in (("averaged", "added up", 1 / ranks), ("added up", "averaged", 1.0)):
        if math.isclose(done, factor, rel_tol=0.02) and ranks > 1:
            call = f"loss.count(..., ranks_average={what == 'averaged'})"
            return f"the ranks {what} their gradients, but the counts are for gradients that are {other}. Call {call}"
        if math.isclose(done * parts, factor, rel_tol=0.02):
            return (
                f"it was also divided by {parts}, the number of parts. Accelerator.backward() divides by "
                "gradient_accumulation_steps, and counted losses are already shares of the batch: call backward() of the loss "
                "itself, or set gradient_accumulation_steps=1"
            )
    return "it may hold a loss scale that is not removed yet, or be clipped. Look for what else multiplies it"


def _compare_tensors(loss: nn.Module, group: ProcessGroup | None, ranks: int) -> None:
    """Raise a RuntimeError unless all ranks hold the same parameters, buffers and gradients."""
    kinds = {type(x).__name__ for x in (*loss.parameters(), *loss.modules())} & {"DTensor", "FullyShardedDataParallel"}
    if kinds:
        raise ValueError(
            f"check_ranks compares whole parameters, but these are sharded ({', '.join(sorted(kinds))}). FSDP itself averages "
            "the gradients."
        )
    gradients = {name: p.grad for name, p in loss.named_parameters() if p.requires_grad and p.grad is not None}
    if not gradients:
        raise RuntimeError("no parameter has a gradient: call check_ranks after backward() and before zero_grad().")
    if ranks == 1:
        return
    named = {"parameters": loss.named_parameters(), "buffers": loss.named_buffers(), "gradients": gradients.items()}
    everyone = _gathered({kind: _digests(each) for kind, each in named.items()}, group, ranks)
    for kind, advice in _ADVICE.items():
        for rank, other in enumerate(everyone):
            first, here = everyone[0][kind], other[kind]
            differ = [name for name in {**first, **here} if first.get(name) != here.get(name)]
            if differ:
                differ.sort(key=(first.keys() & here.keys()).__contains__)  # tensors that only one rank has come first
                one = " (some are on one of them only)" if first.keys() != here.keys() else ""
                some = ", ".join(differ[:3]) + (", ..." if len(differ) > 3 else "")
                count = f"{len(differ)} of {len(first)} tensors{one}"
                raise RuntimeError(f"the {kind} of ranks 0 and {rank} of {ranks} differ in {count}: {some}. {advice}.")


def _gathered(value: V, group: ProcessGroup | None, ranks: int) -> list[V]:
    """The value of each rank, in their order."""
    everyone = [value] * ranks
    if ranks > 1:
        dist.all_gather_object(everyone, value, group=group)
    return everyone


def _digests(named: Iterable[tuple[str, Tensor]]) -> dict[str, tuple[tuple[int, ...], str, int]]:
    """Shape, dtype and a checksum of the bits of each tensor. One tensor at a time is on the host."""
    bits = ((name, x, x.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()) for name, x in named)
    return {name: (tuple(x.shape), str(x.dtype), zlib.crc32(each.data)) for name, x, each in bits}


def _true_gradient(
    loss: Any, parts: Sequence[TensorDictBase], group: ProcessGroup | None, ranks: int
) -> tuple[list[Tensor], float | None]:
    """The gradient of the batch of all parts of all ranks, and the ratio of the stored denominators to the true counts.

    The ratio is 1 if the ranks add up gradients, 1 / ranks if they average them, and None if nothing was counted.
    """
    with torch.no_grad():
        terms = [loss._mask_terms(part) for part in parts]
        modes: list[tuple[str, str]] = [(term.name, loss._mode(term)) for term in terms[0]]
        if any(mode == "none" for _, mode in modes):
            raise ValueError("aggregation 'none' has no gradient that ranks could share: choose another.")
        of_parts = [torch.stack([loss._denominator(term).double() for term in some]) for some in terms]
        counts = torch.stack(of_parts).sum(0)
    if ranks > 1:
        dist.all_reduce(counts, group=group)
    key = loss.tensor_keys.denominators
    denominators = dict(zip(modes, counts.unbind(), strict=True))
    # For each part, the ratios of its stored denominators to the true counts. None for a part that was not counted.
    stored = [read_denominators(part, key, modes) for part in parts]
    factors = [
        some and tuple(round(float(some[name]) / float(n), 6) for (name, _), n in denominators.items() if n)
        for some in stored
    ]
    seen = [some for one in _gathered(factors, group, ranks) for some in one]
    values = {x for some in seen if some for x in some}
    if len(values) > 1 or (values and None in seen) or not values <= {1.0, round(1 / ranks, 6)}:
        raise RuntimeError(
            f"the parts of this step are divided by {sorted(values)} times the count of all parts of {ranks} rank(s)"
            f"{', and some by their own count' if None in seen else ''}. Expected 1"
            f"{f', or {1 / ranks:.4g} for ranks that average gradients' if ranks > 1 else ''}. Call loss.count once on each "
            "rank's whole share of the step, before it is split and over all ranks, and pass all parts of the share here."
        )

    parameters = [p for p in loss.parameters() if p.requires_grad]
    before = [p.grad for p in parameters]
    with ExitStack() as stack:
        # By default fork_rng would start a context on each accelerator of the machine.
        stack.enter_context(torch.random.fork_rng({p.device.index for p in parameters if p.device.type != "cpu"}))
        for module in loss.modules():
            if isinstance(module, DistributedDataParallel):
                stack.enter_context(module.no_sync())
        try:
            for p in parameters:
                p.grad = None
            for part in parts:
                part = part.clone(recurse=False)
                write_denominators(part, key, denominators, counts.new_zeros(()))
                loss(part).total_loss.backward()
            truth = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        finally:
            for p, gradient in zip(parameters, before, strict=True):
                p.grad = gradient
    if ranks > 1:
        for gradient in truth:
            dist.all_reduce(gradient, group=group)
    return truth, next(iter(values), None)
