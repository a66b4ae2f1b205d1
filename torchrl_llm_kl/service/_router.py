"""Which replica scores which sequence: the same choice in every process."""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict

import numpy as np

_ROUTED = 8192  # sequences whose continuation a router recognises


class Router:
    """Sends all responses to one prompt to the same replica, and a continued conversation to the one that cached it.

    The key is the prompt: all tokens before the first one to score, or the whole sequence if all of it is scored. Rendezvous
    hashing ranks the replicas in the same order in every process, and spreads the sequences of a replica that is down over
    all others. A sequence that starts with all of an earlier one goes to the same replica.
    """

    def __init__(self, num_replicas: int) -> None:
        self.num_replicas = num_replicas
        self._earlier: OrderedDict[tuple[int, bytes], tuple[int, ...]] = OrderedDict()
        self._lengths: Counter[int] = Counter()

    def order(self, row: np.ndarray, first_scored: int, *, goes_on: bool = False) -> tuple[int, ...]:
        """All replicas, the preferred one for the token ids ``row [n]`` first; ``goes_on`` if later rows may continue it."""
        if self.num_replicas == 1:
            return (0,)
        row = np.ascontiguousarray(row, dtype=np.int64)
        order = self._continued(row) if goes_on else None
        if order is None:
            key = (row[:first_scored] if first_scored > 1 else row).tobytes()

            def rank(replica: int) -> bytes:
                return hashlib.blake2b(key, digest_size=8, salt=replica.to_bytes(8, "little")).digest()

            order = tuple(sorted(range(self.num_replicas), key=rank))
        if goes_on and len(row):
            self._remember(row, order)
        return order

    def _continued(self, row: np.ndarray) -> tuple[int, ...] | None:
        """The order of the longest earlier sequence that ``row`` starts with."""
        found, done, digest = None, 0, hashlib.blake2b(digest_size=8)
        for length in sorted(n for n in self._lengths if n <= len(row)):
            digest.update(row[done:length].tobytes())
            found, done = self._earlier.get((length, digest.copy().digest()), found), length
        return found

    def _remember(self, row: np.ndarray, order: tuple[int, ...]) -> None:
        key = (len(row), hashlib.blake2b(row.tobytes(), digest_size=8).digest())
        if key not in self._earlier:
            self._lengths[key[0]] += 1
        self._earlier[key] = order
        self._earlier.move_to_end(key)
        if len(self._earlier) > _ROUTED:
            (length, _), _ = self._earlier.popitem(last=False)
            self._lengths[length] -= 1
            if not self._lengths[length]:
                del self._lengths[length]
