"""The backward sweep: gradients of hidden states and heads, tile by tile, from logits that forward kept or that it recomputes.

Forward has saved the sums over the vocabulary, so each tile yields final log-probs directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import wide_dtype
from torchrl_llm_kl._private import onednn_linear
from torchrl_llm_kl.head._support import WHOLE, local_index
from torchrl_llm_kl.head._tiles import (
    LOG_ZERO,
    Head,
    Plan,
    Result,
    Tokens,
    log_ratio_to_mixture,
    support_of,
    tiles,
    without_ids,
)


def backward_sweep(
    plan: Plan,
    heads: list[Head],
    tokens: Tokens,
    result: Result,
    statistics: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of hidden states, weight and bias of each head; None where not ``needed``.

    ``grads`` belong to the fields of forward's ``result``, None for zero. ``statistics`` are all else that forward returned.
    """
    if not any(needed):
        return [None] * len(needed)
    of_kl, of_log_prob, of_ref_log_prob, of_entropy, of_outcomes = grads
    count = plan.statistics(len(heads))
    statistics, kept = statistics[:count], statistics[count:]
    if of_kl is None and len(heads) == 2 and not plan.ref_kept:
        # Without a KL the heads are independent: one sweep each, with the buffers of one.
        of_policy = (None, of_log_prob, None, of_entropy, of_outcomes)
        of_ref = (None, of_ref_log_prob, None, None, None)
        floor = statistics[count - plan.truncation.active :]
        own, others = [*statistics[:2], *floor, *kept[::2]], [*statistics[2:4], *kept[1::2]]
        ref_result, whole = result._replace(log_prob=result.ref_log_prob), replace(plan, truncation=WHOLE)
        return [
            *backward_sweep(plan, heads[:1], tokens, result, own, of_policy, needed[:3]),
            *backward_sweep(whole, heads[1:], Tokens(tokens.targets), ref_result, others, of_ref, needed[3:]),
        ]
    gradients = [_HeadGradient(head, needed[3 * i : 3 * i + 3]) for i, head in enumerate(heads)]
    kls: Sequence[Tensor | None] = [result.kl if i == plan.weighing else None for i in range(2)]
    if plan.mixture and len(heads) == 2:
        kls = statistics[4:6]
    support = support_of(plan, tokens, statistics[-1], find=False)
    per_position = (tokens.targets, result.log_prob, result.ref_log_prob, result.entropy, *kls, *grads[:4])
    listed = None
    if of_outcomes is not None and tokens.ids is not None and result.outcomes is not None:
        # An outcome without probability keeps none: -inf has no slope.
        listed = _ListedGradients(tokens.ids, result.outcomes, of_outcomes.masked_fill(result.outcomes.isneginf(), 0.0))
    with torch.autocast(heads[0].hidden.device.type, enabled=False):
        for rows, cols, columns, logits, (*spare, out, scratch) in tiles(
            plan.chunk, heads, 2 * len(heads) + 2, kept, support, plan.ref_kept
        ):
            sides = [_Side(logits[i], *spare[2 * i : 2 * i + 2]) for i in range(len(heads))]
            for i, head in enumerate(heads):
                sides[i].normalise(head, statistics[2 * i : 2 * i + 2], rows)
            columns_of = (None if t is None else t[rows].unsqueeze(-1) for t in per_position)
            row = _Row._make([*columns_of, None if listed is None else listed.rows(rows)])
            for i, head in enumerate(heads):
                if gradients[i].needed:
                    _product_gradient(plan, head, sides, i, row, cols, out, scratch)
                    gradients[i].add(rows, cols, out, columns[i][0])
    return [each for gradient in gradients for each in gradient.results()]


def empty_gradients(heads: list[Head], needed: Sequence[bool]) -> list[Tensor | None]:
    """Uninitialised tensors in the form of :func:`backward_sweep`'s result."""
    return [g for i, head in enumerate(heads) for g in _HeadGradient(head, needed[3 * i : 3 * i + 3]).results()]


class _Row(NamedTuple):
    """Values of the positions of a tile and the gradients of the results there, as columns ``[n, 1]``."""

    targets: Tensor | None
    log_prob: Tensor | None
    ref_log_prob: Tensor | None
    entropy: Tensor | None
    # The KL that the probabilities of each head weigh, to the other head or to the mixture; None for none.
    kl: Tensor | None
    ref_kl: Tensor | None
    of_kl: Tensor | None
    of_log_prob: Tensor | None
    of_ref_log_prob: Tensor | None
    of_entropy: Tensor | None
    listed: _ListedGradients | None  # the policy's


