"""Sweeps over tiles of positions x vocabulary: online log-sum-exp, top-k, and the gradients.

The forward saves the sums over the vocabulary, so each tile of the backward yields final log-probs directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import wide_dtype
from torchrl_llm_kl._private import onednn_linear
from torchrl_llm_kl.head._tiles import (
    LOG_ZERO,
    NO_TOKENS,
    WHOLE,
    Head,
    Plan,
    Result,
    Tokens,
    TopKOutput,
    local_index,
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
        The result, and a list of tensors for the backward. ``kl`` is None for one head. The list begins with the statistics,
        ``[N]`` each: for each head the largest logit and the log of the sum of exponentials relative to it; with a mixture the
        KL of each head to it; with a truncation the floor of the policy's logits. Then follow the logits of the first tiles,
        of all heads for each tile, in at most ``keep`` bytes.
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
                    tile.sub_(joint.top.unsqueeze(-1))  # first, so that small numbers keep digits
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
    # Subtract the largest logit first: the difference of two large logits is exact.
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
        # One log1p of the ratio, since a difference of two logs loses digits where the ratio is near 1.
        kl = kls[a] / states[a].total - ((states[a].rest - states[b].rest) / states[b].total).log1p()
    return Result(kl, log_probs[0], log_probs[1], entropy, None), statistics


class Softmax:
    """The running softmax of one head: the largest logit, the sum of the other exponentials, the targets' logits, ``[N]`` each.

    Exponentials are relative to the largest logit. The sum leaves out that logit's exponential, which is 1. Beside it the
    others could be lost to rounding, and with them the log-prob ``-log1p(rest)`` of a token that is nearly certain.
    """

    def __init__(self, head: Head) -> None:
        self.lowest = torch.finfo(head.wide).min
        self.chosen = head.per_position(float("nan"))
        self.top, self.rest = torch.empty_like(self.chosen), torch.empty_like(self.chosen)

    @property
    def total(self) -> Tensor:
        """The sum that includes the largest logit. It is 0 if no token is possible."""
        return self.rest + 1.0

    def log_total(self, rows: slice | None = None) -> Tensor:
        """The log of :attr:`total` at all positions or some ``rows``. It keeps its digits near 0."""
        return (self.rest if rows is None else self.rest[rows]).log1p()

    def choose(self, logits: Tensor, targets: Tensor, rows: slice, cols: slice) -> None:
        """Read the targets' logits from a tile, so that they have the rounding of those in the sum."""
        index, inside = local_index(targets, cols)
        chosen = logits.gather(1, index.unsqueeze(1)).squeeze(1)
        torch.where(inside, chosen, self.chosen[rows], out=self.chosen[rows])

    def absorb(self, logits: Tensor, prob: Tensor, rows: slice, *, first: bool) -> _Joint:
        """Add a tile, and fill ``prob`` with its softmax, which is NaN if no token is possible.

        ``first`` says whether the tile is the first one of its rows.
        """
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
        # The part with the common maximum has decay 1. The other part also adds its own maximum, with its decay.
        self.rest[rows] = old * decays[0] + rest * decays[1] + torch.minimum(*decays)
        self.top[rows] = common
        return _Joint(top, rest + 1.0, old + 1.0, shifts)


