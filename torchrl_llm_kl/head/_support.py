"""Truncated sampling: the tokens that top-k, top-p and min-p leave at each position, or that a sampler has recorded."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchrl_llm_kl._numerics import from_zero

_BLOCK = 2**18  # logits, 1 MiB in float32


class Truncation(NamedTuple):
    """What a sampler leaves of a distribution: first top-k, then top-p, then min-p, each of what the one before left.

    The distribution is the one after the temperature. The defaults leave everything.

    Example:
        >>> Truncation(top_k=50, top_p=0.9)
        Truncation(top_k=50, top_p=0.9, min_p=0.0)

    Source: transformers' ``TopKLogitsWarper``, ``TopPLogitsWarper`` and ``MinPLogitsWarper``, in its order.
    """

    top_k: int = 0  #: the most probable tokens, and those equal to the last of them; 0 for all
    top_p: float = 1.0  #: the fewest tokens, most probable first, whose probabilities add up to this
    min_p: float = 0.0  #: tokens at least this probable, relative to the most probable one

    @property
    def active(self) -> bool:
        """Whether any token may be left out."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


WHOLE = Truncation()


class Kept(NamedTuple):
    """Tokens that a sampler could have drawn at each of ``N`` positions: as it recorded them, or found by :func:`linear_kept`.

    Example:
        >>> kept = Kept(torch.tensor([4, 7, 2]), torch.tensor([0, 2, 3]))  # two at the first position, one at the second
        >>> kept.take(torch.tensor([1, 0])).ids
        tensor([2, 4, 7])
    """

    ids: Tensor  #: of all positions, one after another; integers ``[M]``
    offsets: Tensor  #: position ``i`` has ``ids[offsets[i]:offsets[i + 1]]``; int64 ``[N + 1]``
    logits: Tensor | None = None  #: theirs under the head they were found with; None if recorded
    added: Tensor | None = None  #: where the target is kept although the truncation drops it; bool ``[N]``

    @classmethod
    def of(cls, ids: Tensor, counts: Tensor) -> Kept:
        """From the ids of all positions and how many each has; ``[M]`` and ``[N]``."""
        return cls(ids, from_zero(counts.cumsum(0)))

    @property
    def rows(self) -> Tensor:
        """The position of each token; ``[M]``."""
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
    """``log softmax`` over the last dimension, exact where a probability is nearly 1; ``-inf`` keeps its 0 gradient."""
    place = logits.argmax(-1, keepdim=True)
    # The largest becomes exactly 0, without a gradient of its own that would cancel the gradient of the others.
    shifted = (logits - logits.gather(-1, place)).scatter(-1, place, 0.0)
    # Its exponential, 1, is left out of the sum, which may be smaller than its rounding error.
    return shifted - shifted.exp().scatter(-1, place, 0.0).sum(-1, keepdim=True).log1p()


def local_index(targets: Tensor, cols: slice) -> tuple[Tensor, Tensor]:
    """Positions of the targets among some tokens, any of them for others, and whether they are; same shape as ``targets``."""
    index = targets - cols.start if cols.start else targets
    nearest = index.clamp(0, cols.stop - cols.start - 1)
    return nearest, nearest == index


class Support(NamedTuple):
    """The tokens that a policy may draw; all others are ruled out of the logits of a tile: they become ``-inf``.

    With ``kept`` these are the recorded tokens. Else they reach the ``floor`` of their position, which a forward over whole
    rows finds and a backward is given. ``targets`` are never ruled out.
    """

    truncation: Truncation
    kept: Kept | None
    floor: Tensor  # [N]
    targets: Tensor | None  # [N]
    find: bool  # whether to find the floor

    def restrict(self, logits: Tensor, rows: slice, cols: slice) -> None:
        """Rule tokens out of ``logits [n, v]``, in place."""
        if self.kept is not None:
            out = ~recorded(self.kept, logits, rows, cols)
        else:
            if self.find:
                self.floor[rows] = floors_of(logits, self.truncation)  # in place: the sweep returns it
            out = logits < self.floor[rows].unsqueeze(-1)
        spare(out, None if self.targets is None else self.targets[rows], cols)
        logits.masked_fill_(out, -math.inf)


def spare(out: Tensor, targets: Tensor | None, cols: slice) -> Tensor:
    """Remove the targets from the mask of tokens that are ruled ``out [n, v]``, in place; return where one was; ``[n]``."""
    if targets is None:
        return torch.zeros_like(out[:, 0])
    index, inside = local_index(targets.unsqueeze(1), cols)
    was = out.gather(1, index)
    out.scatter_(1, index, was & ~inside)
    return (was & inside).squeeze(1)