class _ListedGradients(NamedTuple):
    """Listed ids ``[n, M, k]``, the log-probs of them and of all other tokens, and their gradients; ``[n, M, k + 1]``."""

    ids: Tensor
    log_probs: Tensor
    grads: Tensor

    def rows(self, rows: slice) -> _ListedGradients:
        return _ListedGradients._make(t[rows] for t in self)

    def add_others(self, side: _Side, cols: slice, out: Tensor, scratch: Tensor) -> None:
        """Add to ``out [n, v]`` what the others' log-prob adds: each token's share of their probability."""
        lowest = torch.finfo(out.dtype).min
        for i in range(self.ids.shape[1]):
            others, gradient = self.log_probs[:, i, -1:].clamp(min=lowest), self.grads[:, i, -1:]
            share = without_ids(side.log_prob, self.ids[:, i], cols, scratch).sub_(others).exp_()
            out.add_(share.mul_(gradient))

    def add_ids(self, cols: slice, out: Tensor) -> None:
        """Add to ``out [n, v]`` the gradients of the ids' log-probs."""
        index, inside = local_index(self.ids.flatten(1), cols)
        out.scatter_add_(1, index, self.grads[..., :-1].flatten(1) * inside)


class _Side(NamedTuple):
    """One head's tile: log-probs, probabilities and, with a soft cap, ``1 - tanh ** 2``; ``[n, v]`` each."""

    log_prob: Tensor
    prob: Tensor
    bend: Tensor

    def normalise(self, head: Head, statistics: Sequence[Tensor], rows: slice) -> None:
        """Turn the logits in ``log_prob`` into log-probs, and fill the rest."""
        if head.soft_cap is not None:
            torch.div(self.log_prob, head.gain, out=self.bend).clamp_(min=-1.0)  # -inf: a token that was ruled out
            torch.square(self.bend, out=self.bend).neg_().add_(1.0)
        for statistic in statistics:
            self.log_prob.sub_(statistic[rows].unsqueeze(-1))
        torch.exp(self.log_prob, out=self.prob)


def _product_gradient(
    plan: Plan, head: Head, sides: list[_Side], i: int, row: _Row, cols: slice, out: Tensor, scratch: Tensor
) -> None:
    """Fill ``out`` with the gradient of head ``i``'s products.

    Of the logits first. With ``p`` the softmax: ``-p``, and ``1 - p`` at the target, for a log-prob; ``-p (log p + H)`` for the
    entropy ``H``. For a KL that ``p`` weighs ``p (log p - log m - KL)``, where ``m`` is the other head's distribution or
    the mixture: the movement of the mixture itself cancels in the sum of both heads' KLs. For a KL that only the other
    head's ``q`` weighs ``p - q``. For the log-prob of a set of tokens ``-p``, and each token's share of the set inside it.
    Then back through temperature, soft cap and scale.
    """
    side, of_log_prob, own = sides[i], (row.of_log_prob, row.of_ref_log_prob)[i], (row.kl, row.ref_kl)[i]
    listed = None if i else row.listed
    out.zero_()
    index = inside = None
    if of_log_prob is not None and row.targets is not None:
        out.sub_(of_log_prob)
        index, inside = local_index(row.targets, cols)
        out.scatter_(1, index, out.gather(1, index).masked_fill_(inside, 0.0))
    if listed is not None:
        out.sub_(listed.grads.sum((1, 2)).unsqueeze(-1))
    if i == 0 and row.of_entropy is not None and row.entropy is not None:
        torch.clamp(side.log_prob, min=LOG_ZERO, out=scratch).add_(row.entropy)
        out.sub_(scratch.mul_(row.of_entropy))
    if row.of_kl is not None and own is not None:
        if plan.mixture:
            log_ratio_to_mixture(plan, [s.log_prob for s in sides], i, scratch)
        else:
            torch.sub(side.log_prob, sides[1 - i].log_prob, out=scratch).masked_fill_(side.prob == 0, 0.0)
        out.add_(scratch.sub_(own).mul_(row.of_kl * plan.shares[i]))
    out.mul_(side.prob)
    if row.of_kl is not None and own is None:
        out.add_(_prob_difference(side, sides[1 - i], scratch).mul_(row.of_kl))
    if index is not None and inside is not None and of_log_prob is not None:
        log_prob = (row.log_prob, row.ref_log_prob)[i]
        assert log_prob is not None
        # 1 - p from the log-prob: of a token that is nearly certain, p rounds to 1.
        out.scatter_add_(1, index, torch.where(inside, of_log_prob * -log_prob.expm1(), 0.0))
    if listed is not None:
        listed.add_others(side, cols, out, scratch)
        listed.add_ids(cols, out)
    if head.soft_cap is not None:
        out.mul_(side.bend)
    if head.slope != 1.0:
        out.mul_(head.slope)


