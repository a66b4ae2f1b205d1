"""Truncated sampling: the tokens that top-k, top-p and min-p leave at each position, or that a sampler has recorded."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
    """Tokens that a sampler could have drawn at each of ``N`` positions, as it recorded them."""

    ids: Tensor  #: those of all positions, one after another; integers ``[M]``
    offsets: Tensor  #: position ``i`` has ``ids[offsets[i]:offsets[i + 1]]``; int64 ``[N + 1]``


class Support:
    """Rules tokens out of the logits of a tile: they become ``-inf``.

    Below a floor for each position, which a forward over whole rows finds and a backward is given; or, with ``kept``, all but
    the recorded ones.
    """

    def __init__(self, truncation: Truncation, kept: Kept | None, floor: Tensor, *, find: bool) -> None:
        self.truncation, self.kept, self.floor, self.find = truncation, kept, floor, find

    def restrict(self, logits: Tensor, rows: slice, cols: slice) -> None:
        """Rule tokens out of ``logits [n, v]``, in place."""
        if self.kept is not None:
            logits.masked_fill_(~_recorded(self.kept, logits, rows, cols), -math.inf)
            return
        for block in _blocks(logits):
            part, floor = logits[block], self.floor[rows][block]
            if self.find:
                floor.copy_(floor_of(part, self.truncation))
            part.masked_fill_(part < floor.unsqueeze(-1), -math.inf)


def _blocks(logits: Tensor) -> list[slice]:
    """Rows that a CPU's cache holds, since they are read several times."""
    rows, vocab = logits.shape
    step = max(1, _BLOCK // vocab) if logits.device.type == "cpu" else max(rows, 1)
    return [slice(start, start + step) for start in range(0, rows, step)]


def support_of(plan: Any, kept: Kept | None, floor: Tensor, *, find: bool) -> Support | None:
    """The support of a plan's policy; None if it is the whole vocabulary."""
    return Support(plan.truncation, kept, floor, find=find) if kept is not None or plan.truncation.active else None


def _recorded(kept: Kept, logits: Tensor, rows: slice, cols: slice) -> Tensor:
    """Whether each token of a tile was recorded; boolean ``[n, v]``."""
    found = torch.zeros_like(logits, dtype=torch.bool)
    offsets = kept.offsets[rows.start : rows.stop + 1]
    counts = offsets.diff()
    row = torch.arange(len(counts), device=logits.device).repeat_interleave(counts)
    token = kept.ids[offsets[0] : offsets[-1]].long() - cols.start
    inside = (token >= 0) & (token < logits.shape[1])
    found[row[inside], token[inside]] = True
    return found


def floor_of(logits: Tensor, truncation: Truncation) -> Tensor:
    """A number between the smallest logit that is kept and the largest that is not; of whole rows ``[n, V]``, ``[n]``.

    Between them, so that logits that another sweep computes with other rounding fall on the same side.
    """
    top_k, top_p, min_p = truncation
    floor = logits.new_full(logits.shape[:1], -math.inf)
    left = logits  # by the steps so far
    if 0 < top_k < logits.shape[1]:
        best = logits.topk(top_k + 1, -1).values
        floor = _between(best[:, -2], best[:, -1])
        tied = bool((best[:, -2] == best[:, -1]).any())  # top-k leaves all that are equal to its last
        left = logits.masked_fill(logits < floor.unsqueeze(-1), -math.inf) if tied else best[:, :-1]
    if top_p < 1:
        floor = torch.maximum(floor, _nucleus_floor(left, top_p))
    if min_p > 0:
        floor = torch.maximum(floor, logits.amax(-1) + math.log(min_p))
    return floor


def _nucleus_floor(logits: Tensor, top_p: float) -> Tensor:
    """The floor of top-p alone; ``[n]``."""
    probs = logits.softmax(-1)
    # Tokens less probable than this add up to less than 1 - p, whatever their number: top-p keeps none of them.
    least = (1 - top_p) / logits.shape[1]
    row, token = (probs > least).nonzero(as_tuple=True)
    values, probs = logits[row, token], probs[row, token]
    # By row, then from the largest: a sort by value, then a stable one by row.
    order = values.argsort(descending=True)
    order = order[row[order].argsort(stable=True)]
    row, values, probs = row[order], values[order], probs[order]
    counts = torch.bincount(row, minlength=len(logits))
    place = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
    shape = len(logits), int(counts.max()) + 1
    ordered, share = logits.new_full(shape, -math.inf), logits.new_zeros(shape)
    ordered[row, place], share[row, place] = values, probs
    # A token stays while those before it have less than p; rounding must not add one.
    last = torch.minimum((share.cumsum(-1) < top_p).sum(-1), counts - 1)
    lowest, highest = (ordered.gather(1, at.unsqueeze(1)).squeeze(1) for at in (last, last + 1))
    # Without another candidate the largest that is left out is below what makes one.
    border = logits.logsumexp(-1) + math.log(least)
    return _between(lowest, torch.where(last + 1 < counts, highest, border))


def _between(kept: Tensor, left_out: Tensor) -> Tensor:
    """The middle of both; ``kept`` where they are equal, below it where nothing is left out."""
    middle = kept + 0.5 * (left_out - kept)
    return torch.where(left_out.isneginf(), kept - 1.0, middle)
