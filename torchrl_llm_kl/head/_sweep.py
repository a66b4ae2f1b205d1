"""Forward sweeps over tiles of positions x vocabulary: online log-sum-exp and top-k."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_llm_kl.head._support import local_index
from torchrl_llm_kl.head._tiles import (
    LOG_ZERO,
    NO_TOKENS,
    Head,
    Plan,
    Result,
    Tokens,
    TopKOutput,
    log_ratio_to_mixture,
    rest_of,
    support_of,
    tiles,
    without_ids,
)


@torch.no_grad()
def forward_sweep(
    plan: Plan, heads: list[Head], tokens: Tokens = NO_TOKENS, keep: int = 0
) -> tuple[Result, list[Tensor]]:
    """All requested results of one or two heads, in one pass over the vocabulary.

    Returns:
        The result, whose ``kl`` is None for one head; and the statistics that backward needs besides, ``[N]`` each: of
        each head the largest logit and the log of the sum of exponentials relative to it, then, with a mixture, the KL
        of each head to it, then, with a truncation, the floor of the policy's logits. Then the logits of the first tiles,
        of each head, in at most ``keep`` bytes.
    """
    count, pair = len(heads), len(heads) == 2
    states = [Softmax(head) for head in heads]
    targets, ids = tokens.targets, tokens.ids
    support = support_of(plan, tokens, heads[0].per_position(0.0), find=True)
    moment = heads[0].per_position(0.0) if plan.entropy else heads[0].hidden.new_empty(0)
    kls = [head.per_position(0.0) for head in heads if pair]
    listed, kept = None if ids is None else _ListedLogits(heads[0], ids), list[Tensor]()
    with torch.autocast(heads[0].hidden.device.type, enabled=False):
        for rows, cols, _, logits, (*probs, scratch) in tiles(
            plan.forward_chunk(heads[0]), heads, count + 1, support=support, both=plan.ref_kept
        ):
            keep -= sum(tile.nbytes for tile in logits)
            kept += [tile.clone() for tile in logits] if keep > 0 else []
            joints = []
            for state, tile, prob in zip(states, logits, probs, strict=True):
                if targets is not None:
                    state.choose(tile, targets[rows], rows, cols)
                joints.append(state.absorb(tile, prob, rows, first=cols.start == 0))
            if listed is not None:
                listed.absorb(logits[0], rows, cols, scratch)
            if plan.entropy or pair:
                for tile, joint in zip(logits, joints, strict=True):
                    tile.sub_(joint.top.unsqueeze(-1))  # the largest first: small numbers keep their digits
            if plan.entropy:
                torch.clamp(logits[0], min=LOG_ZERO, out=scratch)
                moment[rows] = joints[0].merge(moment[rows], scratch.mul_(probs[0]).sum(-1))
            if pair and plan.mixture:
                for state, tile in zip(states, logits, strict=True):
                    tile.sub_(state.log_total(rows).unsqueeze(-1))
                for i, kl in enumerate(kls):
                    log_ratio = log_ratio_to_mixture(plan, logits, i, scratch)
                    torch.sum(log_ratio.mul_(probs[i]), -1, out=kl[rows])
            elif pair:
                a, b = plan.weighing, 1 - plan.weighing
                torch.sub(logits[a], logits[b], out=scratch).masked_fill_(probs[a] == 0, 0.0)
                kls[a][rows] = joints[a].merge(kls[a][rows], scratch.mul_(probs[a]).sum(-1), joints[b])
    result, statistics = _results_of(plan, targets is not None, states, moment, kls)
    if listed is not None:
        result = result._replace(outcomes=listed.log_probs(*statistics[:2]))
    floor = [support.floor] if plan.truncation.active and support is not None else []
    return result, [*statistics, *floor, *kept]


def _results_of(
    plan: Plan, chosen: bool, states: list[Softmax], moment: Tensor, kls: list[Tensor]
) -> tuple[Result, list[Tensor]]:
    log_totals = [state.log_total() for state in states]
    statistics = [t for state, log_total in zip(states, log_totals, strict=True) for t in (state.top, log_total)]
    # The difference of logits first: it is exact where the logits are large.
    log_probs: list[Tensor | None] = [None, None]
    if chosen:
        log_probs[: len(states)] = [s.chosen - s.top - total for s, total in zip(states, log_totals, strict=True)]
    entropy = log_totals[0] - moment / states[0].total if plan.entropy else None
    kl = None
    if len(states) == 2 and plan.mixture:
        kl = plan.shares[0] * kls[0] + plan.shares[1] * kls[1]
        statistics += kls
    elif len(states) == 2:
        a, b = plan.weighing, 1 - plan.weighing
        # The log of a ratio near 1 is more exact than the difference of two logs.
        kl = kls[a] / states[a].total - ((states[a].rest - states[b].rest) / states[b].total).log1p()
    return Result(kl, log_probs[0], log_probs[1], entropy, None), statistics


class Softmax:
    """Largest logit, sum of the other exponentials relative to it and the targets' logits of one head, so far; ``[N]`` each.

    The sum leaves out the largest logit, whose exponential is 1: with it, all others would be lost where they add up to less
    than a rounding error, and with them the log-prob ``-log1p(rest)`` of a token that is nearly certain.
    """

    def __init__(self, head: Head) -> None:
        self.lowest = torch.finfo(head.wide).min
        self.chosen = head.per_position(float("nan"))
        self.top, self.rest = torch.empty_like(self.chosen), torch.empty_like(self.chosen)

    @property
    def total(self) -> Tensor:
        """The sum with the largest logit; 0 without a possible token."""
        return self.rest + 1.0

    def log_total(self, rows: slice | None = None) -> Tensor:
        """The log of :attr:`total`, at all positions or some ``rows``; it keeps its digits near 0."""
        return (self.rest if rows is None else self.rest[rows]).log1p()

    def choose(self, logits: Tensor, targets: Tensor, rows: slice, cols: slice) -> None:
        """Pick the targets' logits from a tile, where they are rounded as those in the sum are."""
        index, inside = local_index(targets, cols)
        chosen = logits.gather(1, index.unsqueeze(1)).squeeze(1)
        torch.where(inside, chosen, self.chosen[rows], out=self.chosen[rows])

    def absorb(self, logits: Tensor, prob: Tensor, rows: slice, *, first: bool) -> _Joint:
        """Add a tile, the ``first`` of its rows or not, and fill ``prob`` with its softmax: NaN without a possible token."""
        torch.softmax(logits, -1, out=prob)
        top = logits.amax(-1)
        rest = rest_of(prob, None if first else top >= self.top[rows])
        rest.masked_fill_(top.isneginf(), -1.0)
        top = top.clamp(min=self.lowest)
        if first:
            self.top[rows], self.rest[rows] = top, rest
            return _Joint(top, rest + 1.0)
        common = torch.maximum(self.top[rows], top)
        old, shifts = self.rest[rows].clone(), (self.top[rows] - common, top - common)
        decays = [shift.exp() for shift in shifts]
        # One decay is 1, that of the common top: the other part brings its own top too.
        self.rest[rows] = old * decays[0] + rest * decays[1] + torch.minimum(*decays)
        self.top[rows] = common
        return _Joint(top, rest + 1.0, old + 1.0, shifts)


