"""The pieces of every sweep: truncation, heads and their logits, and tiles of positions x vocabulary.

Shapes: ``N`` positions, ``H`` hidden, ``V`` vocabulary. A tile has ``n`` positions and ``v`` tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from torchrl_llm_kl._numerics import from_zero, wide_dtype
from torchrl_llm_kl._private import onednn_linear

_BLOCK = 2**18  # logits that floors_of() reads at once on a CPU, 1 MiB in float32


class Truncation(NamedTuple):
    """A sampler's truncation: first top-k, then top-p, then min-p, each applied to the result of the one before.

    It applies after the temperature. The defaults keep every token.

    Example:
        >>> Truncation(top_k=50, top_p=0.9)
        Truncation(top_k=50, top_p=0.9, min_p=0.0)

    Source: transformers' ``TopKLogitsWarper``, ``TopPLogitsWarper`` and ``MinPLogitsWarper``, in its order.
    """

    top_k: int = 0  #: number of most probable tokens, plus ties with the last one; 0 for all
    top_p: float = 1.0  #: keep the smallest set of top tokens with at least this total probability
    min_p: float = 0.0  #: keep tokens of at least this probability relative to the most probable one

    @property
    def active(self) -> bool:
        """Whether any token may be excluded."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


WHOLE = Truncation()


class Kept(NamedTuple):
    """The tokens that a sampler could have drawn at each of ``N`` positions, recorded or found by :func:`linear_kept`.

    Example:
        >>> kept = Kept(torch.tensor([4, 7, 2]), torch.tensor([0, 2, 3]))  # two at the first position, one at the second
        >>> kept.take(torch.tensor([1, 0])).ids
        tensor([2, 4, 7])
    """

    ids: Tensor  #: token ids, position after position; integers ``[M]``
    offsets: Tensor  #: position ``i`` has ``ids[offsets[i] : offsets[i + 1]]``; int64 ``[N + 1]``
    logits: Tensor | None = None  #: logits under the head that found them, or None if recorded
    added: Tensor | None = None  #: True where the target is kept although the truncation excludes it; bool ``[N]``

    @classmethod
    def of(cls, ids: Tensor, counts: Tensor) -> Kept:
        """Build from the ids of all positions, ``[M]``, and the number of each position, ``[N]``."""
        return cls(ids, from_zero(counts.cumsum(0)))

    @property
    def rows(self) -> Tensor:
        """The position of each token, ``[M]``."""
        count = torch.arange(len(self.offsets) - 1, device=self.offsets.device)
        return count.repeat_interleave(self.offsets.diff(), output_size=len(self.ids))

    def take(self, positions: Tensor) -> Kept:
        """The tokens of some positions, in their order."""
        starts, counts = self.offsets[:-1][positions], self.offsets.diff()[positions]
        offsets = from_zero(counts.cumsum(0))
        index = torch.arange(int(offsets[-1]), device=offsets.device)
        index = index + (starts - offsets[:-1]).repeat_interleave(counts, output_size=len(index))
        logits = None if self.logits is None else self.logits[index]
        added = None if self.added is None else self.added[positions]
        return Kept(self.ids[index], offsets, logits, added)


def log_softmax(logits: Tensor) -> Tensor:
    """``log softmax`` over the last dimension, exact where a probability is nearly 1. ``-inf`` has gradient 0."""
    place = logits.argmax(-1, keepdim=True)
    # The largest logit becomes exactly 0, without a gradient of its own that would cancel the gradient of the others.
    shifted = (logits - logits.gather(-1, place)).scatter(-1, place, 0.0)
    # The sum leaves out its exponential, 1: the other exponentials may be smaller than the rounding error of 1.
    return shifted - shifted.exp().scatter(-1, place, 0.0).sum(-1, keepdim=True).log1p()


