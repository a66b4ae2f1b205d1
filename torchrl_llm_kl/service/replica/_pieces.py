"""Large requests in pieces: cut between sequences, and their replies joined again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import numpy as np

from torchrl_llm_kl.service._wire import Reply, Request, spans


class Pieces:
    """A request in units of whole sequences.

    Sequences are sorted, so that those with a common prefix are neighbours, and cut where neighbours have the shortest
    prefix in common. A request that is small or ill-formed is one unit.

    Attributes:
        sizes: tokens of each unit.
    """

    def __init__(self, request: Request, limit: int) -> None:
        """Units of at most ``limit`` tokens, or of one longer sequence."""
        self.request = request
        lengths = request.lengths
        whole = (
            request.num_tokens <= limit or lengths.size < 2 or lengths.min() < 0 or lengths.sum() != request.num_tokens
        )
        self._rows = [np.arange(lengths.size)] if whole else _cut(request.tokens, lengths, limit)
        self.sizes = [request.num_tokens] if whole else [int(lengths[rows].sum()) for rows in self._rows]
        if not whole:
            self._ends = np.cumsum(lengths)
            self._mask = request.flat_mask().numpy()
            scored = np.concatenate([[0], np.cumsum(self._mask)])
            self._counts = scored[self._ends] - scored[self._ends - lengths]  # scored tokens of each sequence
            self._starts = np.cumsum(self._counts) - self._counts

    def part(self, units: Sequence[int]) -> Request:
        """A request for some units."""
        if len(units) == len(self._rows):
            return self.request
        rows = self.rows(units)
        where = spans(self._ends[rows] - self.request.lengths[rows], self.request.lengths[rows])
        mask = None if self.request.mask is None else np.packbits(self._mask[where])
        replay = self.request.replay
        if replay is not None:
            replay = replay.take(spans(self._starts[rows], self._counts[rows]))
        given = {"tokens": self.request.tokens[where], "lengths": self.request.lengths[rows]}
        return replace(self.request, mask=mask, replay=replay, **given)

    def join(self, replies: Sequence[tuple[Sequence[int], Reply]]) -> Reply:
        """The reply to the whole request from the replies to parts, which cover each unit once."""
        if len(replies[0][0]) == len(self._rows):
            return replies[0][1]
        joined: dict[str, Any] = {}
        for name in (
            field.name for field in fields(Reply) if isinstance(getattr(replies[0][1], field.name), np.ndarray)
        ):
            first = getattr(replies[0][1], name)
            out = np.empty((int(self._counts.sum()), *first.shape[1:]), first.dtype)
            for units, reply in replies:
                rows = self.rows(units)
                out[spans(self._starts[rows], self._counts[rows])] = getattr(reply, name)
            joined[name] = out
        return replace(replies[0][1], **joined)

    def rows(self, units: Sequence[int]) -> np.ndarray:
        """The sequences of some units, in the order of :meth:`part`; those of the request if it is given all units."""
        if len(units) == len(self._rows):
            return np.arange(self.request.lengths.size)
        rows: np.ndarray = np.concatenate([self._rows[unit] for unit in units])
        return rows


def _cut(tokens: np.ndarray, lengths: np.ndarray, limit: int) -> list[np.ndarray]:
    """Sequences in units of at most ``limit`` tokens, cut where neighbours have little in common."""
    ends = np.cumsum(lengths)
    rows = [tokens[end - n : end] for end, n in zip(ends, lengths, strict=True)]
    big = tokens.astype(tokens.dtype.newbyteorder(">")).tobytes()  # bytes in the order of the ids
    width = tokens.itemsize
    keys = [big[(end - n) * width : end * width] for end, n in zip(ends.tolist(), lengths.tolist(), strict=True)]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    shared = [0, *(_common(rows[a], rows[b]) for a, b in pairwise(order))]  # with the sequence before
    sizes = lengths[order].tolist()
    units, start, total = [], 0, 0
    for i, size in enumerate(sizes):
        while i > start and total + size > limit:
            stop = _place_to_cut(sizes, shared, start, i, total)
            units.append(np.array(order[start:stop]))
            total -= sum(sizes[start:stop])
            start = stop
        total += size
    return [*units, np.array(order[start:])]


def _place_to_cut(sizes: Sequence[int], shared: Sequence[int], start: int, stop: int, total: int) -> int:
    """Where the prefix in common is shortest in the second half of ``start..stop``, which holds ``total`` tokens."""
    best, left = stop, total
    for place in range(stop - 1, start, -1):
        left -= sizes[place]
        if 2 * left < total:
            break
        if shared[place] < shared[best]:
            best = place
    return best


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Number of leading tokens that are equal."""
    n = min(a.size, b.size)
    different = a[:n] != b[:n]
    return int(different.argmax()) if different.any() else n