def _prob_difference(side: _Side, other: _Side, out: Tensor) -> Tensor:
    """``p - q``, in ``out [n, v]``; from the log-probs where both may round to 1."""
    torch.sub(side.prob, other.prob, out=out)
    rows = None  # On an accelerator all: to choose some would be a host sync.
    if out.device.type == "cpu":
        rows = (side.prob.amax(-1) > 0.9).nonzero().squeeze(1)
    prob, log_p, log_q, some = (x if rows is None else x[rows] for x in (side.prob, side.log_prob, other.log_prob, out))
    place = prob.argmax(-1, keepdim=True)
    some.scatter_(1, place, log_p.gather(1, place).expm1() - log_q.gather(1, place).expm1())
    return some if rows is None else out.index_copy_(0, rows, some)


class _HeadGradient:
    """Gradients of one head's hidden states, weight and bias, summed in float32 or wider; None if not needed."""

    def __init__(self, head: Head, needed: Sequence[bool]) -> None:
        self.head = head
        hidden, weight, bias = (t if need else None for t, need in zip(head[:3], needed, strict=True))
        # Uninitialised: the first tile to reach an element writes it. No tile has written them without positions.
        new = torch.empty_like if head.hidden.shape[0] else torch.zeros_like
        # Without a weight each element has one tile; hidden states and biases otherwise have many, which are summed.
        summed = head.weight is not None
        self.hidden, self.bias = (
            None if t is None else new(t, dtype=wide_dtype(t.dtype) if summed else t.dtype) for t in (hidden, bias)
        )
        self.weight = None if weight is None else new(weight, memory_format=torch.contiguous_format)
        self._columns: Tensor | None = None

    @property
    def needed(self) -> bool:
        return any(t is not None for t in (self.hidden, self.weight, self.bias))

    def add(self, rows: slice, cols: slice, gradient: Tensor, weight: Tensor | None) -> None:
        """Propagate the gradient ``[n, v]`` of a tile's products; ``weight [v, H]`` belongs to its tokens."""
        if weight is None:
            assert self.hidden is not None
            self.hidden[rows, cols] = gradient
            return
        if self.bias is not None:
            _accumulate(self.bias[cols], gradient.sum(0), rows.start == 0)
        gradient = gradient.to(self.head.dtype)
        if self.hidden is not None:
            product = onednn_linear(gradient, weight.T) if self.hidden.dtype == gradient.dtype else None
            if product is None:
                _accumulate_product(self.hidden[rows], gradient, weight, cols.start == 0)
            else:
                _accumulate(self.hidden[rows], product, cols.start == 0)
        if self.weight is not None:
            if rows.start == 0:
                # Tiles of the same tokens are consecutive, so a few rows in float32 are enough.
                part = self.weight[cols]
                wide = wide_dtype(part.dtype)
                self._columns = part if part.dtype == wide else torch.empty_like(part, dtype=wide)
            hidden = self.head.hidden[rows].to(gradient.dtype)
            assert self._columns is not None
            _accumulate_product(self._columns, gradient.T, hidden, rows.start == 0)
            if rows.stop == self.head.hidden.shape[0] and self._columns.dtype != self.weight.dtype:
                self.weight[cols] = self._columns.to(self.weight.dtype)

    def results(self) -> list[Tensor | None]:
        """The gradients in the dtypes of hidden states, weight and bias."""
        gradients = (self.hidden, self.weight, self.bias)
        return [g if g is None or t is None else g.to(t.dtype) for g, t in zip(gradients, self.head[:3], strict=True)]


def _accumulate(total: Tensor, part: Tensor, first: bool) -> None:
    if first:
        total.copy_(part)
    else:
        total.add_(part)


def _accumulate_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, beta=0 if first else 1, out=total)
    else:
        _accumulate(total, a @ b, first)