def local_index(targets: Tensor, cols: slice) -> tuple[Tensor, Tensor]:
    """The index of each target among the tokens ``cols``, and whether it is one of them, in the shape of ``targets``.

    The index of any other target is arbitrary.
    """
    index = targets - cols.start if cols.start else targets
    nearest = index.clamp(0, cols.stop - cols.start - 1)
    return nearest, nearest == index


class Support(NamedTuple):
    """The tokens that a policy may draw. In the logits of a tile all others become ``-inf``.

    With ``kept`` they are the recorded tokens, else the tokens whose logit is at least the ``floor`` of the position. A forward
    over whole rows computes the floor, and the backward reuses it. ``targets`` are never excluded.
    """

    truncation: Truncation
    kept: Kept | None
    floor: Tensor  # [N]
    targets: Tensor | None  # [N]
    find: bool  # whether to compute the floor

    def restrict(self, logits: Tensor, rows: slice, cols: slice) -> None:
        """Exclude tokens from ``logits [n, v]``, in place."""
        if self.kept is not None:
            out = ~recorded(self.kept, logits, rows, cols)
        else:
            if self.find:
                self.floor[rows] = floors_of(logits, self.truncation)  # in place, since the sweep returns it
            out = logits < self.floor[rows].unsqueeze(-1)
        spare(out, None if self.targets is None else self.targets[rows], cols)
        logits.masked_fill_(out, -math.inf)


def spare(out: Tensor, targets: Tensor | None, cols: slice) -> Tensor:
    """Remove the targets from the exclusion mask ``out [n, v]``, in place. Returns where one had been excluded, ``[n]``."""
    if targets is None:
        return torch.zeros_like(out[:, 0])
    index, inside = local_index(targets.unsqueeze(1), cols)
    was = out.gather(1, index)
    out.scatter_(1, index, was & ~inside)
    return (was & inside).squeeze(1)


def recorded(kept: Kept, logits: Tensor, rows: slice, cols: slice) -> Tensor:
    """A mask of the recorded tokens in a tile; boolean ``[n, v]``."""
    mask = torch.zeros_like(logits, dtype=torch.bool)
    offsets = kept.offsets[rows.start : rows.stop + 1]
    counts = offsets.diff()
    row = torch.arange(len(counts), device=logits.device).repeat_interleave(counts)
    token = kept.ids[offsets[0] : offsets[-1]].long() - cols.start
    inside = (token >= 0) & (token < logits.shape[1])
    mask[row[inside], token[inside]] = True
    return mask