class _ListedLogits:
    """The logits of listed ids ``[N, M, k]``, and of each list the sum of the exponentials of all other logits, so far."""

    def __init__(self, head: Head, ids: Tensor) -> None:
        self.ids = ids
        self.chosen = torch.full_like(ids, torch.nan, dtype=head.wide)
        self.top = torch.full_like(self.chosen[..., 0], torch.finfo(head.wide).min)
        self.total = torch.zeros_like(self.top)

    def absorb(self, logits: Tensor, rows: slice, cols: slice, scratch: Tensor) -> None:
        """Add a tile ``[n, v]``, which stays as it is."""
        index, inside = local_index(self.ids[rows].flatten(1), cols)
        chosen = torch.where(inside, logits.gather(1, index), self.chosen[rows].flatten(1))
        self.chosen[rows] = chosen.view_as(self.chosen[rows])
        for i in range(self.ids.shape[1]):
            outside = without_ids(logits, self.ids[rows, i], cols, scratch)
            _add_exponentials(self.top[rows, i], self.total[rows, i], outside)

    def log_probs(self, top: Tensor, log_total: Tensor) -> Tensor:
        """Of the ids, ``-inf`` for a negative one, and last of all other tokens; ``[N, M, k + 1]``."""
        logits = torch.cat([self.chosen, self.top.unsqueeze(-1)], -1)
        log_probs = logits - top.view(-1, 1, 1) - log_total.view(-1, 1, 1)
        log_probs[..., -1] += self.total.log()
        log_probs[..., :-1].masked_fill_(self.ids < 0, -torch.inf)
        return log_probs


