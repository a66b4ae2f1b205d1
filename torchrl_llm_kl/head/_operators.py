"""The sweeps as one differentiable function, and as single operators of a graph that is being compiled.

Tracing into a sweep would unroll its tiles, recompile for every other number of positions, and turn its in-place writes
into copies of whole gradients.

``tensors`` are everywhere the targets, then hidden states, weight and bias of the policy and of the reference; None for
what there is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchrl_llm_kl.head._gradient import backward_sweep, empty_gradients
from torchrl_llm_kl.head._sweep import forward_sweep, top_k_sweep
from torchrl_llm_kl.head._tiles import Head, LogitMap, PairOutput, Plan, TopK

Tensors = Sequence[Tensor | None]


def sweep(plan: Plan, targets: Tensor | None, policy: Head, ref: Head | None = None) -> PairOutput:
    """Everything requested of one or two heads, differentiable once; for one head ``kl`` is None."""
    tensors = [targets, *policy[:3], *(ref[:3] if ref is not None else (None, None, None))]
    maps = [policy.map] if ref is None else [policy.map, ref.map]
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return PairOutput._make(_Sweep.apply(plan, maps, *tensors))
    return _run_forward(plan, maps, tensors)[0]


def top_k(head: Head, k: int, chunk: tuple[int, int]) -> TopK:
    """The top-k sweep."""
    if not torch.compiler.is_compiling():
        return top_k_sweep(head, k, chunk)
    return TopK(*torch.ops.torchrl_llm_kl.head_top_k([None, *head[:3]], k, *_flat(Plan(chunk), [head.map])))


class _Sweep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, maps: list[LogitMap], *tensors: Tensor | None) -> Any:
        ctx.plan, ctx.maps = plan, maps
        ctx.set_materialize_grads(False)
        result, statistics = _run_forward(plan, maps, tensors)
        ctx.save_for_backward(*tensors, *result, *statistics)
        return tuple(result)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        saved = ctx.saved_tensors  # once: under checkpointing each access unpacks, and a second one is an error
        tensors, result, statistics = saved[:7], saved[7:11], saved[11:]
        needed = ctx.needs_input_grad[3:]
        if torch.compiler.is_compiling():
            found = _spread(
                torch.ops.torchrl_llm_kl.head_backward(
                    list(tensors), list(result), list(statistics), list(grads), list(needed), *_flat(ctx.plan, ctx.maps)
                ),
                needed,
            )
        else:
            heads = _heads(tensors, ctx.maps)
            found = backward_sweep(
                ctx.plan, heads, tensors[0], PairOutput._make(result), statistics, grads, needed[: 3 * len(heads)]
            )
        return None, None, None, *found, *(None,) * (6 - len(found))


def _run_forward(plan: Plan, maps: list[LogitMap], tensors: Tensors) -> tuple[PairOutput, list[Tensor]]:
    if not torch.compiler.is_compiling():
        return forward_sweep(plan, tensors[0], _heads(tensors, maps))
    found = torch.ops.torchrl_llm_kl.head_forward(list(tensors), *_flat(plan, maps))
    present = _present(plan, maps, tensors)
    return PairOutput._make(_spread(found, present)), found[sum(present) :]


def _heads(tensors: Tensors, maps: list[LogitMap]) -> list[Head]:
    return [Head._make([*tensors[3 * i + 1 : 3 * i + 4], each]) for i, each in enumerate(maps)]


# ------------------------------------------------------------------ operators
# They take tensors, numbers and lists of them, and return tensors that all exist.

_SETTINGS = "SymInt[] chunk, bool entropy, float[] shares, ScalarType dtype, ScalarType? ref_dtype, float[] numbers"


def _flat(plan: Plan, maps: list[LogitMap]) -> tuple[object, ...]:
    """Plan and maps as the operators' settings."""
    numbers = [number for each in maps for number in (each.temperature, each.scale, each.soft_cap or 0.0)]
    ref_dtype = maps[1].dtype if len(maps) == 2 else None
    return list(plan.chunk), plan.entropy, list(plan.shares), maps[0].dtype, ref_dtype, numbers