class _ListedLogits:
    """The running logits of listed ids ``[N, M, k]``, and for each list the sum of exponentials of all other logits."""

    def __init__(self, head: Head, ids: Tensor) -> None:
        self.ids = ids
        self.chosen = torch.full_like(ids, torch.nan, dtype=head.wide)
        self.top = torch.full_like(self.chosen[..., 0], torch.finfo(head.wide).min)
        self.total = torch.zeros_like(self.top)

    def absorb(self, logits: Tensor, rows: slice, cols: slice, scratch: Tensor) -> None:
        """Add a tile ``[n, v]``, which is not changed."""
        index, inside = local_index(self.ids[rows].flatten(1), cols)
        chosen = torch.where(inside, logits.gather(1, index), self.chosen[rows].flatten(1))
        self.chosen[rows] = chosen.view_as(self.chosen[rows])
        for i in range(self.ids.shape[1]):
            outside = without_ids(logits, self.ids[rows, i], cols, scratch)
            _add_exponentials(self.top[rows, i], self.total[rows, i], outside)

    def log_probs(self, top: Tensor, log_total: Tensor) -> Tensor:
        """Log-probs of the ids, ``-inf`` for negative ones, and then of all other tokens together, ``[N, M, k + 1]``."""
        logits = torch.cat([self.chosen, self.top.unsqueeze(-1)], -1)
        log_probs = logits - top.view(-1, 1, 1) - log_total.view(-1, 1, 1)
        log_probs[..., -1] += self.total.log()
        log_probs[..., :-1].masked_fill_(self.ids < 0, -torch.inf)
        return log_probs


class _Joint(NamedTuple):
    """Joins sums over earlier tiles (old) and over this one (new), each relative to its own maximum, ``[n]`` each."""

    top: Tensor  # this tile's maximum
    new: Tensor  # sum of exponentials of this tile
    old: Tensor | None = None  # sum of exponentials of earlier tiles, or None for the first tile
    shifts: tuple[Tensor, ...] = ()  # old and new maximum minus the common maximum

    def merge(self, old: Tensor, new_mean: Tensor, other: _Joint | None = None) -> Tensor:
        """Join sums of ``exp(x - top) d``. ``d`` is ``x - top``, minus the ``other`` head's ``x - top`` if that is given."""
        new, shifts = new_mean * self.new, self.shifts
        if self.old is None:
            return new
        if other is not None:
            shifts = tuple(own - its for own, its in zip(shifts, other.shifts, strict=True))
        old, new = old + shifts[0] * self.old, new + shifts[1] * self.new
        return _decayed(old, self.shifts[0]) + _decayed(new, self.shifts[1])


def _decayed(value: Tensor, shift: Tensor) -> Tensor:
    """``exp(shift) * value``. A factor of 0 gives 0 even for NaN, the mean of a tile without a possible token."""
    decay = shift.exp()
    return (value * decay).masked_fill_(decay == 0, 0.0)


# ------------------------------------------------------------------ top-k


@torch.no_grad()
def top_k_sweep(head: Head, k: int, chunk: tuple[int, int], targets: Tensor | None = None) -> tuple[TopKOutput, Tensor]:
    """The top ``k``, and the log-sum-exp of all logits, ``[N]``."""
    values = head.hidden.new_empty(head.hidden.shape[0], k, dtype=head.wide)
    indices = values.new_empty(values.shape, dtype=torch.long)
    tail_top, tail = head.per_position(torch.finfo(head.wide).min), head.per_position(0.0)
    softmax = Softmax(head)  # used only for the targets' logits
    with torch.autocast(head.hidden.device.type, enabled=False):
        # The first tile has at least k tokens, so it fills all k places.
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
    """Add ``exp(values)`` to ``total``, which is relative to ``top``. Changes all three in place."""
    if values.shape[1] == 0:
        return
    common = torch.maximum(top, values.amax(-1))
    total.mul_((top - common).exp_()).add_(values.sub_(common.unsqueeze(1)).exp_().sum(-1))
    top.copy_(common)


# ------------------------------------------------------------------ backward


