"""The sweeps as one differentiable function, and as single operators of a graph that is being compiled.

Tracing into a sweep would unroll its tiles, recompile for every other number of positions, and turn its in-place writes
into copies of whole gradients.

``tensors`` are the targets, then hidden states, weight and bias of the policy and of the reference, then ids and offsets of
the tokens that the policy may draw, then the ids of its outcomes; None for a missing one. Operators take tensors, numbers and
lists, and return lists without None: ``settings`` hold the rest of the heads and a plan in that form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchrl_llm_kl.head._gradient import backward_sweep, empty_gradients
from torchrl_llm_kl.head._shards import Slice, join, join_top_k
from torchrl_llm_kl.head._support import Kept, Truncation
from torchrl_llm_kl.head._sweep import forward_sweep, top_k_sweep
from torchrl_llm_kl.head._tiles import Head, Plan, Result, TopK

# Bytes of logits that a forward keeps for its backward, which computes the others again.
_KEPT_BYTES = 64 * 2**20
_RESULTS = len(Result._fields)
_TENSORS = 10
Tensors = Sequence[Tensor | None]
Settings = tuple[list[int], list[float], torch.dtype, torch.dtype | None]


def sweep(
    plan: Plan,
    targets: Tensor | None,
    policy: Head,
    ref: Head | None = None,
    part: Slice | None = None,
    recorded: Kept | None = None,
    ids: Tensor | None = None,
    statistics: list[Any] | None = None,
) -> Result:
    """The results that ``plan`` requests for one or two heads, differentiable once; for one head ``kl`` is None.

    With ``part`` the heads are this rank's slice of the vocabulary, the results are of the whole. ``ids [N, M, k]`` request
    the policy's outcomes. ``statistics`` gets those of :func:`forward_sweep`.
    """
    if part is not None and targets is not None:
        targets = targets - part.first
    if part is not None and recorded is not None:
        recorded = recorded._replace(ids=recorded.ids - part.first)
    if part is not None and ids is not None:
        ids = ids - part.first
    tensors = [
        targets,
        *policy[:3],
        *(ref[:3] if ref is not None else [None] * 3),
        *((None, None) if recorded is None else recorded[:2]),
        ids,
    ]
    settings = _flatten(plan, policy, ref)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return Result._make(_Sweep.apply(part, settings, statistics, *tensors))
    found = _forward(part, tensors, settings)
    if statistics is not None:
        statistics += found[_RESULTS:]
    return Result._make(found[:_RESULTS])


def top_k(head: Head, k: int, chunk: tuple[int, int], targets: Tensor | None = None, part: Slice | None = None) -> TopK:
    if part is not None and targets is not None:
        targets = targets - part.first
    settings = _flatten(Plan(chunk), head, None)
    arguments = ([targets, *head[:3], *[None] * (_TENSORS - 4)], min(k, head.sizes[1]), *settings)
    indices, log_probs, tail, log_prob, log_sum = _call("head_top_k", _top_k_op, *arguments)
    found = TopK(indices, log_probs, tail, None if targets is None else log_prob)
    return found if part is None else join_top_k(part, k, found, log_sum, targets)


class _Sweep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, part: Slice | None, settings: Settings, statistics: list[Any] | None, *tensors: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.part, ctx.settings = part, settings
        ctx.set_materialize_grads(False)
        found = _forward(part, tensors, settings, keep=_KEPT_BYTES)
        ctx.save_for_backward(*tensors, *found)
        if statistics is not None:
            plan, heads, _ = _build(tensors, settings)
            statistics += found[_RESULTS : _RESULTS + plan.statistics(len(heads))]
        return tuple(found[:_RESULTS])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = list(ctx.saved_tensors)  # once: under checkpointing each access unpacks, and a second one is an error
        first = _TENSORS + _RESULTS
        tensors, result, rest = saved[:_TENSORS], saved[_TENSORS:first], saved[first:]
        needed = list(ctx.needs_input_grad[4:10])  # after part, settings, statistics and targets
        found = _call("head_backward", _backward_op, tensors, result, rest, list(grads), needed, *ctx.settings)
        gradients = _spread(found, needed)
        if ctx.part is not None:
            ctx.part.add(gradients[0]), ctx.part.add(gradients[3])  # of the hidden states
        return None, None, None, None, *gradients, None, None, None


def _forward(part: Slice | None, tensors: Tensors, settings: Settings, keep: int = 0) -> Tensors:
    """The fields of the result, then all else that the forward sweep returns; it keeps no logits while compiling."""
    if torch.compiler.is_compiling():
        found = torch.ops.torchrl_llm_kl.head_forward(list(tensors), *settings)
    else:
        found = _forward_op(tensors, *settings, keep=keep)
    found = _spread(found, _present(tensors, settings))
    if part is None:
        return found
    plan, heads, _ = _build(tensors, settings)
    end = _RESULTS + plan.statistics(len(heads))
    result, statistics = join(part, plan, tensors[0], found[:end], tensors[9])
    return [*result, *statistics, *found[end:]]


T = TypeVar("T")


def _call(name: str, function: Callable[..., T], *args: object) -> T:
    """The operator while a graph is being compiled; otherwise the function itself, without the operator's overhead."""
    return getattr(torch.ops.torchrl_llm_kl, name)(*args) if torch.compiler.is_compiling() else function(*args)


