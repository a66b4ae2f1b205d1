"""The backward sweep of the linear head: logits again, tile by tile, and the gradients of hidden states and heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_llm_kl.head._sides import Side, log_ratio, looks
from torchrl_llm_kl.head._tiles import LOG_ZERO, Head, Plan, SweepOutput, local_index, wide

__all__ = ["HeadGradient", "Known", "backward_sweep"]


class Known(NamedTuple):
    """What forward left, ``[N]`` each.

    Args:
        targets: token ids.
        entropy: of the policy.
        kls: of each head what its probabilities weigh: its KL to the other head or the mixture. None: they weigh none.
        statistics: of each head the maximum and the log of the sum of exponentials.
    """

    targets: Tensor | None
    entropy: Tensor | None
    kls: Sequence[Tensor | None]
    statistics: Sequence[Tensor]


class HeadGradient:
    """Gradients of one head's hidden states, weight and bias, those that are needed, summed in float32 or wider."""

    def __init__(self, head: Head, needed: Sequence[bool]) -> None:
        self.head = head
        wanted = [
            tensor if need and tensor is not None else None for tensor, need in zip(head[:3], needed, strict=True)
        ]
        # Empty: the first tile to reach an element writes it. Without tiles there is nothing to write but zeros.
        new = torch.empty_like if head.hidden.shape[0] else torch.zeros_like
        # Each element of logits has one tile; a hidden state or a bias has many, which are summed.
        total = wide if head.weight is not None else (lambda dtype: dtype)
        self.hidden, self.bias = (None if t is None else new(t, dtype=total(t.dtype)) for t in (wanted[0], wanted[2]))
        self.weight = None if wanted[1] is None else new(wanted[1], memory_format=torch.contiguous_format)
        self.columns: Tensor | None = None

    @property
    def needed(self) -> bool:
        """Whether any of them is."""
        return any(t is not None for t in (self.hidden, self.weight, self.bias))

    def add(self, rows: slice, cols: slice, gradient: Tensor, weight: Tensor | None) -> None:
        """Carry the gradient ``[n, v]`` of a tile's products on to what made them."""
        if weight is None:
            assert self.hidden is not None
            self.hidden[rows, cols] = gradient
            return
        if self.bias is not None:
            _accumulate(self.bias[cols], gradient.sum(0), rows.start == 0)
        gradient = gradient.to(self.head.map.dtype)
        if self.hidden is not None:
            _accumulate_product(self.hidden[rows], gradient, weight, cols.start == 0)
        if self.weight is not None:
            if rows.start == 0:
                # Tiles of the same tokens follow each other, so that a few rows in float32 are enough.
                part = self.weight[cols]
                self.columns = part if part.dtype == wide(part.dtype) else torch.empty_like(part, dtype=torch.float32)
            hidden = self.head.hidden[rows].to(gradient.dtype)
            assert self.columns is not None
            _accumulate_product(self.columns, gradient.T, hidden, rows.start == 0)
            if rows.stop == self.head.hidden.shape[0] and self.columns.dtype != self.weight.dtype:
                self.weight[cols] = self.columns.to(self.weight.dtype)

    def results(self) -> list[Tensor | None]:
        """In the dtype of hidden states, weight and bias."""
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


def backward_sweep(
    plan: Plan, heads: list[Head], known: Known, grads: SweepOutput, gradients: list[HeadGradient]
) -> None:
    """Fill ``gradients``, given those of the outputs; None stands for zero."""
    if grads.kl is not None or len(heads) == 1:
        _through_tiles(plan, heads, known, grads, gradients)
        return
    # Without a KL the heads know nothing of each other.
    for i, head in enumerate(heads):
        if gradients[i].needed:
            alone = SweepOutput(_chosen(grads, i), grads.entropy if i == 0 else None, None, None)
            its_own = known._replace(statistics=known.statistics[2 * i : 2 * i + 2])
            _through_tiles(plan, [head], its_own, alone, gradients[i : i + 1])


def _through_tiles(
    plan: Plan, heads: list[Head], known: Known, grads: SweepOutput, gradients: list[HeadGradient]
) -> None:
    with torch.autocast(heads[0].hidden.device.type, enabled=False):
        for look in looks(plan, heads, known.statistics):
            at = _at(look.rows, known, grads)
            for i, head in enumerate(heads):
                if gradients[i].needed:
                    _of_logits(plan, look.sides, i, *at, look.out, look.scratch)
                    _of_products(look.sides[i], head, at[0].targets, _chosen(at[1], i), look.cols, look.out)
                    gradients[i].add(look.rows, look.cols, look.out, look.columns[i][0])


def _at(rows: slice, known: Known, grads: SweepOutput) -> tuple[Known, SweepOutput]:
    """The positions of a tile, values and gradients as columns ``[n, 1]``."""
    given = (known.targets, known.entropy, *known.kls, *grads)
    targets, entropy, kl, ref_kl, *upstream = (None if t is None else t[rows].unsqueeze(-1) for t in given)
    return Known(targets, entropy, (kl, ref_kl), ()), SweepOutput(*upstream)


def _chosen(grads: SweepOutput, i: int) -> Tensor | None:
    return (grads.log_prob, grads.ref_log_prob)[i]


def _of_logits(
    plan: Plan, sides: list[Side], i: int, known: Known, grads: SweepOutput, out: Tensor, scratch: Tensor
) -> None:
    """The gradient of a head's final logits, but for the targets' own term.

    With ``p`` the softmax: ``-p`` for a log-prob, ``-p (log p + H)`` for the entropy ``H``. For a KL that ``p`` weighs
    ``p (log p - log m - KL)``, where ``m`` is the other head's distribution or the mixture: what the mixture moves by
    itself cancels in the sum of both heads' KLs. For a KL that only the other head's ``q`` weighs ``p - q``.
    """
    side, chosen, own = sides[i], _chosen(grads, i), known.kls[i]
    out.zero_()
    if chosen is not None:
        out.sub_(chosen)
    if i == 0 and grads.entropy is not None and known.entropy is not None:
        torch.clamp(side.log_prob, min=LOG_ZERO, out=scratch).add_(known.entropy)
        out.sub_(scratch.mul_(grads.entropy))
    if grads.kl is not None and own is not None:
        out.add_(log_ratio(plan, sides, i, scratch).sub_(own).mul_(grads.kl * plan.shares[i]))
    elif grads.kl is not None:
        out.add_(grads.kl)
    out.mul_(side.prob)
    if grads.kl is not None and own is None:
        out.sub_(torch.mul(sides[1 - i].prob, grads.kl, out=scratch))


def _of_products(
    side: Side, head: Head, targets: Tensor | None, chosen: Tensor | None, cols: slice, out: Tensor
) -> None:
    """Add the targets' own term, and go back through temperature, soft-cap and scale."""
    if chosen is not None and targets is not None:
        index, inside = local_index(targets, cols)
        out.scatter_add_(1, index, chosen * inside)
    if head.map.soft_cap is not None:
        out.mul_(side.bend)
    if head.map.slope != 1.0:
        out.mul_(head.map.slope)