def backward_sweep(
    plan: Plan,
    heads: list[Head],
    tokens: Tokens,
    result: Result,
    statistics: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of hidden states, weight and bias of each head. They are None where not ``needed``.

    ``grads`` are the gradients of the fields of ``result``, None for zero. ``statistics`` is the list from the forward.
    """
    if not any(needed):
        return [None] * len(needed)
    of_kl, of_log_prob, of_ref_log_prob, of_entropy, of_outcomes = grads
    count = plan.statistics(len(heads))
    statistics, kept = statistics[:count], statistics[count:]
    if of_kl is None and len(heads) == 2 and not plan.ref_kept:
        # Without a gradient of the KL the heads are independent. One sweep per head takes only the buffers of one head.
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
    per_position = [
        (tokens.targets, result.log_prob, result.entropy, kls[0], of_kl, of_log_prob, of_entropy),
        (tokens.targets, result.ref_log_prob, None, kls[1], of_kl, of_ref_log_prob, None),
    ]
    listed = None
    if of_outcomes is not None and tokens.ids is not None and result.outcomes is not None:
        # The log-prob -inf of an outcome of probability 0 is constant, so it has no gradient.
        listed = _ListedGradients(tokens.ids, result.outcomes, of_outcomes.masked_fill(result.outcomes.isneginf(), 0.0))
    with torch.autocast(heads[0].hidden.device.type, enabled=False):
        for rows, cols, columns, logits, (*spare, out, scratch) in tiles(
            plan.chunk, heads, 2 * len(heads) + 2, kept, support, plan.ref_kept
        ):
            sides = [_Side(logits[i], *spare[2 * i : 2 * i + 2]) for i in range(len(heads))]
            for i, head in enumerate(heads):
                sides[i].normalise(head, statistics[2 * i : 2 * i + 2], rows)
            for i, head in enumerate(heads):
                if gradients[i].needed:
                    columns_of = (None if t is None else t[rows].unsqueeze(-1) for t in per_position[i])
                    row = _Row._make([*columns_of, None if listed is None or i else listed.rows(rows)])
                    _product_gradient(plan, head, sides, i, row, cols, out, scratch)
                    gradients[i].add(rows, cols, out, columns[i][0])
    return [each for gradient in gradients for each in gradient.results()]


def empty_gradients(heads: list[Head], needed: Sequence[bool]) -> list[Tensor | None]:
    """Uninitialized tensors in the form of :func:`backward_sweep`'s result."""
    return [g for i, head in enumerate(heads) for g in _HeadGradient(head, needed[3 * i : 3 * i + 3]).results()]


class _Row(NamedTuple):
    """The results of one head at the positions of a tile, and their gradients (``of_...``), as columns ``[n, 1]``."""

    targets: Tensor | None
    log_prob: Tensor | None
    entropy: Tensor | None
    kl: Tensor | None  # the KL weighted by this head's probabilities
    of_kl: Tensor | None
    of_log_prob: Tensor | None
    of_entropy: Tensor | None
    listed: _ListedGradients | None


class _ListedGradients(NamedTuple):
    """Listed ids ``[n, M, k]``, and the log-probs of these and of all other tokens with gradients, ``[n, M, k + 1]`` each."""

    ids: Tensor
    log_probs: Tensor
    grads: Tensor

    def rows(self, rows: slice) -> _ListedGradients:
        return _ListedGradients._make(t[rows] for t in self)

    def add_others(self, side: _Side, cols: slice, out: Tensor, scratch: Tensor) -> None:
        """Add to ``out [n, v]`` the gradient of the other tokens' log-prob: each token's share of their probability."""
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
    """One head in a tile: log-probs, probabilities and, with a soft cap, ``1 - tanh ** 2``, ``[n, v]`` each."""

    log_prob: Tensor
    prob: Tensor
    bend: Tensor

    def normalise(self, head: Head, statistics: Sequence[Tensor], rows: slice) -> None:
        """Turn the logits in ``log_prob`` into log-probs, and fill the rest."""
        if head.soft_cap is not None:
            torch.div(self.log_prob, head.gain, out=self.bend).clamp_(min=-1.0)  # -inf of an excluded token
            torch.square(self.bend, out=self.bend).neg_().add_(1.0)
        for statistic in statistics:
            self.log_prob.sub_(statistic[rows].unsqueeze(-1))
        torch.exp(self.log_prob, out=self.prob)


def _product_gradient(
    plan: Plan, head: Head, sides: list[_Side], i: int, row: _Row, cols: slice, out: Tensor, scratch: Tensor
) -> None:
    """Fill ``out`` with the gradient of head ``i``'s products.

    First the gradient of the logits, with ``p`` the softmax:

    - of a log-prob: ``-p``, and ``1 - p`` at the target;
    - of the entropy ``H``: ``-p (log p + H)``;
    - of a KL weighted by ``p``: ``p (log p - log m - KL)``, where ``m`` is the other head's distribution or the mixture. The
      dependence of the mixture on ``p`` cancels in the sum of both heads' KLs;
    - of a KL weighted by the other head's ``q``: ``p - q``;
    - of the log-prob of a set of tokens: ``-p``, plus each token's share of the set inside it.

    Then it goes back through temperature, soft cap and scale.
    """
    side, of_log_prob, own, listed = sides[i], row.of_log_prob, row.kl, row.listed
    out.zero_()
    index = inside = None
    if of_log_prob is not None and row.targets is not None:
        out.sub_(of_log_prob)
        index, inside = local_index(row.targets, cols)
        out.scatter_(1, index, out.gather(1, index).masked_fill_(inside, 0.0))
    if listed is not None:
        out.sub_(listed.grads.sum((1, 2)).unsqueeze(-1))
    if row.of_entropy is not None and row.entropy is not None:
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
    if index is not None and inside is not None and of_log_prob is not None and row.log_prob is not None:
        # 1 - p from the log-prob, since the p of a nearly certain token rounds to 1.
        out.scatter_add_(1, index, torch.where(inside, of_log_prob * -row.log_prob.expm1(), 0.0))
    if listed is not None:
        listed.add_others(side, cols, out, scratch)
        listed.add_ids(cols, out)
    if head.soft_cap is not None:
        out.mul_(side.bend)
    if head.slope != 1.0:
        out.mul_(head.slope)


def _prob_difference(side: _Side, other: _Side, out: Tensor) -> Tensor:
    """Fill ``out [n, v]`` with ``p - q``. Where both may round to 1 it comes from the log-probs."""
    torch.sub(side.prob, other.prob, out=out)
    rows = None  # all rows on an accelerator, where selecting some would be a host sync
    if out.device.type == "cpu":
        rows = (side.prob.amax(-1) > 0.9).nonzero().squeeze(1)
    prob, log_p, log_q, some = (x if rows is None else x[rows] for x in (side.prob, side.log_prob, other.log_prob, out))
    place = prob.argmax(-1, keepdim=True)
    some.scatter_(1, place, log_p.gather(1, place).expm1() - log_q.gather(1, place).expm1())
    return some if rows is None else out.index_copy_(0, rows, some)


class _HeadGradient:
    """Sums the gradients of one head's hidden states, weight and bias in float32 or wider. None where not needed."""

    def __init__(self, head: Head, needed: Sequence[bool]) -> None:
        self.head = head
        hidden, weight, bias = (t if need else None for t, need in zip(head[:3], needed, strict=True))
        # Uninitialized, since the first tile of an element writes it. Without positions no tile does, hence the zeros.
        new = torch.empty_like if head.hidden.shape[0] else torch.zeros_like
        # Several tiles add to each element of hidden states and bias if there is a weight. Else each element has one tile.
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
        """Propagate the gradient ``[n, v]`` of a tile's products. ``weight [v, H]`` is the weight of its tokens."""
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
                # Tiles of the same tokens are consecutive, so a float32 buffer for their rows of the weight is enough.
                part = self.weight[cols]
                wide = wide_dtype(part.dtype)
                self._columns = part if part.dtype == wide else torch.empty_like(part, dtype=wide)
            hidden = self.head.hidden[rows].to(gradient.dtype)
            assert self._columns is not None
            _accumulate_product(self._columns, gradient.T, hidden, rows.start == 0)
            if rows.stop == self.head.hidden.shape[0] and self._columns.dtype != self.weight.dtype:
                self.weight[cols] = self._columns.to(self.weight.dtype)

    def results(self) -> list[Tensor | None]:
        """The gradients, converted to the dtypes of hidden states, weight and bias."""
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