class _Joint(NamedTuple):
    """Joins sums over earlier tiles (old) and this one (new), each relative to its own maximum; ``[n]`` each."""

    top: Tensor  # this tile's maximum
    new: Tensor  # sums of exponentials
    old: Tensor | None = None  # without earlier tiles
    shifts: tuple[Tensor, ...] = ()  # maxima, old and new, minus the common one

    def merge(self, old: Tensor, new_mean: Tensor, other: _Joint | None = None) -> Tensor:
        """Join sums of ``exp(x - top) d``: ``d`` is ``x - top``, minus the ``other`` head's if that is given."""
        new, shifts = new_mean * self.new, self.shifts
        if self.old is None:
            return new
        if other is not None:
            shifts = tuple(own - its for own, its in zip(shifts, other.shifts, strict=True))
        old, new = old + shifts[0] * self.old, new + shifts[1] * self.new
        return _decayed(old, self.shifts[0]) + _decayed(new, self.shifts[1])


def _decayed(value: Tensor, shift: Tensor) -> Tensor:
    """``exp(shift) * value``, 0 where the factor is: the mean of a tile without a possible token is NaN."""
    decay = shift.exp()
    return (value * decay).masked_fill_(decay == 0, 0.0)


# ------------------------------------------------------------------ top-k


@torch.no_grad()
def top_k_sweep(head: Head, k: int, chunk: tuple[int, int], targets: Tensor | None = None) -> tuple[TopKOutput, Tensor]:
    """The top ``k``, and the log-sum-exp of all logits; ``[N]``."""
    values = head.hidden.new_empty(head.hidden.shape[0], k, dtype=head.wide)
    indices = values.new_empty(values.shape, dtype=torch.long)
    tail_top, tail = head.per_position(torch.finfo(head.wide).min), head.per_position(0.0)
    softmax = Softmax(head)  # only for the targets' logits
    with torch.autocast(head.hidden.device.type, enabled=False):
        # The first tile fills all k places.
        for rows, cols, _, (logits,), _ in tiles((chunk[0], max(chunk[1], k)), [head], 0):
            if targets is not None:
                softmax.choose(logits, targets[rows], rows, cols)
            best, tokens = logits.topk(min(k, logits.shape[1]), -1)
            logits.scatter_(1, tokens, float("-inf"))
            tokens = tokens + cols.start
            if cols.start > 0:
                best, order = torch.cat([values[rows], best], -1).sort(-1, descending=True)
                tokens = torch.cat([indices[rows], tokens], -1).gather(1, order)
            values[rows], indices[rows] = best[:, :k], tokens[:, :k]
            for outside in (best[:, k:], logits):
                _add_exponentials(tail_top[rows], tail[rows], outside)
    top = values[:, :1]
    tail_share = tail.log() + (tail_top - top.squeeze(1))
    shares = values - top
    total = (shares[:, 1:].exp().sum(-1) + tail_share.exp()).log1p()
    log_sum = torch.where(top.squeeze(1).isneginf(), -torch.inf, total + top.squeeze(1))
    log_prob = None if targets is None else softmax.chosen - top.squeeze(1) - total
    return TopKOutput(indices, shares - total.unsqueeze(1), tail_share - total, log_prob), log_sum


def _add_exponentials(top: Tensor, total: Tensor, values: Tensor) -> None:
    """Add ``exp(values)`` to ``total``, both relative to ``top``; in place, ``values`` too."""
    if values.shape[1] == 0:
        return
    common = torch.maximum(top, values.amax(-1))
    total.mul_((top - common).exp_()).add_(values.sub_(common.unsqueeze(1)).exp_().sum(-1))
    top.copy_(common)
