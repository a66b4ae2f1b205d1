"""The sweep behind the linear head: tiles of positions x vocabulary, online softmax, logits made again in backward."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchrl_llm_kl.head._gradient import HeadGradient, Known, backward_sweep
from torchrl_llm_kl.head._tiles import LOG_ZERO, Head, LogitMap, Plan, SweepOutput, Tiles, local_index, wide

__all__ = ["sweep"]


def sweep(plan: Plan, targets: Tensor | None, policy: Head, ref: Head | None = None) -> SweepOutput:
    """Everything asked about one or two heads, in one pass over the vocabulary; differentiable once.

    Targets given: log-probs of them. A reference given: the KL too.
    """
    tensors = [*policy[:3], *(ref[:3] if ref is not None else (None, None, None))]
    maps = (policy.map, None if ref is None else ref.map)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return SweepOutput(*_Sweep.apply(plan, maps, targets, *tensors))
    return _forward(plan, targets, policy, ref)[0]


class _Sweep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, maps: Any, targets: Tensor | None, *tensors: Tensor | None) -> Any:
        ctx.plan, ctx.maps = plan, maps
        ctx.set_materialize_grads(False)
        output, statistics = _forward(plan, targets, *_heads(tensors, maps))
        ctx.save_for_backward(targets, *tensors, output.entropy, output.kl, *statistics)
        return tuple(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        targets, *tensors = ctx.saved_tensors[:7]
        entropy, kl, *statistics = ctx.saved_tensors[7:]
        heads = [head for head in _heads(tensors, ctx.maps) if head is not None]
        needed = ctx.needs_input_grad[3:]
        gradients = [HeadGradient(head, needed[3 * i : 3 * i + 3]) for i, head in enumerate(heads)]
        known = Known(targets, entropy, kl, statistics)
        backward_sweep(ctx.plan, heads, known, SweepOutput(*grads), gradients)
        results = [gradient for accumulated in gradients for gradient in accumulated.results()]
        return None, None, None, *results, *([None] * (6 - len(results)))


def _heads(tensors: Any, maps: tuple[LogitMap, LogitMap | None]) -> tuple[Head, Head | None]:
    policy = Head(tensors[0], tensors[1], tensors[2], maps[0])
    return policy, None if maps[1] is None else Head(tensors[3], tensors[4], tensors[5], maps[1])


def _forward(
    plan: Plan, targets: Tensor | None, policy: Head, ref: Head | None
) -> tuple[SweepOutput, tuple[Tensor, ...]]:
    """The output, and what backward needs: maximum and log of the sum of exponentials, of either head."""
    heads = [policy] if ref is None else [policy, ref]
    tiles = Tiles(plan.chunk, policy, 2 * len(heads) + 1)
    states = [_Softmax(head) for head in heads]
    moment, difference = policy.state(0.0), policy.state(0.0)
    with torch.no_grad(), torch.autocast(policy.hidden.device.type, enabled=False):
        for cols in tiles.columns():
            columns = [head.columns(cols) for head in heads]
            for rows in tiles.rows():
                *buffers, scratch = tiles.buffers(rows, cols)
                sides = [_Tile(*buffers[2 * i : 2 * i + 2]) for i in range(len(heads))]
                joints = []
                for tile, head, state, column in zip(sides, heads, states, columns, strict=True):
                    head.map.logits(head.hidden[rows], *column, out=tile.logits)
                    if targets is not None:
                        state.choose(tile.logits, targets[rows], rows, cols)
                    joints.append(state.absorb(tile, rows))
                if plan.entropy or ref is not None:
                    for tile, joint in zip(sides, joints, strict=True):
                        tile.logits.sub_(joint.top.unsqueeze(-1))
                if plan.entropy:
                    _add_moment(moment[rows], sides[0], joints[0], scratch)
                if ref is not None:
                    _add_difference(difference[rows], sides, joints, plan.weighing, scratch)
        return _finish(plan, targets, states, moment, difference)


def _finish(
    plan: Plan, targets: Tensor | None, states: list[_Softmax], moment: Tensor, difference: Tensor
) -> tuple[SweepOutput, tuple[Tensor, ...]]:
    log_totals = [state.total.log() for state in states]
    pairs = list(zip(states, log_totals, strict=True))
    # Differences of logits first: they are exact where the logits are large.
    log_probs = [None if targets is None else state.chosen - state.top - log_total for state, log_total in pairs]
    entropy = log_totals[0] - moment / states[0].total if plan.entropy else None
    kl = None
    if len(states) > 1:
        a = plan.weighing
        # The log of a ratio near 1 is more exact than the difference of two logs.
        kl = difference / states[a].total - (states[a].total / states[1 - a].total).log()
    output = SweepOutput(log_probs[0], entropy, log_probs[1] if len(states) > 1 else None, kl)
    return output, tuple(tensor for state, log_total in pairs for tensor in (state.top, log_total))


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
        new = torch.where(top.isneginf(), 0.0, tile.prob.amax(-1).reciprocal())
        top = top.clamp(min=self.lowest)
        common = torch.maximum(self.top[rows], top)
        joint = _Joint(top, self.total[rows].clone(), new, self.top[rows] - common, top - common)
        self.total[rows] = joint.old * joint.old_shift.exp() + new * joint.new_shift.exp()
        self.top[rows] = common
        return joint


def _decayed(value: Tensor, shift: Tensor) -> Tensor:
    """``exp(shift) * value``, where 0 times anything is 0: the mean of a tile without a possible token is NaN."""
    decay = shift.exp()
    return torch.where(decay == 0, 0.0, value * decay)
