"""The sweeps, plainly called, or as single operators of a graph that is being compiled.

Tracing into them would unroll the tiles, compile again for every other number of positions, and turn what they write in
place into copies of whole gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchrl_llm_kl.head._gradient import HeadGradient, Known, backward_sweep
from torchrl_llm_kl.head._sweep import forward_sweep
from torchrl_llm_kl.head._tiles import Head, LogitMap, Plan, SweepOutput, Swept
from torchrl_llm_kl.head._top_k_sweep import top_k_sweep

__all__ = ["run_backward", "run_forward", "run_top_k"]

# Targets, then hidden states, weight and bias of policy and reference; None for what there is not.
Tensors = Sequence[Tensor | None]


def run_forward(plan: Plan, maps: Sequence[LogitMap], tensors: Tensors) -> Swept:
    """The forward sweep."""
    if not torch.compiler.is_compiling():
        return _forward(plan, maps, tensors)
    found = torch.ops.torchrl_llm_kl.head_forward(list(tensors), *_flat(plan, maps))
    return Swept._make(_spread(found, _asked(plan, maps, tensors)))


def run_backward(
    plan: Plan, maps: Sequence[LogitMap], tensors: Tensors, swept: Swept, grads: Tensors, needed: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients of hidden states, weights and biases of both heads, given those of ``SweepOutput``."""
    if not torch.compiler.is_compiling():
        return _backward(plan, maps, tensors, swept, grads, needed)
    found = torch.ops.torchrl_llm_kl.head_backward(
        list(tensors), list(swept), list(grads), list(needed), *_flat(plan, maps)
    )
    return _spread(found, needed)


def run_top_k(head: Head, k: int, chunk: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """The top-k sweep."""
    if not torch.compiler.is_compiling():
        return top_k_sweep(head, k, chunk)
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.torchrl_llm_kl.head_top_k(
        [None, *head[:3]], k, *_flat(Plan(chunk), [head.map])
    )
    return found


def _forward(plan: Plan, maps: Sequence[LogitMap], tensors: Tensors) -> Swept:
    return forward_sweep(plan, tensors[0], _heads(tensors, maps))


def _backward(
    plan: Plan, maps: Sequence[LogitMap], tensors: Tensors, swept: Swept, grads: Tensors, needed: Sequence[bool]
) -> list[Tensor | None]:
    heads = _heads(tensors, maps)
    gradients = _gradients(heads, needed)
    known = Known(tensors[0], swept.entropy, (swept.kl, swept.ref_kl), _dense(swept[5:]))
    backward_sweep(plan, heads, known, SweepOutput(*grads), gradients)
    return _results(gradients)


def _heads(tensors: Tensors, maps: Sequence[LogitMap]) -> list[Head]:
    return [Head._make([*tensors[3 * i + 1 : 3 * i + 4], each]) for i, each in enumerate(maps)]


def _gradients(heads: list[Head], needed: Sequence[bool]) -> list[HeadGradient]:
    return [HeadGradient(head, needed[3 * i : 3 * i + 3]) for i, head in enumerate(heads)]


def _results(gradients: list[HeadGradient]) -> list[Tensor | None]:
    results = [result for gradient in gradients for result in gradient.results()]
    return results + [None] * (6 - len(results))


# ---------------------------------------------------------------------------------------------------------------------
# Operators take tensors, numbers and lists of them, and return tensors that all exist.

_SETTINGS = "SymInt[] chunk, bool entropy, float[] shares, ScalarType dtype, ScalarType? ref_dtype, float[] numbers"


def _flat(plan: Plan, maps: Sequence[LogitMap]) -> tuple[object, ...]:
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
    dtypes = [dtype] if ref_dtype is None else [dtype, ref_dtype]
    maps = [
        LogitMap(each, numbers[3 * i], numbers[3 * i + 1], numbers[3 * i + 2] or None) for i, each in enumerate(dtypes)
    ]
    return Plan((chunk[0], chunk[1]), entropy, (shares[0], shares[1])), maps


def _asked(plan: Plan, maps: Sequence[LogitMap], tensors: Tensors) -> list[bool]:
    """Which fields of ``Swept`` exist."""
    chosen, pair = tensors[0] is not None, len(maps) == 2
    kls = [pair and share > 0 for share in plan.shares]
    return [chosen, chosen and pair, plan.entropy, *kls, True, True, pair, pair]


def _spread(found: list[Tensor], present: Sequence[bool]) -> list[Tensor | None]:
    """A tensor where one is present, None elsewhere."""
    rest = list(found)
    return [rest.pop(0) if each else None for each in present]


def _dense(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [t for t in tensors if t is not None]


@torch.library.custom_op(
    "torchrl_llm_kl::head_forward", mutates_args=(), schema=f"(Tensor?[] tensors, {_SETTINGS}) -> Tensor[]"
)
def _forward_op(tensors: Tensors, *settings: Any) -> list[Tensor]:
    return _dense(_forward(*_built(*settings), tensors))


@_forward_op.register_fake
def _(tensors: Tensors, *settings: Any) -> list[Tensor]:
    plan, maps = _built(*settings)
    head = _heads(tensors, maps)[0]
    return [head.state(0.0) for asked in _asked(plan, maps, tensors) if asked]


@torch.library.custom_op(
    "torchrl_llm_kl::head_backward",
    mutates_args=(),
    schema=f"(Tensor?[] tensors, Tensor?[] swept, Tensor?[] grads, bool[] needed, {_SETTINGS}) -> Tensor[]",
)
def _backward_op(tensors: Tensors, swept: Tensors, grads: Tensors, needed: list[bool], *settings: Any) -> list[Tensor]:
    return _dense(_backward(*_built(*settings), tensors, Swept._make(swept), grads, needed))


@_backward_op.register_fake
def _(tensors: Tensors, swept: Tensors, grads: Tensors, needed: list[bool], *settings: Any) -> list[Tensor]:
    return _dense(_results(_gradients(_heads(tensors, _built(*settings)[1]), needed)))


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
    tail = _heads(tensors, _built(*settings)[1])[0].state(0.0)
    values = tail.new_empty(tail.shape[0], k)
    return values.long(), values, tail