def _flatten(plan: Plan, policy: Head, ref: Head | None) -> Settings:
    flags = (plan.entropy, *plan.shares, *plan.truncation, plan.keep_targets, plan.ref_kept)
    heads = [policy] if ref is None else [policy, ref]
    numbers = [number for each in heads for number in (each.temperature, each.scale, each.soft_cap or 0.0)]
    return list(plan.chunk), [float(x) for x in (*flags, *numbers)], policy.dtype, None if ref is None else ref.dtype


def _build(tensors: Tensors, settings: Settings) -> tuple[Plan, list[Head], Kept | None]:
    (positions, width), numbers, *dtypes = settings
    entropy, share, ref_share, *limits, keep_targets, ref_kept = numbers[:8]
    heads = []
    for i, dtype in enumerate(each for each in dtypes if each is not None):
        temperature, scale, soft_cap = numbers[8 + 3 * i : 11 + 3 * i]
        heads.append(Head._make([*tensors[3 * i + 1 : 3 * i + 4], dtype, temperature, scale, soft_cap or None]))
    ids, offsets = tensors[7:9]
    recorded = None if ids is None or offsets is None else Kept(ids, offsets)
    truncation, flags = Truncation(int(limits[0]), *limits[1:]), (bool(keep_targets), bool(ref_kept))
    return Plan((positions, width), bool(entropy), (share, ref_share), truncation, *flags), heads, recorded


def _present(tensors: Tensors, settings: Settings) -> list[bool]:
    """Which fields of the result exist."""
    chosen, pair, entropy = tensors[0] is not None, settings[3] is not None, bool(settings[1][0])
    return [pair, chosen, chosen and pair, entropy, tensors[9] is not None]


def _spread(found: list[Tensor], present: Sequence[bool]) -> list[Tensor | None]:
    """A tensor where one is present and None elsewhere, then the remaining tensors."""
    rest = iter(found)
    return [*(next(rest) if each else None for each in present), *rest]


def _dense(tensors: Tensors) -> list[Tensor]:
    return [t for t in tensors if t is not None]


# ------------------------------------------------------------------ operators

_SETTINGS = "SymInt[] chunk, float[] numbers, ScalarType dtype, ScalarType? ref_dtype"


def _forward_op(tensors: Tensors, *settings: Any, keep: int = 0) -> list[Tensor]:
    plan, heads, recorded = _build(tensors, settings)
    if plan.forward_chunk(heads[0]) != plan.chunk or heads[0].weight is None:  # backward has other tiles
        keep = 0
    result, rest = forward_sweep(plan, tensors[0], heads, recorded, tensors[9], keep)
    return _dense([*result, *rest])


def _forward_fake(tensors: Tensors, *settings: Any) -> list[Tensor]:
    plan, heads, _ = _build(tensors, settings)
    *present, listed = _present(tensors, settings)
    new = [heads[0].per_position(0.0) for _ in range(sum(present) + plan.statistics(len(heads)))]
    if listed:
        ids = tensors[9]
        assert ids is not None
        new.insert(sum(present), new[0].new_empty(*ids.shape[:2], ids.shape[2] + 1))
    return new


def _backward_op(
    tensors: Tensors, result: Tensors, rest: list[Tensor], grads: Tensors, needed: list[bool], *settings: Any
) -> list[Tensor]:
    plan, heads, recorded = _build(tensors, settings)
    found = backward_sweep(plan, heads, tensors[0], Result._make(result), rest, grads, needed, recorded, tensors[9])
    return _dense(found)


def _backward_fake(
    tensors: Tensors, result: Tensors, rest: list[Tensor], grads: Tensors, needed: list[bool], *settings: Any
) -> list[Tensor]:
    return _dense(empty_gradients(_build(tensors, settings)[1], needed))


def _top_k_op(tensors: Tensors, k: int, *settings: Any) -> tuple[Tensor, ...]:
    plan, (head,), _ = _build(tensors, settings)
    return top_k_sweep(head, k, plan.chunk, tensors[0])


def _top_k_fake(tensors: Tensors, k: int, *settings: Any) -> tuple[Tensor, ...]:
    _, (head,), _ = _build(tensors, settings)
    tail = head.per_position(0.0)
    values = tail.new_empty(tail.shape[0], k)
    return values.long(), values, tail, tail.clone(), tail.clone()


def _register(
    name: str, function: Callable[..., object], fake: Callable[..., object], inputs: str, outputs: str
) -> None:
    schema = f"({inputs}, {_SETTINGS}) -> {outputs}"
    operator = torch.library.custom_op(f"torchrl_llm_kl::{name}", function, mutates_args=(), schema=schema)
    operator.register_fake(fake)


_register("head_forward", _forward_op, _forward_fake, "Tensor?[] tensors", "Tensor[]")
_register(
    "head_backward",
    _backward_op,
    _backward_fake,
    "Tensor?[] tensors, Tensor?[] result, Tensor[] rest, Tensor?[] grads, bool[] needed",
    "Tensor[]",
)
_register("head_top_k", _top_k_op, _top_k_fake, "Tensor?[] tensors, SymInt k", f"({', '.join(['Tensor'] * 5)})")
