"""Which replica scores which sequences."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

__all__ = ["Router"]

_TOKENS = 16


class Router:
    """Sends sequences that begin alike to the same replica, which remembers them.

    The tokens that decide are the first 16 after what all sequences so far have in common: a system prompt alone would send
    everything to one replica. Replicas are ranked by rendezvous hashing, so that the sequences of a dead one spread over the
    others, and the rest stays where it is.

    Args:
        num_replicas: how many there are.
    """

    def __init__(self, num_replicas: int) -> None:
        self.num_replicas = num_replicas
        self._common: np.ndarray | None = None

    def learn(self, rows: Sequence[np.ndarray]) -> None:
        """See what sequences have in common."""
        for row in rows:
            if self._common is None:
                self._common = row
            shared = min(len(row), len(self._common))
            different = np.flatnonzero(row[:shared] != self._common[:shared])
            self._common = self._common[: int(different[0]) if different.size else shared]

    def order(self, row: np.ndarray) -> tuple[int, ...]:
        """All replicas, the one in charge of this sequence first; the same in every process that has seen the same prompts."""
        if self.num_replicas == 1:
            return (0,)
        start = 0 if self._common is None else len(self._common)
        key = row[start : start + _TOKENS].astype(np.int64).tobytes()

        def rank(replica: int) -> bytes:
            return hashlib.blake2b(key + replica.to_bytes(4, "little"), digest_size=8).digest()

        return tuple(sorted(range(self.num_replicas), key=rank))