def by_row(row: Tensor, logits: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort logits by position, then descending. Returns the order, and the start and the number of each position, ``[n]``."""
    order = logits.argsort(descending=True)
    order = order[row[order].argsort(stable=True)]
    counts = torch.bincount(row, minlength=count)
    return order, counts.cumsum(0) - counts, counts


def floors_of(logits: Tensor, truncation: Truncation) -> Tensor:
    """:func:`floor_of` in blocks of rows. On a CPU a block fits into the cache, since it is read several times."""
    step = max(1, _BLOCK // logits.shape[1]) if logits.device.type == "cpu" else max(len(logits), 1)
    return torch.cat([floor_of(part, truncation) for part in logits.split(step)])


def floor_of(logits: Tensor, truncation: Truncation) -> Tensor:
    """A bound between the smallest kept and the largest excluded logit of each whole row, ``[n, V]`` to ``[n]``.

    It lies strictly between them where it can, so that logits with other rounding, from another sweep, fall on the same side.
    """
    top_k, top_p, min_p = truncation
    floor = logits.new_full(logits.shape[:1], -math.inf)
    left = logits  # logits that the steps so far keep
    if 0 < top_k < logits.shape[1]:
        best = logits.topk(top_k + 1, -1).values
        floor = _middle(best[:, -2], best[:, -1])
        # Top-k keeps all ties with its last token. On an accelerator ties are assumed, since a look would be a host sync.
        tied = logits.device.type != "cpu" or bool((best[:, -2] == best[:, -1]).any())
        left = logits.masked_fill(logits < floor.unsqueeze(-1), -math.inf) if tied else best[:, :-1]
    if top_p < 1:
        floor = torch.maximum(floor, _nucleus_floor(left, top_p))
    if min_p > 0:
        floor = torch.maximum(floor, logits.amax(-1) + math.log(min_p))
    return floor


def _nucleus_floor(logits: Tensor, top_p: float) -> Tensor:
    """The floor of top-p for each row, ``[n]``."""
    if logits.device.type != "cpu" or not len(logits):
        return _floor_of_sorted(logits, top_p)
    probs = logits.softmax(-1)
    # All tokens less probable than this have less than 1 - p together, so top-p excludes them.
    least = (1 - top_p) / logits.shape[1]
    row, token = (probs > least).nonzero(as_tuple=True)
    values, probs = logits[row, token], probs[row, token]
    order, start, counts = by_row(row, values, len(logits))
    row, values, probs = row[order], values[order], probs[order]
    place = torch.arange(len(row), device=row.device) - start[row]
    shape = len(logits), int(counts.max()) + 1
    ordered, share = logits.new_full(shape, -math.inf), logits.new_zeros(shape)
    ordered[row, place], share[row, place] = values, probs
    # A token is kept if the more probable ones have less than p. The minimum guards against a rounded sum below p.
    last = torch.minimum((share.cumsum(-1) < top_p).sum(-1), counts - 1)
    lowest, highest = (ordered.gather(1, at.unsqueeze(1)).squeeze(1) for at in (last, last + 1))
    # If all candidates are kept, the largest excluded logit is below the bound of candidates.
    border = logits.logsumexp(-1) + math.log(least)
    return _middle(lowest, torch.where(last + 1 < counts, highest, border))


def _floor_of_sorted(logits: Tensor, top_p: float) -> Tensor:
    """:func:`_nucleus_floor` from a sort of all logits, since counting candidates would be a host sync."""
    ordered = F.pad(logits.sort(-1, descending=True).values, (0, 1), value=-math.inf)
    below = (ordered.softmax(-1).cumsum(-1) < top_p).sum(-1)
    last = torch.minimum(below, (ordered > -math.inf).sum(-1) - 1).clamp(min=0)
    return _middle(*(ordered.gather(1, at.unsqueeze(1)).squeeze(1) for at in (last, last + 1)))


def _middle(kept: Tensor, left_out: Tensor) -> Tensor:
    """The middle of two logits. It is ``kept`` where the middle rounds to ``left_out``, and less if nothing is left out."""
    middle = kept + 0.5 * (left_out - kept)
    return torch.where(left_out.isneginf(), kept - 1.0, torch.where(middle > left_out, middle, kept))


def dropped(logits: Tensor, truncation: Truncation, kept: Kept | None, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Masks of the excluded tokens of whole rows, ``[n, V]``, and of positions whose target was kept anyway, ``[n]``."""
    logits, whole = logits.detach(), slice(0, logits.shape[1])
    if kept is not None:
        out = ~recorded(kept, logits, slice(0, len(logits)), whole)
    else:
        out = logits < floor_of(logits, truncation).unsqueeze(-1)
    return out, spare(out, targets, whole)


# ------------------------------------------------------------------ tiles


# exp underflows to 0 here, in float64 too. Log-probs are clamped to it before they meet their probability: 0 * -inf is NaN.
LOG_ZERO = -1000.0

# Fewest positions of a tile of whole rows. Measured: 16 take twice the time of 128, and 64 a tenth more.
_FEWEST_WHOLE_ROWS = 64

#: Weight ``[v, H]`` and bias ``[v]`` of a tile's tokens.
Columns = tuple[Tensor | None, Tensor | None]


class HeadOutput(NamedTuple):
    """The result of :func:`linear_log_prob`: nats, ``[N]`` each, float32 or wider."""

    log_prob: Tensor  #: log-probs of the targets
    entropy: Tensor | None  #: of the whole distribution, or None unless requested


class PairOutput(NamedTuple):
    """The result of :func:`linear_pair`: nats, ``[N]`` each, float32 or wider."""

    kl: Tensor  #: the divergence of the two heads
    log_prob: Tensor | None  #: of the targets under the policy, or None without targets
    ref_log_prob: Tensor | None  #: of the targets under the reference, or None without targets
    entropy: Tensor | None  #: of the policy, or None unless requested


class OutcomesOutput(NamedTuple):
    """The result of :func:`linear_outcomes`: nats, float32 or wider."""

    log_prob: Tensor  #: of the targets, ``[N]``
    entropy: Tensor | None  #: of the whole distribution, ``[N]``, None unless requested
    #: log-probs of the given ids, then the log of the total probability of all other tokens, ``[N, *M, k + 1]``
    outcomes: Tensor


class Result(NamedTuple):
    """All results of a sweep: the fields of :class:`PairOutput` and of :class:`OutcomesOutput`."""

    kl: Tensor | None  # [N] each
    log_prob: Tensor | None
    ref_log_prob: Tensor | None
    entropy: Tensor | None
    outcomes: Tensor | None  # the policy's; [N, M, k + 1]


class TopKOutput(NamedTuple):
    """The result of :func:`linear_top_k`."""

    indices: Tensor  #: tokens, most probable first, ``[N, k]``
    log_probs: Tensor  #: nats, ``[N, k]``
    tail_log_prob: Tensor  #: log of the total probability of all other tokens, ``[N]``, ``-inf`` if there are none
    log_prob: Tensor | None = None  #: of the targets, ``[N]``, None without targets


class Slice(NamedTuple):
    """This rank's slice of a vocabulary of ``vocab`` tokens, ``first`` to ``first + size``. ``group`` has all its ranks."""

    group: dist.ProcessGroup
    first: int
    size: int
    vocab: int

    @property
    def ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self.group)

    def gather(self, values: Tensor) -> Tensor:
        """Gather each rank's ``values`` in the order of the vocabulary, ``[R, ...]``."""
        values = values.contiguous()
        out = [torch.empty_like(values) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(out, values, group=self.group)
        return torch.stack(out)

    def add(self, gradient: Tensor | None) -> None:
        """Sum the ranks' gradients in place. Each rank has the part from its own tokens."""
        if gradient is not None:
            dist.all_reduce(gradient, group=self.group)


class Head(NamedTuple):
    """One model's logits: ``softcap(scale * (hidden @ weight.T + bias)) / temperature``, with the product in ``dtype``.

    Without a weight, ``hidden`` is the product itself, ``[N, V]``.
    """

    hidden: Tensor  # [N, H]
    weight: Tensor | None  # [V, H]
    bias: Tensor | None  # [V]
    dtype: torch.dtype
    temperature: float = 1.0
    scale: float = 1.0
    soft_cap: float | None = None
    part: Slice | None = None  # the slice of weight and bias if the vocabulary is sharded

    @property
    def gain(self) -> float:
        """The factor after the tanh of the soft cap."""
        return (self.soft_cap or self.temperature) / self.temperature

    @property
    def slope(self) -> float:
        """The derivative of a logit with respect to the product, without the tanh."""
        return self.scale / self.temperature

    @property
    def positions(self) -> int:  # N
        return self.hidden.shape[0]

    @property
    def vocab(self) -> int:  # V on this rank
        return self.hidden.shape[1] if self.weight is None else self.weight.shape[0]

    @property
    def whole_vocab(self) -> int:  # V of all ranks
        return self.vocab if self.part is None else self.part.vocab

    @property
    def requires_grad(self) -> bool:
        return any(t is not None and t.requires_grad for t in self[:3])

    @property
    def wide(self) -> torch.dtype:  # of everything after the product: float32 at least
        return wide_dtype(self.dtype)

    def per_position(self, fill: float) -> Tensor:
        return self.hidden.new_full((self.positions,), fill, dtype=self.wide)

    def columns(self, cols: slice) -> Columns:
        """Weight and bias of some tokens, in the dtype of the product."""
        weight, bias = (None if t is None else t[cols].to(self.dtype) for t in self[1:3])
        return weight, bias

    def logits(self, rows: slice, cols: slice, columns: Columns, out: Tensor) -> Tensor:
        """The logits of a tile, given :meth:`columns` of its tokens. They are in ``out [n, v]`` or in new memory."""
        weight, bias = columns
        factor = self.scale / (self.soft_cap or self.temperature)
        if weight is None or out.dtype != self.dtype:
            # A head in half precision rounds its logits. To match it, the product is rounded before the upcast.
            hidden = self.hidden[rows, cols] if weight is None else self.hidden[rows].to(self.dtype)
            out.copy_(hidden if weight is None else F.linear(hidden, weight, bias))
            if factor != 1.0:
                out.mul_(factor)
        else:
            hidden = self.hidden[rows].to(self.dtype)
            product = onednn_linear(hidden, weight, bias)
            if product is not None:
                out = product if factor == 1.0 else product.mul_(factor)
            else:
                start, beta = (out, 0.0) if bias is None else (bias, factor)
                torch.addmm(start, hidden, weight.T, beta=beta, alpha=factor, out=out)
        return out if self.soft_cap is None else out.tanh_().mul_(self.gain)


class Tokens(NamedTuple):
    """Token ids whose log-probs a sweep computes, and recorded tokens."""

    targets: Tensor | None = None  # [N]
    recorded: Kept | None = None  # the only tokens that the policy may draw
    ids: Tensor | None = None  # of the policy's outcomes, [N, M, k]


NO_TOKENS = Tokens()


@dataclass(frozen=True)
class Plan:
    """The tiles and the requested results of a sweep.

    ``shares`` are the weights of the policy's KL and of the reference's KL in the divergence. If one is 0, the other is the KL
    between the heads. If both are positive, each head's KL is to the mixture of the two.
    """

    chunk: tuple[int, int]  # positions and tokens of a tile
    entropy: bool = False  # the policy's
    shares: tuple[float, float] = (1.0, 0.0)
    truncation: Truncation = WHOLE  # the policy's
    keep_targets: bool = False  # the policy keeps the targets even if the truncation excludes them
    ref_kept: bool = False  # the reference is restricted to the tokens that the policy keeps

    @property
    def mixture(self) -> bool:
        return self.shares[0] > 0 and self.shares[1] > 0

    @property
    def weighing(self) -> int:
        """The index of the head whose probabilities weigh the KL, without a mixture."""
        return int(self.shares[1] > 0)

    def statistics(self, heads: int) -> int:
        """The number of tensors that the backward needs besides the result and the logits."""
        return 2 * heads + 2 * (heads == 2 and self.mixture) + self.truncation.active

    def forward_chunk(self, head: Head) -> tuple[int, int]:
        """The tile of the forward sweep. Mixture and truncation need whole rows, so such tiles have fewer rows."""
        (positions, tokens), vocab = self.chunk, head.vocab
        if not (self.mixture or self.truncation.active) or tokens >= vocab:
            return self.chunk
        # As many elements as in other tiles, but not too few rows, since every block of rows reads the whole head.
        return max(positions * tokens // vocab, min(positions, _FEWEST_WHOLE_ROWS)), vocab


def support_of(plan: Plan, tokens: Tokens, floor: Tensor, *, find: bool) -> Support | None:
    """The tokens that the policy of a plan may draw, or None for the whole vocabulary."""
    if tokens.recorded is None and not plan.truncation.active:
        return None
    return Support(plan.truncation, tokens.recorded, floor, tokens.targets if plan.keep_targets else None, find)


def tiles(
    chunk: tuple[int, int],
    heads: list[Head],
    spare: int,
    kept: Sequence[Tensor] = (),
    support: Support | None = None,
    both: bool = False,
) -> Iterator[tuple[slice, slice, list[Columns], list[Tensor], list[Tensor]]]:
    """Iterate over tiles of positions x vocabulary. Tiles of the same tokens are consecutive.

    The first head's logits are restricted to ``support``, and with ``both`` the second's too. ``kept`` has the logits of the
    first tiles, of all heads for each tile. They are copied and not computed.

    Yields:
        The positions, the tokens, each head's weight and bias of the tokens, each head's logits, and ``spare`` uninitialized
        buffers. Logits and buffers are contiguous ``[n, v]``, and the next tile overwrites them.
    """
    count, vocab = heads[0].positions, heads[0].vocab
    n, v = min(chunk[0], max(count, 1)), min(chunk[1], vocab)
    flat = [heads[0].hidden.new_empty(n * v, dtype=heads[0].wide) for _ in range(len(heads) + spare)]
    kept = list(kept)
    for cols in (slice(start, min(start + v, vocab)) for start in range(0, vocab, v)):
        columns = [head.columns(cols) for head in heads]
        for rows in (slice(start, min(start + n, count)) for start in range(0, count, n)):
            shape = rows.stop - rows.start, cols.stop - cols.start
            logits = [each[: shape[0] * shape[1]].view(shape) for each in flat]
            known, kept = kept[: len(heads)], kept[len(heads) :]
            for i, head in enumerate(heads):
                if known:
                    logits[i].copy_(known[i])
                else:
                    logits[i] = head.logits(rows, cols, columns[i], out=logits[i])
                    if i == 0 and support is not None:
                        support.restrict(logits[0], rows, cols)
                    elif both:
                        logits[i].masked_fill_(logits[0].isneginf(), -math.inf)
            yield rows, cols, columns, logits[: len(heads)], logits[len(heads) :]


def without_ids(values: Tensor, ids: Tensor, cols: slice, out: Tensor) -> Tensor:
    """Fill ``out`` with the ``values [n, v]`` of a tile, with ``-inf`` at ``ids [n, k]``."""
    index, inside = local_index(ids, cols)
    ruled_out = torch.where(inside, -torch.inf, torch.zeros((), dtype=values.dtype, device=values.device))
    return out.copy_(values).scatter_add_(1, index, ruled_out)


def rest_of(prob: Tensor, matters: Tensor | None) -> Tensor:
    """The sum of all probabilities except the largest, relative to the largest, from ``prob [n, v]`` to ``[n]``.

    If the largest is above 0.9, the others are summed, since 1 minus the largest would lose digits. At other rows that
    difference has six digits in float32. ``matters`` is a mask of the rows that need the digits; None for all. On an
    accelerator all rows are summed, since selecting some would be a host sync. ``prob`` has its values back at the end.
    """
    if prob.device.type != "cpu":
        best, place = prob.max(-1, keepdim=True)
        rest = prob.scatter_(1, place, 0.0).sum(-1).div_(best.squeeze(1))
        prob.scatter_(1, place, best)
        return rest
    best = prob.amax(-1)
    # The largest probability is exp(0) / sum, so its inverse is the sum.
    rest = best.reciprocal().sub_(1.0)
    likely = best > 0.9
    rows = (likely if matters is None else likely & matters).nonzero().squeeze(1)
    chosen = prob[rows]
    rest[rows] = chosen.scatter_(1, chosen.argmax(-1, keepdim=True), 0.0).sum(-1) / best[rows]
    return rest


def log_ratio_to_mixture(plan: Plan, log_probs: Sequence[Tensor], i: int, out: Tensor) -> Tensor:
    """``log p - log m``, always finite, for the probabilities ``p`` of head ``i`` and the mixture ``m`` of both heads."""
    # m / p is 1 + share * (q / p - 1). Where the heads agree, log1p keeps the digits that log p - log m would lose.
    torch.sub(log_probs[1 - i], log_probs[i], out=out).expm1_().nan_to_num_(nan=0.0)
    out.mul_(plan.shares[1 - i]).log1p_()
    # m is at least share * p. The clamp enforces that, since a share near 1 may round to 1.
    return out.clamp_(min=math.log(plan.shares[i])).neg_()
