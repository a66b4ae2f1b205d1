"""Which replica scores which sequence: the same choice in every process."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

import numpy as np

#: A replica gets at most this many times the mean number of tokens of a call, if the prompts allow it.
BALANCE = 1.25
_REMEMBERED = 8192  # sequences whose continuation a router recognises
_BLOCK = 32  # tokens between two places where a sequence is compared with earlier ones
_CACHED = 2**14  # tokens that are hashed together: their numbers stay in a processor's cache
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio: consecutive multiples are far apart


class _Home:
    """Sequences that one replica scores together: of one prompt, or of one conversation."""

    __slots__ = ("key", "replica")

    def __init__(self, key: int) -> None:
        self.key, self.replica = key, -1


class Router:
    """Sends all responses to one prompt to the same replica, and a continued conversation to the one that cached it.

    The key is the prompt: all tokens before the first one to score, or the whole sequence if all of it is scored. Rendezvous
    hashing ranks the replicas for it, in the same order in every process. A prompt goes to the first replica that would then
    hold at most 1.25 times the mean number of tokens (``BALANCE``), the prompts with the most tokens first. A sequence that
    starts with all of an earlier one goes to the same replica, whatever it holds. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._earlier = _Earlier(_REMEMBERED)

    def assign(
        self,
        tokens: np.ndarray,
        lengths: np.ndarray,
        first_scored: np.ndarray,
        replicas: Sequence[int],
        *,
        continues: bool = False,
    ) -> np.ndarray:
        """One of ``replicas`` for each sequence of a call.

        Args:
            tokens: the token ids of all sequences, concatenated; ``[N]``.
            lengths: of the sequences; ``[S]``.
            first_scored: position of the first token to score in each sequence, its length if none is scored; ``[S]``.
            replicas: numbers of the replicas to choose from.

        Keyword Args:
            continues: whether later calls may continue these sequences.

        Returns:
            Numbers of replicas, int64 ``[S]``.
        """
        if len(replicas) == 1:
            return np.full(len(lengths), replicas[0])
        lengths = lengths.astype(np.int64)
        starts, sums = lengths.cumsum() - lengths, _prefix_sums(tokens, lengths)
        cuts = np.where(first_scored > 1, first_scored, lengths)
        prompts = list(zip(cuts.tolist(), (sums[starts + cuts] - sums[starts]).tolist(), strict=True))
        with self._lock:
            homes: dict[tuple[int, int], _Home] = {}
            sizes: Counter[_Home] = Counter()
            for i in np.argsort(lengths, kind="stable").tolist():  # a sequence before those that continue it
                sequence = sums[starts[i] : starts[i] + lengths[i] + 1] - sums[starts[i]]
                home = homes.get(prompts[i]) or (self._earlier.find(sequence) if continues else None)
                homes[prompts[i]] = home = home or _Home(prompts[i][1])
                sizes[home] += len(sequence) - 1
                if continues:
                    self._earlier.add(sequence, home)
            _settle(sizes, replicas)
            return np.array([homes[prompt].replica for prompt in prompts], np.int64)


def _settle(sizes: Counter[_Home], replicas: Sequence[int]) -> None:
    """Give a replica to each home whose own is none of ``replicas``, in bounded rendezvous order."""
    load = dict.fromkeys(replicas, 0)
    for home in sizes:
        if home.replica in load:
            load[home.replica] += sizes[home]
    new = sorted((home for home in sizes if home.replica not in load), key=lambda home: (-sizes[home], home.key))
    if not new:
        return
    limit = max(BALANCE * sizes.total() / len(load), sizes[new[0]])
    keys = np.array([home.key for home in new], np.uint64)[:, None]
    ranks = _mixed(keys + _mixed(np.array(replicas).astype(np.uint64)[None] * _GOLDEN + _GOLDEN)).argsort(axis=1)
    for home, rank in zip(new, ranks.tolist(), strict=True):
        order, size = [replicas[i] for i in rank], sizes[home]
        fitting = [replica for replica in order if load[replica] + size <= limit]
        home.replica = fitting[0] if fitting else min(order, key=load.__getitem__)
        load[home.replica] += size


# ------------------------------------------------------------------ sequences that start with earlier ones


class _Earlier:
    """The homes of sequences, by their length and the sum of :func:`_prefix_sums` at their ends; all are forgotten if full.

    The lengths that are possible after each block of tokens are known, so that a search takes few steps for any number of
    sequences and lengths.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._homes: dict[tuple[int, int], _Home] = {}
        self._lengths: dict[int, set[int]] = {}  # sum at the start of the last block -> lengths

    def __len__(self) -> int:
        return len(self._homes)

    def find(self, sequence: np.ndarray) -> _Home | None:
        """The home of the longest earlier sequence that this one, given by its prefix sums ``[n + 1]``, starts with."""
        for block in reversed(sequence[::_BLOCK].tolist()):
            for length in sorted(self._lengths.get(block, ()), reverse=True):
                if length < len(sequence) and (found := self._homes.get((length, int(sequence[length])))):
                    return found
        return None

    def add(self, sequence: np.ndarray, home: _Home) -> None:
        """Remember a sequence."""
        length = len(sequence) - 1
        if length == 0:  # every sequence starts with it
            return
        if len(self._homes) >= self._limit:
            self._homes.clear()
            self._lengths.clear()
        self._homes[length, int(sequence[length])] = home
        self._lengths.setdefault(int(sequence[length - length % _BLOCK]), set()).add(length)


def _prefix_sums(tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Running sums over a hash of each token and its position; uint64 ``[N + 1]``.

    The difference of the sums at the start of a sequence and after its n-th token identifies its first n tokens: equal ones
    for different tokens are as rare as for random numbers of 64 bits. A clash sends a sequence to another replica, no more.
    """
    starts = np.repeat((lengths.cumsum() - lengths).astype(np.uint64), lengths)
    sums = np.arange(len(tokens) + 1, dtype=np.uint64)
    for i in range(0, len(tokens), _CACHED):
        part = sums[1 + i : 1 + i + _CACHED]
        part -= starts[i : i + _CACHED]  # positions from 1
        part *= _GOLDEN
        part += tokens[i : i + _CACHED].astype(np.uint64)
        _mixed(part)
    return sums.cumsum(out=sums)


def _mixed(values: np.ndarray) -> np.ndarray:
    """A hash of each uint64, in place: the finaliser of SplitMix64 (Steele, Lea and Flood, 2014)."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values
