"""Search for the few tokens that truncated sampling keeps, and scores that read only these tokens.

One sweep over the vocabulary collects candidates. A candidate is a token whose logit reaches a bound, such as the k-th largest
logit so far. The bound only rises. At the end each position keeps the tokens that the sampler can choose. All sums and
gradients use only the kept tokens, so other rows of the head are not read again.

Shapes: ``N`` positions, ``M`` kept tokens of all positions, ``H`` hidden, ``V`` vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchrl_llm_kl._numerics import from_zero
from torchrl_llm_kl.head._sweep import Softmax, forward_sweep
from torchrl_llm_kl.head._tiles import LOG_ZERO, Head, Kept, Plan, Result, Tokens, Truncation, by_row, tiles

# The number of vocabulary tokens in a block. Most blocks hold no token that can be kept. So only the largest logit of each
# block is compared with the bound first.
_BLOCK = 64
# Slack of a bound for rounding errors, in nats for a log-prob.
_SLACK = 1e-3
# During the sweep, tokens that top-p will probably exclude are dropped. The first guess comes after a 16th of the vocabulary,
# and after at least 8192 tokens. All dropped tokens together should have at most _TAIL times 1 - p of the probability. Tokens
# with a log-prob of at least _LIKELY are not dropped.
_FIRST_LOOK = 16, 8192
_TAIL = 0.5
_LIKELY = math.log(1e-3)
# A floor of top-p is raised to one of _LEVELS log-probs. They lie below 0, _LEVEL nats apart.
_LEVELS, _LEVEL = 32, 0.5
# About this many elements of the head's rows are gathered at once.
_GATHERED = 2**22


def most_kept(vocab: int) -> int:
    """The largest average number of kept tokens per position at which summing only the kept tokens is faster.

    With more kept tokens, summing over the whole vocabulary is faster.
    """
    return max(64, vocab // 64)


# ------------------------------------------------------------------ search


@torch.no_grad()
def find_kept(
    head: Head, truncation: Truncation, chunk: tuple[int, int], targets: Tensor | None, most: int
) -> Kept | None:
    """Find the tokens of :func:`linear_kept`. None if a block of positions keeps more than ``most`` per position on average."""
    none = head.hidden.new_zeros(0, dtype=torch.long)
    parts = [Kept(none, none.new_zeros(1), head.per_position(0.0)[:0], none.bool())]
    with torch.autocast(head.hidden.device.type, enabled=False):
        for start in range(0, head.positions, chunk[0]):
            rows = slice(start, min(start + chunk[0], head.positions))
            some = None if targets is None else targets[rows]
            part = _find_block(head._replace(hidden=head.hidden[rows]), truncation, chunk[1], some, most)
            if part is None:
                return None
            parts.append(part)
    ids, logits, added = (torch.cat([getattr(part, name) for part in parts]) for name in ("ids", "logits", "added"))
    counts = torch.cat([part.offsets.diff() for part in parts])
    return Kept(ids, from_zero(counts.cumsum(0)), logits, added)


def _find_block(head: Head, truncation: Truncation, width: int, targets: Tensor | None, most: int) -> Kept | None:
    count = head.positions
    truncation = truncation._replace(top_k=0) if truncation.top_k >= head.vocab else truncation
    whole = truncation.top_p < 1 and not truncation.top_k  # top-p needs the sum over all tokens
    searched = _search(head, truncation, width, targets, most, guess=whole and truncation.min_p == 0)
    if searched is None:
        return None
    candidates, state, floor, guessed = searched
    total = state.top + state.total.log() if whole else None
    if total is not None and guessed is not None:
        wrong = (guessed & ~candidates.hold_nucleus(total, truncation.top_p)).nonzero().squeeze(1)
        if len(wrong):
            some = head._replace(hidden=head.hidden[wrong])
            searched = _search(some, truncation, width, None, most * count // len(wrong), guess=False)
            if searched is None:
                return None
            floor = floor.index_put((wrong,), searched[2])
            candidates.replace(wrong, searched[0])
    if total is not None:  # with a higher floor there are fewer candidates to sort
        floor = torch.maximum(floor, total + candidates.level(total, truncation.top_p))
    candidates.prune(floor, 0)
    row, ids, logits = candidates.chosen(truncation, total)
    if len(row) > most * count:
        return None
    added = head.per_position(0.0).bool()
    if targets is not None:
        added = torch.ones_like(added).index_put((row[ids == targets[row]],), added.new_zeros(()))
        at = added.nonzero().squeeze(1)
        row, ids = torch.cat([row, at]), torch.cat([ids, targets[at]])
        logits, order = torch.cat([logits, state.chosen[at]]), row.argsort(stable=True)
        row, ids, logits = row[order], ids[order], logits[order]
    return Kept(ids, from_zero(torch.bincount(row, minlength=count).cumsum(0)), logits, added)


def _search(
    head: Head, truncation: Truncation, width: int, targets: Tensor | None, most: int, *, guess: bool
) -> tuple[_Candidates, Softmax, Tensor, Tensor | None] | None:
    """Collect the candidates in one sweep. Returns None if there are too many.

    Before the end of the sweep, it is certain for only few tokens that top-p excludes them. With ``guess`` the sweep also drops
    the tokens that top-p excludes if the later tokens resemble the earlier ones.

    Returns:
        The candidates, the sums, the floor of each position's candidates, and a mask of the positions with a guessed floor.
        The mask is None without ``guess``.
    """
    count, vocab, (top_k, top_p, min_p) = head.positions, head.vocab, truncation
    whole = top_p < 1 and not top_k
    state, floor = Softmax(head), head.per_position(-math.inf)
    state.top.fill_(state.lowest)
    candidates = _Candidates(count)
    most *= count
    room = 4 * top_k * count or 8 * most
    # All tokens below this log-prob together have a probability of less than 1 - p.
    safe = math.log((1 - top_p) / vocab) - _SLACK if whole else -math.inf
    guessed, look = head.per_position(-math.inf), max(vocab // _FIRST_LOOK[0], _FIRST_LOOK[1])
    for rows, cols, _, (logits,), (scratch,) in tiles((count, width), [head], 1):
        size = math.gcd(logits.shape[1], _BLOCK)
        blocks = logits.view(count, -1, size).amax(-1)
        if targets is not None:
            state.choose(logits, targets, rows, cols)
        if whole:
            state.absorb(logits, scratch, rows, first=cols.start == 0)
            floor = torch.maximum(state.top + state.total.log() + safe, guessed)
        else:
            torch.maximum(state.top, blocks.amax(-1), out=state.top)
        if top_k and cols.start == 0 and top_k <= logits.shape[1]:
            floor = logits.topk(top_k, -1).values[:, -1]
        if min_p > 0 and not (top_k and top_p < 1):  # top-p after top-k needs all tokens that top-k keeps
            floor = torch.maximum(floor, state.top + math.log(min_p))
        candidates.add(logits.view(count, -1, size), blocks, floor, cols.start)
        if guess and cols.stop >= look:
            total = state.top + state.total.log()
            level = candidates.level(total, 1 - _TAIL * (1 - top_p) * cols.stop / vocab)
            guessed, look = torch.maximum(guessed, total + level.clamp(max=_LIKELY)), 2 * cols.stop
            floor = candidates.prune(torch.maximum(floor, guessed), 0)
        if candidates.total > room:
            floor = candidates.prune(floor, top_k)
            if candidates.total > (2 * most if top_k else 6 * most):
                return None
            room = max(room, 2 * candidates.total)
    return candidates, state, floor, (floor == guessed) & guessed.isfinite() if guess else None


class _Candidates:
    """Tokens of ``n`` positions that may be kept."""

    def __init__(self, count: int) -> None:
        self.count, self.total = count, 0
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []  # positions and ids, int32; logits

    def add(self, logits: Tensor, blocks: Tensor, floor: Tensor, first: int) -> None:
        """Add the tokens of ``logits [n, blocks, size]`` that reach the floor. ``blocks [n, blocks]`` are the maxima."""
        row, block = (blocks >= floor.unsqueeze(1)).nonzero(as_tuple=True)
        some = logits[row, block]
        hit, lane = ((some >= floor[row].unsqueeze(1)) & (some > -math.inf)).nonzero(as_tuple=True)
        ids = block[hit] * logits.shape[2] + lane + first
        self._parts.append((row[hit].int(), ids.int(), some[hit, lane]))
        self.total += len(hit)

    def prune(self, floor: Tensor, top_k: int) -> Tensor:
        """Raise the floor to the ``top_k``-th candidate, drop the candidates below it, and return the new floor."""
        row, ids, logits = self._joined()
        if top_k:
            order, start, counts = by_row(row, logits, self.count)
            last = (start + counts.clamp(max=top_k) - 1).clamp(min=0)
            floor = torch.maximum(floor, logits[order][last].masked_fill(counts < top_k, -math.inf))
        keep = logits >= floor[row]
        self._parts = [(row[keep].int(), ids[keep], logits[keep])]
        self.total = len(self._parts[0][0])
        return floor

    def hold_nucleus(self, log_total: Tensor, top_p: float) -> Tensor:
        """True where the candidates have more than ``top_p`` of the probability, ``[n]``. Top-p then excludes the rest."""
        row, _, logits = self._joined()
        mass = torch.zeros_like(log_total).index_add(0, row, (logits - log_total[row]).exp())
        return mass > top_p + _SLACK * (1 - top_p)

    def level(self, log_total: Tensor, top_p: float) -> Tensor:
        """The highest level above which the candidates have more than ``top_p`` of the probability, else ``-inf``, ``[n]``."""
        row, _, logits = self._joined()
        log_share = logits - log_total[row]
        # Candidates below the lowest level are added to it.
        level = (log_share / _LEVEL + _LEVELS).clamp(0, _LEVELS - 1).nan_to_num(0.0).long()
        mass = log_total.new_zeros(self.count * _LEVELS).index_add(0, row * _LEVELS + level, log_share.exp())
        mass = mass.view(self.count, _LEVELS).flip(1).cumsum(1)  # cumulative from the highest level
        missing = (mass[:, :-1] <= top_p + _SLACK * (1 - top_p)).sum(1)
        return ((missing + 1) * -_LEVEL - _SLACK).to(mass.dtype).masked_fill(missing == _LEVELS - 1, -math.inf)

    def replace(self, positions: Tensor, other: _Candidates) -> None:
        """Replace the candidates of some positions by the result of another search over only these positions."""
        own, others = self._joined(), other._joined()
        keep = ~torch.isin(own[0], positions)
        kept = own[0][keep].int(), own[1][keep], own[2][keep]
        self._parts = [kept, (positions[others[0]].int(), others[1], others[2])]

    def chosen(self, truncation: Truncation, log_total: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Positions, ids and logits of the kept tokens, sorted by position, then from the most probable token down.

        ``log_total`` is the log-sum-exp of all logits, ``[n]``. None if only the sum over the candidates is needed.
        """
        row, ids, logits = self._joined()
        order, start, counts = by_row(row, logits, self.count)
        row, ids, logits = row[order], ids[order].long(), logits[order]
        keep = torch.ones_like(row, dtype=torch.bool)
        if not len(row):
            return row, ids, logits
        start = start.clamp(max=len(row) - 1)  # in range for positions without a candidate
        if truncation.top_k:
            last = logits[start + (counts.clamp(max=truncation.top_k) - 1).clamp(min=0)]
            keep = logits >= last[row]
        if truncation.top_p < 1:
            top = logits[start]
            share = (logits - top[row]).exp().masked_fill(~keep, 0).double()
            total = torch.zeros_like(top, dtype=torch.double)
            total = total.index_add(0, row, share) if log_total is None else (log_total - top).double().exp()
            before = share.cumsum(0) - share
            stays = keep & (before - before[start][row] < truncation.top_p * total[row])
            number = torch.zeros_like(counts).index_add(0, row, stays.long())
            keep &= logits >= logits[start + (number - 1).clamp(min=0)][row]
        if truncation.min_p > 0:
            keep &= logits >= logits[start][row] + math.log(truncation.min_p)
        return row[keep], ids[keep], logits[keep]

    def _joined(self) -> tuple[Tensor, Tensor, Tensor]:
        row, ids, logits = (torch.cat(part) for part in zip(*self._parts, strict=True))
        self._parts = [(row, ids, logits)]
        return row.long(), ids, logits


