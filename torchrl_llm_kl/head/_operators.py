"""The sweeps as one differentiable function, as operators of compiled graphs, and over a vocabulary sharded over ranks.

In a compiled graph a sweep is one operator. Tracing into it would unroll its tiles, recompile for every number of positions
and turn its in-place writes into copies of whole gradients.

``tensors`` are the targets; hidden states, weight and bias of the policy and of the reference; ids and offsets of the recorded
tokens; and the ids of outcomes. A missing one is None. Operators take tensors, numbers and lists, and return lists without
None, so ``settings`` hold the other fields of heads and plan in that form.

For sharded heads, each rank sweeps its own slice of the vocabulary and the results are joined. Let ``w`` be the probability of
a slice, and take the results of a slice under its own softmax. The chain rule gives
``log p(token) = log w + log p(token | slice)``, ``H = sum w (H(slice) - log w)`` and
``KL(p || q) = sum w_p (KL(slice) + log w_p - log w_q)``. ``R`` is the number of slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad
from typing_extensions import Unpack

from torchrl_llm_kl._numerics import is_dtensor
from torchrl_llm_kl.head._sweep import backward_sweep, empty_gradients, forward_sweep, top_k_sweep
from torchrl_llm_kl.head._tiles import NO_TOKENS, Head, Kept, Plan, Result, Slice, Tokens, TopKOutput, Truncation

# A forward keeps at most this many bytes of logits for its backward, which recomputes the others.
_KEPT_BYTES = 64 * 2**20
_RESULTS = len(Result._fields)
_TENSORS = 10
Tensors = Sequence[Tensor | None]
Settings = tuple[list[int], list[float], torch.dtype, torch.dtype | None]


def sweep(
    plan: Plan, policy: Head, ref: Head | None, tokens: Tokens = NO_TOKENS, statistics: list[Any] | None = None
) -> Result:
    """The results that ``plan`` requests for one or two heads, differentiable once. For one head ``kl`` is None.

    If the heads are a slice of the vocabulary, the results are for the whole vocabulary. ``statistics`` receives the
    statistics of :func:`forward_sweep`.
    """
    kept_ids, offsets = (None, None) if tokens.recorded is None else tokens.recorded[:2]
    targets, kept_ids, ids = (_from_first(policy.part, each) for each in (tokens.targets, kept_ids, tokens.ids))
    tensors = [targets, *policy[:3], *([None] * 3 if ref is None else ref[:3]), kept_ids, offsets, ids]
    settings = _flatten(plan, policy, ref)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return Result._make(_Sweep.apply(policy.part, settings, statistics, *tensors))
    swept = _forward(policy.part, tensors, settings)
    if statistics is not None:
        statistics += swept[_RESULTS:]
    return Result._make(swept[:_RESULTS])


def top_k(head: Head, k: int, chunk: tuple[int, int], targets: Tensor | None = None) -> TopKOutput:
    targets = _from_first(head.part, targets)
    own, log_sum = top_k_sweep(head, min(k, head.vocab), chunk, targets)
    return own if head.part is None else join_top_k(head.part, k, own, log_sum, targets)


def _from_first(part: Slice | None, ids: Tensor | None) -> Tensor | None:
    """Token ids relative to the first token of a slice."""
    return ids if part is None or ids is None else ids - part.first


class _Sweep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, part: Slice | None, settings: Settings, statistics: list[Any] | None, *tensors: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.part, ctx.settings = part, settings
        ctx.set_materialize_grads(False)
        swept = _forward(part, tensors, settings, keep=_KEPT_BYTES)
        ctx.save_for_backward(*tensors, *swept)
        if statistics is not None:
            plan, heads, _ = _build(tensors, settings)
            statistics += swept[_RESULTS : _RESULTS + plan.statistics(len(heads))]
        return tuple(swept[:_RESULTS])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = list(ctx.saved_tensors)  # only once: a checkpoint refuses to unpack twice
        first = _TENSORS + _RESULTS
        tensors, result, rest = saved[:_TENSORS], saved[_TENSORS:first], saved[first:]
        needed = list(ctx.needs_input_grad[4:10])  # after part, settings, statistics and targets
        arguments = (tensors, result, rest, list(grads), needed, *ctx.settings)
        backward = torch.ops.torchrl_llm_kl.head_backward if torch.compiler.is_compiling() else _backward_op
        gradients = _spread(backward(*arguments), needed)
        if ctx.part is not None:
            ctx.part.add(gradients[0]), ctx.part.add(gradients[3])  # gradients of the hidden states
        return None, None, None, None, *gradients, None, None, None


def _forward(part: Slice | None, tensors: Tensors, settings: Settings, keep: int = 0) -> Tensors:
    """The fields of the result, then the statistics and kept logits. In a compiled graph no logits are kept."""
    if torch.compiler.is_compiling():
        swept = torch.ops.torchrl_llm_kl.head_forward(list(tensors), *settings)
    else:
        swept = _forward_op(tensors, *settings, keep=keep)
    spread = _spread(swept, _present(tensors, settings))
    if part is None:
        return spread
    plan, heads, _ = _build(tensors, settings)
    end = _RESULTS + plan.statistics(len(heads))
    result, statistics = join_slices(part, plan, tensors[0], spread[:end], tensors[9])
    return [*result, *statistics, *spread[end:]]


def _flatten(plan: Plan, policy: Head, ref: Head | None) -> Settings:
    flags = (plan.entropy, *plan.shares, *plan.truncation, plan.keep_targets, plan.ref_kept)
    heads = [policy] if ref is None else [policy, ref]
    numbers = [number for each in heads for number in (each.temperature, each.scale, each.soft_cap or 0.0)]
    return list(plan.chunk), [float(x) for x in (*flags, *numbers)], policy.dtype, None if ref is None else ref.dtype


def _build(tensors: Tensors, settings: Settings) -> tuple[Plan, list[Head], Tokens]:
    (positions, width), numbers, *dtypes = settings
    entropy, share, ref_share, *limits, keep_targets, ref_kept = numbers[:8]
    heads = []
    for i, dtype in enumerate(each for each in dtypes if each is not None):
        temperature, scale, soft_cap = numbers[8 + 3 * i : 11 + 3 * i]
        heads.append(Head._make([*tensors[3 * i + 1 : 3 * i + 4], dtype, temperature, scale, soft_cap or None, None]))
    ids, offsets = tensors[7:9]
    recorded = None if ids is None or offsets is None else Kept(ids, offsets)
    truncation, flags = Truncation(int(limits[0]), *limits[1:]), (bool(keep_targets), bool(ref_kept))
    plan = Plan((positions, width), bool(entropy), (share, ref_share), truncation, *flags)
    return plan, heads, Tokens(tensors[0], recorded, tensors[9])


def _present(tensors: Tensors, settings: Settings) -> list[bool]:
    """For each field of the result, whether it exists."""
    chosen, pair, entropy = tensors[0] is not None, settings[3] is not None, bool(settings[1][0])
    return [pair, chosen, chosen and pair, entropy, tensors[9] is not None]


def _spread(dense: list[Tensor], present: Sequence[bool]) -> list[Tensor | None]:
    """Insert None where a tensor is not ``present``. The remaining tensors follow."""
    rest = iter(dense)
    return [*(next(rest) if each else None for each in present), *rest]


def _dense(tensors: Tensors) -> list[Tensor]:
    return [t for t in tensors if t is not None]


# ------------------------------------------------------------------ operators

_SETTINGS = "SymInt[] chunk, float[] numbers, ScalarType dtype, ScalarType? ref_dtype"


def _forward_op(tensors: Tensors, *settings: Unpack[Settings], keep: int = 0) -> list[Tensor]:
    plan, heads, tokens = _build(tensors, settings)
    if plan.forward_chunk(heads[0]) != plan.chunk or heads[0].weight is None:  # the backward has other tiles
        keep = 0
    result, rest = forward_sweep(plan, heads, tokens, keep)
    return _dense([*result, *rest])


def _forward_fake(tensors: Tensors, *settings: Unpack[Settings]) -> list[Tensor]:
    plan, heads, _ = _build(tensors, settings)
    present = _present(tensors, settings)[:-1]
    new = [heads[0].per_position(0.0) for _ in range(sum(present) + plan.statistics(len(heads)))]
    ids = tensors[9]
    if ids is not None:
        new.insert(sum(present), new[0].new_empty(*ids.shape[:2], ids.shape[2] + 1))
    return new


def _backward_op(
    tensors: Tensors, result: Tensors, rest: list[Tensor], grads: Tensors, needed: list[bool], *settings: Any
) -> list[Tensor]:
    plan, heads, tokens = _build(tensors, settings)
    return _dense(backward_sweep(plan, heads, tokens, Result._make(result), rest, grads, needed))


def _backward_fake(
    tensors: Tensors, result: Tensors, rest: list[Tensor], grads: Tensors, needed: list[bool], *settings: Any
) -> list[Tensor]:
    return _dense(empty_gradients(_build(tensors, settings)[1], needed))


_SAVED = "Tensor?[] result, Tensor[] rest, Tensor?[] grads, bool[] needed"
for _function, _fake, _name, _inputs in (
    (_forward_op, _forward_fake, "forward", "Tensor?[] tensors"),
    (_backward_op, _backward_fake, "backward", f"Tensor?[] tensors, {_SAVED}"),
):
    _schema = f"({_inputs}, {_SETTINGS}) -> Tensor[]"
    _op = torch.library.custom_op(f"torchrl_llm_kl::head_{_name}", _function, mutates_args=(), schema=_schema)
    _op.register_fake(_fake)


# ------------------------------------------------------------------ a vocabulary that is sharded over ranks


def local_part(prefix: str, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None, Slice | None]:
    """Weight and bias on this rank, and its slice of the vocabulary, or None if the head is not sharded.

    Raises a ValueError, on all ranks, for a DTensor that is sharded over another dimension than the vocabulary.
    """
    if not is_dtensor(weight):
        return weight, bias, None
    mesh, placements = weight.device_mesh, weight.placements  # type: ignore[attr-defined]
    sharded = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
    if len(sharded) > 1 or not all(placements[dim].is_shard(0) for dim in sharded):
        raise ValueError(
            f"{prefix}weight is a DTensor with placements {placements}: expected Shard(0), the vocabulary, on at most one "
            "dimension of the mesh. A weight that FSDP2 shards is whole inside a call of its module."
        )
    parts: list[Any] = [None if t is None else t.to_local() for t in (weight, bias)]  # type: ignore[attr-defined]
    if not sharded:
        return parts[0], parts[1], None
    vocab, ranks = weight.shape[0], mesh.size(sharded[0])
    step = -(-vocab // ranks)
    first = mesh.get_local_rank(sharded[0]) * step
    return *parts, Slice(mesh.get_group(sharded[0]), first, parts[0].shape[0], vocab)


def join_slices(
    part: Slice, plan: Plan, targets: Tensor | None, swept: Sequence[Tensor | None], ids: Tensor | None = None
) -> tuple[Result, list[Tensor]]:
    """Join the results and statistics of this rank's slice with the other slices, for the whole vocabulary.

    ``targets``, and the ``ids`` of outcomes, are relative to the first token of the slice.
    """
    kl, log_prob, ref_log_prob, entropy, outcomes, *statistics = swept
    # If a slice has no possible token, the log of its sum is -inf and everything else is NaN.
    log_probs = [log_prob, ref_log_prob]
    if targets is not None:
        here = (targets >= 0) & (targets < part.size)
        log_probs = [
            None if each is None else each.masked_fill(~here | statistics[2 * i + 1].isneginf(), -torch.inf)  # type: ignore[union-attr]
            for i, each in enumerate(log_probs)
        ]
    sent = [t for t in (kl, *log_probs, entropy, *statistics) if t is not None]
    rest = iter(part.gather(torch.stack(sent)).unbind(1))
    kl, log_prob, ref_log_prob, entropy = (None if t is None else next(rest) for t in (kl, *log_probs, entropy))
    joined, log_w = [], []
    for top, log_total in zip(rest, rest, strict=True):
        common = top.amax(0)
        shares = top - common + log_total
        # The slice of the largest logit contributes exp(x) - 1, and log1p adds the 1: exact where the others are tiny.
        largest = torch.arange(len(top), device=top.device)[:, None] == top.argmax(0)
        joined += [common, torch.where(largest, shares.expm1(), shares.exp()).sum(0).log1p()]
        log_w.append(shares - joined[-1])
    if targets is not None:
        known = (targets >= -part.first) & (targets < part.vocab - part.first)
        log_prob, ref_log_prob = (
            None if t is None else (t + log_w[i]).amax(0).masked_fill(~known, torch.nan)
            for i, t in enumerate((log_prob, ref_log_prob))
        )
    if entropy is not None:
        entropy = _weighted_mean(log_w[0], entropy - log_w[0])
    if kl is not None:
        a, b = plan.weighing, 1 - plan.weighing
        kl = _weighted_mean(log_w[a], (kl + log_w[a] - log_w[b]).masked_fill(log_w[b].isneginf(), torch.inf))
    if outcomes is not None and ids is not None:
        outcomes = _join_outcomes(part, ids, outcomes, statistics[1], log_w[0])
    return Result(kl, log_prob, ref_log_prob, entropy, outcomes), joined


def _join_outcomes(part: Slice, ids: Tensor, outcomes: Tensor, log_total: Tensor | None, log_w: Tensor) -> Tensor:
    """The outcomes ``[N, M, k + 1]`` of the whole vocabulary. Each id is in one slice, the other tokens in all."""
    assert log_total is not None
    here = pad((ids >= 0) & (ids < part.size), (0, 1), value=True)
    own = outcomes.masked_fill(~here | log_total.isneginf().view(-1, 1, 1), -torch.inf)
    joined = (part.gather(own) + log_w.unsqueeze(-1).unsqueeze(-1)).logsumexp(0)
    unknown = pad(ids >= part.vocab - part.first, (0, 1), value=False)
    return joined.masked_fill(unknown, torch.nan)


def _weighted_mean(log_w: Tensor, values: Tensor) -> Tensor:
    """``sum w values`` over the slices, with ``0 * NaN = 0``, ``[R, N]`` to ``[N]``."""
    w = log_w.exp()
    return (w * values).masked_fill(w == 0, 0.0).sum(0)


def join_top_k(part: Slice, k: int, own: TopKOutput, log_sum: Tensor, targets: Tensor | None = None) -> TopKOutput:
    """The top ``k`` of the whole vocabulary, from this rank's slice and the log-sum-exp of its logits ``[N]``.

    ``targets`` are relative to the first token of the slice. The tail consists of the slices' tails and of their candidates
    that are not among the ``k``.
    """
    lacking = (0, k - own.indices.shape[1])  # a slice may hold fewer than k tokens
    log_probs = pad(own.log_probs, lacking, value=-torch.inf)
    chosen = torch.full_like(log_sum, -torch.inf)
    if targets is not None and own.log_prob is not None:
        here = (targets >= 0) & (targets < part.size) & ~log_sum.isneginf()
        chosen = torch.where(here, own.log_prob, chosen)
    sent = torch.cat([log_probs, *(x.unsqueeze(-1) for x in (own.tail_log_prob, chosen, log_sum))], -1)
    indices = pad(own.indices + part.first, lacking)
    values, tokens = part.gather(sent).transpose(0, 1), part.gather(indices).transpose(0, 1)  # [N, R, ...]
    log_w = values[:, :, -1:] - values[:, :, -1:].logsumexp(1, keepdim=True)
    # A slice without a possible token has only NaN.
    values = (values[:, :, :-1] + log_w).masked_fill(log_w.isneginf(), -torch.inf)
    log_probs, order = values[:, :, :-2].flatten(1).sort(dim=-1, descending=True, stable=True)
    tail = torch.cat([values[:, :, -2], log_probs[:, k:]], -1).logsumexp(-1)
    log_prob = None
    if targets is not None:
        known = (targets >= -part.first) & (targets < part.vocab - part.first)
        log_prob = values[:, :, -1].amax(1).masked_fill(~known, torch.nan)
    return TopKOutput(tokens.flatten(1).gather(1, order)[:, :k], log_probs[:, :k], tail, log_prob)
