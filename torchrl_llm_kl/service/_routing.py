"""Which replica scores which sequences."""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict

import numpy as np

__all__ = ["Router"]

_REMEMBERED = 8192  # sequences that may go on


class Router:
    """Sends answers to one prompt to the same replica, and a conversation that goes on to the one that remembers it.

    What decides is the prompt: all tokens before the first one to score, or the whole sequence if all of it is scored. Replicas
    are ranked by rendezvous hashing: the same order in every process, and the sequences of a replica that is down spread over
    all others. A sequence that begins with the whole of an earlier one is its continuation and follows it.

    Args:
        num_replicas: how many there are.
    """

    def __init__(self, num_replicas: int) -> None:
        self.num_replicas = num_replicas
        self._earlier: OrderedDict[tuple[int, bytes], tuple[int, ...]] = OrderedDict()
        self._lengths: Counter[int] = Counter()

    def order(self, row: np.ndarray, first_scored: int, *, goes_on: bool = False) -> tuple[int, ...]:
        """All replicas, the one in charge of a sequence first.

        Args:
            row: token ids ``[n]``.
            first_scored: position of the first token to score.
            goes_on: whether later sequences may continue it.
        """
        if self.num_replicas == 1:
            return (0,)
        row = np.ascontiguousarray(row, dtype=np.int64)
        order = self._continued(row) if goes_on else None
        if order is None:
            order = self._ranked((row[:first_scored] if first_scored > 1 else row).tobytes())
        if goes_on and len(row):
            self._remember(row, order)
        return order

    def _ranked(self, key: bytes) -> tuple[int, ...]:
        def rank(replica: int) -> bytes:
            return hashlib.blake2b(key, digest_size=8, salt=replica.to_bytes(8, "little")).digest()

        return tuple(sorted(range(self.num_replicas), key=rank))

    def _continued(self, row: np.ndarray) -> tuple[int, ...] | None:
        """Where the longest earlier sequence went that this one begins with."""
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
        if len(self._earlier) > _REMEMBERED:
            (length, _), _ = self._earlier.popitem(last=False)
            self._lengths[length] -= 1
            if not self._lengths[length]:
                del self._lengths[length]