# ------------------------------------------------------------------ scores


def kept_scores(plan: Plan, policy: Head, ref: Head | None, kept: Kept, targets: Tensor | None) -> Result:
    """Compute the results of a sweep from only the kept tokens. They are differentiable once with respect to the policy.

    If the reference is not restricted to the kept tokens, another sweep computes its sum over all tokens.
    """
    count, ids, rows = policy.positions, kept.ids.long(), kept.rows
    if kept.logits is None:
        ids, rows = _distinct(ids, rows, policy.vocab)
    offsets = from_zero(torch.bincount(rows, minlength=count).cumsum(0))
    logits = _logits_at(policy, ids, offsets) if kept.logits is None else kept.logits.to(policy.wide)
    log_p = _log_softmax(_Logits.apply(policy, *policy[:3], ids, rows, offsets, logits), rows, count)
    here = None if targets is None else ids == targets[rows]
    kl = ref_log_prob = None
    if ref is not None:
        log_q = _logits_at(ref, ids, offsets)
        if plan.ref_kept:
            log_q = _log_softmax(log_q, rows, count)
            ref_log_prob = _at(log_q, here, rows, count)
        else:
            swept, (top, log_total) = forward_sweep(Plan(plan.chunk), [ref], Tokens(targets))
            log_q, ref_log_prob = log_q - top[rows] - log_total[rows], swept.log_prob
        first, second = (log_p, log_q) if plan.shares[0] else (log_q, log_p)
        kl = _sum_by_position(first.exp() * (first - second).masked_fill(first.isneginf(), 0.0), rows, count)
    entropy = -_sum_by_position(log_p.exp() * log_p.clamp(min=LOG_ZERO), rows, count) if plan.entropy else None
    return Result(kl, _at(log_p, here, rows, count), ref_log_prob, entropy, None)


