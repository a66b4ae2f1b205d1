"""The few tokens that truncated sampling keeps: found in whole rows, then scored without reading any other.

They have as many logits as a sampler has choices, and so have all sums over them, and the gradient: backward does not read the
rows of the head that no position keeps.

``N`` positions, ``M`` kept tokens of all positions, ``H`` hidden, ``V`` vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchrl_llm_kl.head._support import Kept, Truncation, floors_of, from_zero, spare
from torchrl_llm_kl.head._sweep import forward_sweep
from torchrl_llm_kl.head._tiles import LOG_ZERO, Head, Plan, Result, tiles

# Rows of a head that are gathered at once, in elements.
_GATHERED = 2**22


def most_kept(vocab: int) -> int:
    """Tokens of a position, on average, up to which sums over kept tokens are faster than sums over all, and small."""
    return max(64, vocab // 64)


@torch.no_grad()
def find_kept(
    head: Head, truncation: Truncation, chunk: tuple[int, int], targets: Tensor | None, most: int
) -> Kept | None:
    """The tokens of :func:`linear_kept`; None if a block of positions keeps more than ``most`` of each on average."""
    none = head.hidden.new_zeros(0, dtype=torch.long)
    parts = [(none, head.per_position(0.0)[:0], none, none.bool())]
    with torch.autocast(head.hidden.device.type, enabled=False):
        for rows, cols, _, (logits,), _ in tiles(Plan(chunk, truncation=truncation).forward_chunk(head), [head], 0):
            floor = floors_of(logits, truncation).clamp(min=torch.finfo(logits.dtype).min)  # -inf is never kept
            out = logits < floor.unsqueeze(1)
            added = spare(out, None if targets is None else targets[rows], cols)
            row, ids = (~out).nonzero(as_tuple=True)
            if len(row) > most * len(logits):
                return None
            parts.append((ids, logits[row, ids], torch.bincount(row, minlength=len(logits)), added))
    ids, kept, counts, added = (torch.cat(each) for each in zip(*parts, strict=True))
    return Kept(ids, from_zero(counts.cumsum(0)), kept, added)


def kept_scores(plan: Plan, targets: Tensor | None, policy: Head, ref: Head | None, kept: Kept) -> Result:
    """The results of a sweep over the kept tokens alone; differentiable once, with respect to the policy.

    A reference that is not restricted to them needs a sweep for its sum over all tokens.
    """
    (count, vocab), ids, rows = policy.sizes, kept.ids.long(), kept.rows
    if kept.logits is None:
        ids, rows = _distinct(ids, rows, vocab)
    offsets = from_zero(torch.bincount(rows, minlength=count).cumsum(0))
    found = _logits_at(policy, ids, offsets) if kept.logits is None else kept.logits.to(policy.wide)
    log_p = _log_softmax(_Logits.apply(policy, *policy[:3], ids, rows, offsets, found), rows, count)
    here = None if targets is None else ids == targets[rows]
    kl = ref_log_prob = None
    if ref is not None:
        log_q = _logits_at(ref, ids, offsets)
        if plan.ref_kept:
            log_q = _log_softmax(log_q, rows, count)
            ref_log_prob = _at(log_q, here, rows, count)
        else:
            swept, (top, log_total) = forward_sweep(Plan(plan.chunk), targets, [ref])
            log_q, ref_log_prob = log_q - top[rows] - log_total[rows], swept.log_prob
        first, second = (log_p, log_q) if plan.shares[0] else (log_q, log_p)
        kl = _sums(first.exp() * (first - second).masked_fill(first.isneginf(), 0.0), rows, count)
    entropy = -_sums(log_p.exp() * log_p.clamp(min=LOG_ZERO), rows, count) if plan.entropy else None
    return Result(kl, _at(log_p, here, rows, count), ref_log_prob, entropy, None)


def _distinct(ids: Tensor, rows: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """Each token of a position once, by position."""
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= vocab):
        raise ValueError(
            f"kept.ids holds token ids from {int(ids.min())} to {int(ids.max())}; expected 0 to {vocab - 1}, the rows of "
            "weight."
        )
    pairs = (rows * vocab + ids).unique()
    return pairs % vocab, pairs // vocab


# ------------------------------------------------------------------ sums over the kept tokens of each position


def _sums(values: Tensor, rows: Tensor, count: int) -> Tensor:
    return values.new_zeros(count).index_add(0, rows, values)


def _log_softmax(logits: Tensor, rows: Tensor, count: int) -> Tensor:
    """Log-probs over the kept tokens of each position; ``[M]``."""
    limits, values = torch.finfo(logits.dtype), logits.detach()
    # The difference of logits first: it is exact where the logits are large.
    shifted = logits - values.new_full((count,), limits.min).scatter_reduce(0, rows, values, "amax")[rows]
    return shifted - _sums(shifted.exp(), rows, count).clamp(min=limits.tiny).log()[rows]


def _at(values: Tensor, here: Tensor | None, rows: Tensor, count: int) -> Tensor | None:
    """Values at the targets; ``-inf`` at a position whose target is not kept; ``[N]``, None without targets."""
    if here is None:
        return None
    return values.new_full((count,), -math.inf).index_put((rows[here],), values[here])


# ------------------------------------------------------------------ logits of some tokens of each position


class _Logits(torch.autograd.Function):
    """Logits that were computed already, as a function of hidden states, weight and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        head: Head,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        rows: Tensor,
        offsets: Tensor,
        logits: Tensor,
    ) -> Tensor:
        ctx.soft_cap, ctx.gain, ctx.slope = head.soft_cap, head.gain, head.slope
        ctx.save_for_backward(hidden, weight, bias, ids, rows, offsets, None if head.soft_cap is None else logits)
        return logits.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ids, rows, offsets, logits = ctx.saved_tensors
        g = g * ctx.slope if ctx.soft_cap is None else g * ctx.slope * (1 - (logits / ctx.gain).square())
        of_hidden = of_weight = of_bias = None
        if ctx.needs_input_grad[1]:
            of_hidden = _weighted_rows(weight, ids, offsets, g).to(hidden.dtype)
        if ctx.needs_input_grad[2]:
            of_weight = torch.zeros_like(weight, memory_format=torch.contiguous_format)
            order = ids.argsort(stable=True)
            some, counts = ids[order].unique_consecutive(return_counts=True)
            sums = _weighted_rows(hidden, rows[order], from_zero(counts.cumsum(0)), g[order])
            of_weight[some] = sums.to(weight.dtype)
        if ctx.needs_input_grad[3]:
            of_bias = torch.zeros_like(bias, dtype=g.dtype).index_add(0, ids, g).to(bias.dtype)
        return None, of_hidden, of_weight, of_bias, None, None, None, None


