"""The forward sweep of the linear head: tiles of positions x vocabulary and an online softmax."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_llm_kl.head._sides import log_ratio_to_mixture
from torchrl_llm_kl.head._tiles import LOG_ZERO, Head, Plan, Swept, Tiles, local_index, wide

__all__ = ["forward_sweep"]


@torch.no_grad()
def forward_sweep(plan: Plan, targets: Tensor | None, heads: list[Head]) -> Swept:
    """All that is asked, in one pass over the vocabulary."""
    policy, pair = heads[0], len(heads) == 2
    tiles = Tiles(plan.forward_chunk(policy), policy, 2 * len(heads) + 1)
    states = [_Softmax(head) for head in heads]
    moment, kls = policy.state(0.0), [head.state(0.0) for head in heads]
    with torch.autocast(policy.hidden.device.type, enabled=False):
        for cols in tiles.columns():
            columns = [head.columns(cols) for head in heads]
            for rows in tiles.rows():
                *buffers, scratch = tiles.buffers(rows, cols)
                sides = [_Tile(*buffers[2 * i : 2 * i + 2]) for i in range(len(heads))]
                joints = []
                for tile, head, state, column in zip(sides, heads, states, columns, strict=True):
                    head.logits(rows, cols, column, out=tile.logits)
                    if targets is not None:
                        state.choose(tile.logits, targets[rows], rows, cols)
                    joints.append(state.absorb(tile, rows))
                if plan.entropy or pair:
                    for tile, joint in zip(sides, joints, strict=True):
                        tile.logits.sub_(joint.top.unsqueeze(-1))
                if plan.entropy:
                    _add_moment(moment[rows], sides[0], joints[0], scratch)
                if pair and plan.mixture:
                    for i, kl in enumerate(kls):
                        ratio = log_ratio_to_mixture(plan, sides[i].prob, sides[1 - i].prob, i, scratch)
                        torch.sum(ratio.mul_(sides[i].prob), -1, out=kl[rows])
                elif pair:
                    a = plan.weighing
                    _add_difference(kls[a][rows], sides, joints, a, scratch)
        return _finish(plan, targets, states, moment, kls)


def _finish(plan: Plan, targets: Tensor | None, states: list[_Softmax], moment: Tensor, kls: list[Tensor]) -> Swept:
    log_totals = [state.total.log() for state in states]
    # Differences of logits first: they are exact where the logits are large.
    log_probs = [
        None if targets is None else state.chosen - state.top - log_total
        for state, log_total in zip(states, log_totals, strict=True)
    ]
    entropy = log_totals[0] - moment / states[0].total if plan.entropy else None
    if len(states) == 1:
        return Swept(log_probs[0], None, entropy, None, None, states[0].top, log_totals[0], None, None)
    found: list[Tensor | None] = [*kls]
    if not plan.mixture:
        a = plan.weighing
        # The log of a ratio near 1 is more exact than the difference of two logs.
        found[a] = kls[a] / states[a].total - (states[a].total / states[1 - a].total).log()
        found[1 - a] = None
    (policy, ref), (log_total, ref_log_total) = states, log_totals
    return Swept(log_probs[0], log_probs[1], entropy, found[0], found[1], policy.top, log_total, ref.top, ref_log_total)


def _add_moment(total: Tensor, tile: _Tile, joint: _Joint, scratch: Tensor) -> None:
    """Sum of ``exp(x - top) (x - top)``, in place; ``tile.logits`` are relative to their maximum."""
    torch.clamp(tile.logits, min=LOG_ZERO, out=scratch)
    total.copy_(joint.merge(total, scratch.mul_(tile.prob).sum(-1)))


def _add_difference(total: Tensor, tiles: list[_Tile], joints: list[_Joint], weighing: int, scratch: Tensor) -> None:
    """Sum of ``exp(x - x_top) ((x - x_top) - (y - y_top))`` with ``x`` of the weighing head, in place."""
    a, b = weighing, 1 - weighing
    torch.sub(tiles[a].logits, tiles[b].logits, out=scratch).masked_fill_(tiles[a].prob == 0, 0.0)
    total.copy_(joints[a].merge(total, scratch.mul_(tiles[a].prob).sum(-1), joints[b]))


class _Tile(NamedTuple):
    """Logits and their softmax over the tile's own tokens; ``[n, v]`` each."""

    logits: Tensor
    prob: Tensor


class _Joint(NamedTuple):
    """How sums over earlier tiles (old) and over this one (new) join; each is relative to its own maximum.

    Args:
        top: this tile's maximum.
        old: sum of exponentials of the earlier tiles.
        new: of this tile.
        old_shift: the earlier maximum less the common one.
        new_shift: this tile's less the common one.
    """

    top: Tensor
    old: Tensor
    new: Tensor
    old_shift: Tensor
    new_shift: Tensor

    def merge(self, old: Tensor, new_mean: Tensor, other: _Joint | None = None) -> Tensor:
        """Join sums of ``exp(x - top) d``, where ``d`` is ``x - top``, less the ``other`` head's if given."""
        new = new_mean * self.new
        shifts = (self.old_shift, self.new_shift)
        if other is not None:
            shifts = (shifts[0] - other.old_shift, shifts[1] - other.new_shift)
        old, new = old + shifts[0] * self.old, new + shifts[1] * self.new
        return _decayed(old, self.old_shift) + _decayed(new, self.new_shift)


class _Softmax:
    """Maximum, sum of exponentials and the targets' logits of one head, ``[N]``, over the tiles seen so far."""

    def __init__(self, head: Head) -> None:
        self.lowest = torch.finfo(wide(head.map.dtype)).min
        self.top, self.total = head.state(self.lowest), head.state(0.0)
        self.chosen = head.state(float("nan"))

    def choose(self, logits: Tensor, targets: Tensor, rows: slice, cols: slice) -> None:
        """Pick the targets' logits from the tile, so that they are rounded as those in the sum are."""
        index, inside = local_index(targets, cols)
        found = logits.gather(1, index.unsqueeze(1)).squeeze(1)
        self.chosen[rows] = torch.where(inside, found, self.chosen[rows])

    def absorb(self, tile: _Tile, rows: slice) -> _Joint:
        """Fill ``tile.prob``, NaN in a row without a possible token."""
        torch.softmax(tile.logits, -1, out=tile.prob)
        top = tile.logits.amax(-1)
        # The largest probability is exp(0) / sum. One fused kernel beats maximum, difference, exp and sum.
        new = tile.prob.amax(-1).reciprocal().masked_fill_(top.isneginf(), 0.0)
        top = top.clamp(min=self.lowest)
        common = torch.maximum(self.top[rows], top)
        joint = _Joint(top, self.total[rows].clone(), new, self.top[rows] - common, top - common)
        self.total[rows] = joint.old * joint.old_shift.exp() + new * joint.new_shift.exp()
        self.top[rows] = common
        return joint


def _decayed(value: Tensor, shift: Tensor) -> Tensor:
    """``exp(shift) * value``, where 0 times anything is 0: the mean of a tile without a possible token is NaN."""
    decay = shift.exp()
    return (value * decay).masked_fill_(decay == 0, 0.0)