def _distinct(ids: Tensor, rows: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """The tokens of each position without repetitions, sorted by position."""
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= vocab):
        raise ValueError(f"kept.ids has ids from {int(ids.min())} to {int(ids.max())}: expected 0 to {vocab - 1}.")
    pairs = (rows * vocab + ids).unique()
    return pairs % vocab, pairs // vocab


# ------------------------------------------------------------------ sums over the kept tokens of each position


def _sum_by_position(values: Tensor, rows: Tensor, count: int) -> Tensor:
    """The sum at each position. It is computed in float64, since ``index_add`` adds one value at a time."""
    total = values.new_zeros(count, dtype=torch.float64).index_add(0, rows, values.double())
    return total.to(values.dtype)


def _log_softmax(logits: Tensor, rows: Tensor, count: int) -> Tensor:
    """Log-probs over the kept tokens of each position, ``[M]``."""
    values, place = logits.detach(), torch.arange(len(rows), device=rows.device)
    largest = values.new_full((count,), -math.inf).scatter_reduce(0, rows, values, "amax")
    # One token with the largest logit at each position. A position may have no tokens.
    first = place.new_full((count,), len(rows)).scatter_reduce(
        0, rows, place.masked_fill(values != largest[rows], len(rows)), "amin"
    )
    largest_one = first[rows] == place
    # Subtract the largest logit first, since the difference of two large logits is exact. The largest becomes a constant 0.
    # The sum leaves out its exponential, which is 1. The other exponentials may be smaller than the rounding error of 1.
    shifted = (logits - logits[first[rows]]).masked_fill(largest_one, 0.0)
    rest = _sum_by_position(shifted.exp().masked_fill(largest_one, 0.0), rows, count)
    return shifted - rest.log1p()[rows]