def _logits_at(head: Head, ids: Tensor, offsets: Tensor) -> Tensor:
    """The logits of some tokens of each position, computed as :meth:`Head.logits` does; ``[M]``."""
    assert head.weight is not None
    parts = []
    with torch.no_grad(), torch.autocast(head.hidden.device.type, enabled=False):
        for first, last, begin, end in _runs(offsets, len(ids), head.weight.shape[1]):
            some = ids[begin:end]
            row = torch.arange(first, last, device=ids.device).repeat_interleave(
                offsets[first : last + 1].diff(), output_size=end - begin
            )
            product = head.weight[some].to(head.dtype).to(head.wide)
            product = product.mul_(head.hidden[row].to(head.dtype).to(head.wide)).sum(-1)
            if head.bias is not None:
                product += head.bias[some].to(head.dtype)
            parts.append(product.to(head.dtype).to(head.wide))  # a head in half precision rounds its logits
    out = torch.cat(parts) if parts else head.per_position(0.0)[:0]
    out = out * (head.scale / (head.soft_cap or head.temperature))
    return out if head.soft_cap is None else out.tanh_().mul_(head.gain)


def _weighted_rows(table: Tensor, index: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
    """``sum weights[j] * table[index[j]]`` over each segment of ``offsets``, in the dtype of the weights."""
    if table.dtype == weights.dtype:
        return _bags(table, index, offsets, weights)
    out = [weights.new_zeros(0, table.shape[1])]
    for first, last, begin, end in _runs(offsets, len(index), table.shape[1]):
        some, place = index[begin:end].unique(return_inverse=True)
        wide = table[some].to(weights.dtype)
        out.append(_bags(wide, place, offsets[first : last + 1] - begin, weights[begin:end]))
    return torch.cat(out)


def _bags(table: Tensor, index: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
    if not len(index):
        return table.new_zeros(len(offsets) - 1, table.shape[1])
    return F.embedding_bag(index, table, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True)


def _runs(offsets: Tensor, total: int, width: int) -> list[tuple[int, int, int, int]]:
    """Segments from ``first`` to ``last`` with their elements ``begin`` to ``end``, so few that rows of all fit."""
    count = len(offsets) - 1
    step = max(1, count * _GATHERED // max(total * width, 1))
    edges = [*range(0, count, step), count]
    places = offsets[torch.tensor(edges, device=offsets.device)].tolist()
    return [
        (first, last, begin, end)
        for first, last, begin, end in zip(edges[:-1], edges[1:], places[:-1], places[1:], strict=True)
    ]
