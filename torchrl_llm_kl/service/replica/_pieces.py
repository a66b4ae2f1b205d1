"""Large requests in pieces: cut between sequences, and their replies joined again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from torchrl_llm_kl.service._wire import Reply, Request


class Pieces:
    """A request in units of whole sequences.

    Sequences are sorted, so that those with a common prefix are neighbours. A request that is small or ill-formed is one unit.

    Attributes:
        sizes: tokens of each unit.
    """

    def __init__(self, request: Request, limit: int) -> None:
        """Units of at most ``limit`` tokens, or of one longer sequence."""
        self.request = request
        if request.num_tokens <= limit or request.num_sequences < 2:
            self._rows, self.sizes = [np.arange(request.num_sequences)], [request.num_tokens]
            return
        lengths = request.scored.tokens.lengths.numpy()
        self._rows = _cut(request.scored.tokens.values.numpy(), lengths, limit)
        self.sizes = [int(lengths[rows].sum()) for rows in self._rows]

    def part(self, units: Sequence[int]) -> Request:
        """A request for some units."""
        return self.request if len(units) == len(self._rows) else self.request.select(self.rows(units))

    def join(self, replies: Sequence[tuple[Sequence[int], Reply]]) -> Reply:
        """The reply to the whole request from the replies to parts, which cover each unit once."""
        first, mask = replies[0][1], self.request.scored.mask
        if len(replies[0][0]) == len(self._rows):
            return first
        elements = [self.request.scored.elements(torch.from_numpy(self.rows(units))) for units, _ in replies]
        places = (mask.cumsum(0) - 1)[torch.cat([some[mask[some]] for some in elements])].argsort()
        columns = {name: torch.cat([reply.columns[name] for _, reply in replies])[places] for name in first.columns}
        return replace(first, columns=columns)

    def rows(self, units: Sequence[int]) -> np.ndarray:
        """The sequences of some units, in the order of :meth:`part`; all of the request if it is given all units."""
        if len(units) == len(self._rows):
            return np.arange(self.request.num_sequences)
        rows: np.ndarray = np.concatenate([self._rows[unit] for unit in units])
        return rows


def _cut(tokens: np.ndarray, lengths: np.ndarray, limit: int) -> list[np.ndarray]:
    """Sequences in units of at most ``limit`` tokens, those with a common prefix next to each other."""
    ends = np.cumsum(lengths).tolist()
    big = tokens.astype(tokens.dtype.newbyteorder(">")).tobytes()  # bytes in the order of the ids
    width, sizes = tokens.itemsize, lengths.tolist()
    keys = [big[(end - n) * width : end * width] for end, n in zip(ends, sizes, strict=True)]
    units: list[list[int]] = [[]]
    room = limit
    for row in sorted(range(len(keys)), key=keys.__getitem__):
        if units[-1] and sizes[row] > room:
            units.append([])
            room = limit
        units[-1].append(row)
        room -= sizes[row]
    return [np.array(unit) for unit in units]