def _built(
    chunk: list[int],
    entropy: bool,
    shares: list[float],
    dtype: torch.dtype,
    ref_dtype: torch.dtype | None,
    numbers: list[float],
) -> tuple[Plan, list[LogitMap]]:
    """Plan and maps from the operators' settings."""
    dtypes = [dtype] if ref_dtype is None else [dtype, ref_dtype]
    maps = [
        LogitMap(each, numbers[3 * i], numbers[3 * i + 1], numbers[3 * i + 2] or None) for i, each in enumerate(dtypes)
    ]
    return Plan((chunk[0], chunk[1]), entropy, (shares[0], shares[1])), maps


def _present(plan: Plan, maps: list[LogitMap], tensors: Tensors) -> list[bool]:
    """Which fields of the result exist."""
    chosen, pair = tensors[0] is not None, len(maps) == 2
    return [pair, chosen, chosen and pair, plan.entropy]


def _spread(found: list[Tensor], present: Sequence[bool]) -> list[Tensor | None]:
    """The tensors found where one is present, None elsewhere."""
    rest = iter(found)
    return [next(rest) if each else None for each in present]


def _dense(tensors: Tensors) -> list[Tensor]:
    return [t for t in tensors if t is not None]


@torch.library.custom_op(
    "torchrl_llm_kl::head_forward", mutates_args=(), schema=f"(Tensor?[] tensors, {_SETTINGS}) -> Tensor[]"
)
def _forward_op(tensors: Tensors, *settings: Any) -> list[Tensor]:
    plan, maps = _built(*settings)
    result, statistics = forward_sweep(plan, tensors[0], _heads(tensors, maps))
    return _dense([*result, *statistics])


@_forward_op.register_fake
def _(tensors: Tensors, *settings: Any) -> list[Tensor]:
    plan, maps = _built(*settings)
    pair, head = len(maps) == 2, _heads(tensors, maps)[0]
    statistics = 2 * len(maps) + 2 * (pair and plan.mixture)
    return [head.per_position(0.0) for _ in range(sum(_present(plan, maps, tensors)) + statistics)]


@torch.library.custom_op(
    "torchrl_llm_kl::head_backward",
    mutates_args=(),
    schema="(Tensor?[] tensors, Tensor?[] result, Tensor[] statistics, Tensor?[] grads, bool[] needed, "
    f"{_SETTINGS}) -> Tensor[]",
)
def _backward_op(
    tensors: Tensors,
    result: Tensors,
    statistics: list[Tensor],
    grads: Tensors,
    needed: list[bool],
    *settings: Any,
) -> list[Tensor]:
    plan, maps = _built(*settings)
    heads = _heads(tensors, maps)
    swept = backward_sweep(
        plan, heads, tensors[0], PairOutput._make(result), statistics, grads, needed[: 3 * len(heads)]
    )
    return _dense(swept)


@_backward_op.register_fake
def _(
    tensors: Tensors,
    result: Tensors,
    statistics: list[Tensor],
    grads: Tensors,
    needed: list[bool],
    *settings: Any,
) -> list[Tensor]:
    return _dense(empty_gradients(_heads(tensors, _built(*settings)[1]), needed))


@torch.library.custom_op(
    "torchrl_llm_kl::head_top_k",
    mutates_args=(),
    schema=f"(Tensor?[] tensors, SymInt k, {_SETTINGS}) -> (Tensor, Tensor, Tensor)",
)
def _top_k_op(tensors: Tensors, k: int, *settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    plan, maps = _built(*settings)
    return top_k_sweep(_heads(tensors, maps)[0], k, plan.chunk)


@_top_k_op.register_fake
def _(tensors: Tensors, k: int, *settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    tail = _heads(tensors, _built(*settings)[1])[0].per_position(0.0)
    values = tail.new_empty(tail.shape[0], k)
    return values.long(), values, tail