def _at(values: Tensor, here: Tensor | None, rows: Tensor, count: int) -> Tensor | None:
    """Values at the targets, ``-inf`` where the target is not kept, ``[N]``. None without targets."""
    if here is None:
        return None
    return values.new_full((count,), -math.inf).index_put((rows[here],), values[here])


# ------------------------------------------------------------------ logits of some tokens of each position


class _Logits(torch.autograd.Function):
    """Attaches a gradient with respect to hidden states, weight and bias to logits that are already computed."""

    @staticmethod
    def forward(ctx: Any, head: Head, *tensors: Tensor) -> Tensor:
        """``tensors`` are hidden states, weight and bias, then ids, positions, offsets and logits of the tokens."""
        ctx.soft_cap, ctx.gain, ctx.slope = head.soft_cap, head.gain, head.slope
        ctx.save_for_backward(*tensors[:-1], None if head.soft_cap is None else tensors[-1])
        return tensors[-1].clone()

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
    """The logits of some tokens of each position, with the rounding of :meth:`Head.logits`, ``[M]``."""
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
    """``sum weights[j] * table[index[j]]`` over each segment of ``offsets``, in the dtype of ``weights``."""
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
    """Split the segments into ranges, ``first`` to ``last``, whose elements, ``begin`` to ``end``, can be gathered at once."""
    count = len(offsets) - 1
    step = max(1, count * _GATHERED // max(total * width, 1))
    edges = [*range(0, count, step), count]
    places = offsets[torch.tensor(edges, device=offsets.device)].tolist()
    return list(zip(edges[:-1], edges[1:], places[:-1], places[1:], strict=True))