def recorded(kept: Kept, logits: Tensor, rows: slice, cols: slice) -> Tensor:
    """Whether each token of a tile was recorded; boolean ``[n, v]``."""
    mask = torch.zeros_like(logits, dtype=torch.bool)
    offsets = kept.offsets[rows.start : rows.stop + 1]
    counts = offsets.diff()
    row = torch.arange(len(counts), device=logits.device).repeat_interleave(counts)
    token = kept.ids[offsets[0] : offsets[-1]].long() - cols.start
    inside = (token >= 0) & (token < logits.shape[1])
    mask[row[inside], token[inside]] = True
    return mask


def by_row(row: Tensor, logits: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort logits by their position, then from the largest; the order, and for each position its start and number, ``[n]``."""
    order = logits.argsort(descending=True)
    order = order[row[order].argsort(stable=True)]
    counts = torch.bincount(row, minlength=count)
    return order, counts.cumsum(0) - counts, counts


def floors_of(logits: Tensor, truncation: Truncation) -> Tensor:
    """:func:`floor_of`, on a CPU of as many rows at a time as its cache holds, since they are read several times."""
    step = max(1, _BLOCK // logits.shape[1]) if logits.device.type == "cpu" else max(len(logits), 1)
    return torch.cat([floor_of(part, truncation) for part in logits.split(step)])


def floor_of(logits: Tensor, truncation: Truncation) -> Tensor:
    """A number between the smallest logit that is kept and the largest that is not; of whole rows ``[n, V]``, ``[n]``.

    Between them, so that logits that another sweep computes with other rounding fall on the same side.
    """
    top_k, top_p, min_p = truncation
    floor = logits.new_full(logits.shape[:1], -math.inf)
    left = logits  # by the steps so far
    if 0 < top_k < logits.shape[1]:
        best = logits.topk(top_k + 1, -1).values
        floor = _middle(best[:, -2], best[:, -1])
        # Top-k leaves all that are equal to its last; to see whether some are would be a host sync.
        tied = logits.device.type != "cpu" or bool((best[:, -2] == best[:, -1]).any())
        left = logits.masked_fill(logits < floor.unsqueeze(-1), -math.inf) if tied else best[:, :-1]
    if top_p < 1:
        floor = torch.maximum(floor, _nucleus_floor(left, top_p))
    if min_p > 0:
        floor = torch.maximum(floor, logits.amax(-1) + math.log(min_p))
    return floor


def _nucleus_floor(logits: Tensor, top_p: float) -> Tensor:
    """The floor of top-p; ``[n]``."""
    if logits.device.type != "cpu":
        return _floor_of_sorted(logits, top_p)
    probs = logits.softmax(-1)
    # Tokens less probable than this add up to less than 1 - p, whatever their number: top-p keeps none of them.
    least = (1 - top_p) / logits.shape[1]
    row, token = (probs > least).nonzero(as_tuple=True)
    values, probs = logits[row, token], probs[row, token]
    order, start, counts = by_row(row, values, len(logits))
    row, values, probs = row[order], values[order], probs[order]
    place = torch.arange(len(row), device=row.device) - start[row]
    shape = len(logits), int(counts.max()) + 1
    ordered, share = logits.new_full(shape, -math.inf), logits.new_zeros(shape)
    ordered[row, place], share[row, place] = values, probs
    # A token stays while those before it have less than p; rounding must not add one.
    last = torch.minimum((share.cumsum(-1) < top_p).sum(-1), counts - 1)
    lowest, highest = (ordered.gather(1, at.unsqueeze(1)).squeeze(1) for at in (last, last + 1))
    # Without another candidate the largest that is left out is below what makes one.
    border = logits.logsumexp(-1) + math.log(least)
    return _middle(lowest, torch.where(last + 1 < counts, highest, border))


def _floor_of_sorted(logits: Tensor, top_p: float) -> Tensor:
    """:func:`_nucleus_floor` from a sort of all logits: the number of candidates would be a host sync."""
    ordered = F.pad(logits.sort(-1, descending=True).values, (0, 1), value=-math.inf)
    below = (ordered.softmax(-1).cumsum(-1) < top_p).sum(-1)
    last = torch.minimum(below, (ordered > -math.inf).sum(-1) - 1).clamp(min=0)
    return _middle(*(ordered.gather(1, at.unsqueeze(1)).squeeze(1) for at in (last, last + 1)))


def _middle(kept: Tensor, left_out: Tensor) -> Tensor:
    """The middle of both; ``kept`` where it would round to ``left_out``, below it where nothing is left out."""
    middle = kept + 0.5 * (left_out - kept)
    return torch.where(left_out.isneginf(), kept - 1.0, torch.where(middle > left_out, middle, kept))


def dropped(logits: Tensor, truncation: Truncation, kept: Kept | None, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of whole rows ``[n, V]`` that are ruled out, never the targets; and where a target was added.

    Boolean ``[n, V]`` and ``[n]``.
    """
    logits, whole = logits.detach(), slice(0, logits.shape[1])
    if kept is not None:
        out = ~recorded(kept, logits, slice(0, len(logits)), whole)
    else:
        out = logits < floor_of(logits, truncation).unsqueeze(-1)
    return out, spare(out, targets, whole)
