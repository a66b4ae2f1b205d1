"""Scores on disk: a SQLite file that any number of processes read and write. Independent of torch.

Each record has a checksum over its key and scores, which is checked at each read: a damaged file costs a forward, never a
wrong score. Every call opens the file anew, so that threads, forks and copies share nothing.
"""

from __future__ import annotations

import os
import sqlite3
import struct
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

import numpy as np

#: Bytes of a key, which identifies weights, settings and token ids.
KEY_BYTES = 16
_CHECK_BYTES = 8
_FILE = "scores.sqlite3"
_HEAD = struct.Struct("<QQB")  # tokens, the first of them with a score, bytes of a score
_BUSY = 60.0  # seconds that another process may hold the file
_PAGE = 4096
_AT_ONCE = 500  # keys in a query
_MARK_EVERY = 60.0  # seconds between marks of use: a commit each
_SETUP = (
    f"PRAGMA page_size = {_PAGE}",
    "PRAGMA synchronous = NORMAL",
    "PRAGMA trusted_schema = OFF",
    "CREATE TABLE IF NOT EXISTS records (key BLOB PRIMARY KEY, used REAL, record BLOB) WITHOUT ROWID",
    "CREATE INDEX IF NOT EXISTS oldest ON records (used)",
)
T = TypeVar("T")


class ScoreStore:
    """A folder of scores, found by the digest of what they depend on. Bounded; shared by threads and processes.

    Scores are written when they are added; of two processes that add one, the first is kept. When the folder is full, those
    that were not read for the longest time go. Pickles and copies open the same folder. Processes on several machines need a
    file system with working locks.

    A store may be unwritable or damaged at any time: it warns, and the scores are computed again.

    Args:
        folder: created if missing. Every model, setting and process may share one.

    Keyword Args:
        max_bytes: of the file, never exceeded; one that is larger already does not shrink. A token takes 4 bytes (8 in
            float64) from the first scored one of its sequence to the last, a sequence about 80 more. Default 4 GiB, about a
            billion tokens.

    Attributes:
        tokens_seen: number of tokens that scorers looked up in this process.
        tokens_recalled: number of those that were found.

    Raises:
        ValueError: if ``max_bytes`` is below 64 KiB.
        OSError: if the folder cannot be created.

    Example:
        >>> import numpy as np, tempfile
        >>> store = ScoreStore(tempfile.mkdtemp())
        >>> key = b"sixteen bytes 01"
        >>> store.add([key], [3], np.array([np.nan, -0.5, -1.5], dtype=np.float32))
        >>> store.read([key, b"sixteen bytes 02"], [3, 1])
        array([ nan, -0.5, -1.5,  nan], dtype=float32)
    """

    def __init__(self, folder: str | os.PathLike[str], *, max_bytes: int = 4 * 2**30) -> None:
        if not max_bytes >= 2**16:
            raise ValueError(f"max_bytes must be at least {2**16}, got {max_bytes}.")
        self.folder = Path(folder).absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.max_bytes = max_bytes
        self.tokens_seen = self.tokens_recalled = 0
        self._warned: set[str] = set()
        self._used: set[bytes] = set()  # keys that were read since the last mark of use
        self._marked = time.monotonic()

    def __reduce__(self) -> tuple[Callable[..., ScoreStore], tuple[Path]]:
        return partial(type(self), max_bytes=self.max_bytes), (self.folder,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.folder)!r}, max_bytes={self.max_bytes})"

    def read(self, keys: Sequence[bytes], lengths: Sequence[int]) -> np.ndarray:
        """What is known of some sequences of tokens.

        Args:
            keys: one for each sequence, of 16 bytes.
            lengths: its number of tokens.

        Returns:
            The scores of the tokens of all sequences, end to end, NaN where they are not known; float32 or float64 ``[N]``,
            as they were stored.
        """
        stored = self._tried("read", partial(self._look_up, dict(zip(keys, lengths, strict=True)))) or {}
        unknown = (np.full(length, np.nan, np.float32) for length in (0, *lengths))
        return np.concatenate([next(unknown), *(stored.get(*pair) for pair in zip(keys, unknown, strict=True))])

    def add(self, keys: Sequence[bytes], lengths: Sequence[int], values: np.ndarray) -> None:
        """Store scores. Those that are stored already stay.

        Args:
            keys: see :meth:`read`.
            lengths: see :meth:`read`.
            values: the scores, NaN at tokens without one; float32 or float64 ``[N]``.
        """
        new: dict[bytes, np.ndarray] = {}
        for key, own in zip(keys, np.split(values, np.cumsum(lengths)[:-1]), strict=True):
            if not np.isnan(own).all():
                new[key] = _joined(new.get(key), own)
        size = sum(own.nbytes + 80 for own in new.values())
        if 2 * size > self.max_bytes:
            self._warn(
                "too large",
                f"did not store the scores of a call: they take {size} bytes, more than half of max_bytes={self.max_bytes}.",
            )
        elif new:
            self._tried("written", partial(self._write, new, size))

    @property
    def num_bytes(self) -> int:
        """Bytes of the file."""
        path = self.folder / _FILE
        return path.stat().st_size if path.exists() else 0

    # ------------------------------------------------------------------ the file

    def _tried(self, what: str, work: Callable[[sqlite3.Connection], T]) -> T | None:
        """What ``work`` does with the open file; None and a warning if it fails."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.folder / _FILE, timeout=_BUSY, isolation_level=None)) as file:
                for statement in (*_SETUP, f"PRAGMA max_page_count = {self.max_bytes // _PAGE}"):
                    file.execute(statement)
                return work(file)
        except (sqlite3.Error, OSError, UnicodeDecodeError) as error:  # the last: SQLite's message quotes damaged text
            self._warn(
                what,
                f"could not be {what} ({type(error).__name__}: {error}); its scores are recomputed. Check the free space of "
                "the disk; if the file is damaged, delete it.",
            )
            return None

    def _warn(self, cause: str, text: str) -> None:
        """Once for each cause."""
        if cause not in self._warned:
            self._warned.add(cause)
            warnings.warn(f"{self.folder / _FILE} {text}", stacklevel=4)

    def _look_up(self, wanted: Mapping[bytes, int], file: sqlite3.Connection) -> dict[bytes, np.ndarray]:
        stored = self._records(file, wanted)
        self._used.update(stored)
        if time.monotonic() - self._marked >= _MARK_EVERY:
            self._marked = time.monotonic()  # also if it fails: not at each read
            # Read-only, or another process writes: what was read is right all the same.
            with suppress(sqlite3.OperationalError), file:
                file.execute("BEGIN IMMEDIATE")
                self._mark_used(file)
        return stored

    def _write(self, new: dict[bytes, np.ndarray], size: int, file: sqlite3.Connection) -> None:
        with file:  # one commit, or nothing is written
            file.execute("BEGIN IMMEDIATE")
            for key, earlier in self._records(file, {key: len(own) for key, own in new.items()}).items():
                new[key] = _joined(earlier, new[key])
            self._mark_used(file)
            self._make_room(file, size)
            rows = [(key, time.time(), _encode_scores(key, own)) for key, own in new.items()]
            file.executemany("INSERT OR REPLACE INTO records VALUES (?, ?, ?)", rows)

    def _records(self, file: sqlite3.Connection, wanted: Mapping[bytes, int]) -> dict[bytes, np.ndarray]:
        """What the file holds of these sequences, by key; damaged records are left out, with a warning."""
        keys, stored = list(wanted), {}
        for start in range(0, len(keys), _AT_ONCE):
            some = keys[start : start + _AT_ONCE]
            query = f"SELECT key, record FROM records WHERE key IN ({','.join('?' * len(some))})"
            for key, record in file.execute(query, some):
                own = _decoded(key, record, wanted.get(key, -1))  # a damaged index finds other keys
                if own is None:
                    self._warn("damaged", "holds a damaged record; its scores are recomputed and replace it.")
                else:
                    stored[key] = own
        return stored

    def _mark_used(self, file: sqlite3.Connection) -> None:
        """Write that the scores that were read were used now."""
        used, self._used = self._used, set()
        file.executemany("UPDATE records SET used = ? WHERE key = ?", [(time.time(), key) for key in used])
        self._marked = time.monotonic()

    def _make_room(self, file: sqlite3.Connection, size: int) -> None:
        """Remove what was not used for the longest time, a tenth of the records at once, until ``size`` bytes are free."""

        def free() -> int:
            pages, unused = (file.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count"))
            return self.max_bytes - (int(pages) - int(unused)) * _PAGE

        while free() < 2 * size and (count := file.execute("SELECT count(*) FROM records").fetchone()[0]):
            few = "SELECT key FROM records ORDER BY used LIMIT ?"
            file.execute(f"DELETE FROM records WHERE key IN ({few})", (-(-count // 10),))


# ------------------------------------------------------------------ records


def _joined(earlier: np.ndarray | None, later: np.ndarray) -> np.ndarray:
    """The scores of both; where both have one, the earlier."""
    return later if earlier is None else np.where(np.isnan(earlier), later, earlier)


def _encode_scores(key: bytes, values: np.ndarray) -> bytes:
    """The scores from the first to the last one, and a digest."""
    known = np.flatnonzero(~np.isnan(values))
    first, some = known[0], values[known[0] : known[-1] + 1]
    body = _HEAD.pack(len(values), first, some.itemsize) + some.astype(some.dtype.newbyteorder("<")).tobytes()
    return body + _checksum_of(key, body)


def _checksum_of(key: bytes, body: bytes) -> bytes:
    return blake2b(body, digest_size=_CHECK_BYTES, key=key).digest()


def _decoded(key: bytes, record: object, length: int) -> np.ndarray | None:
    """The scores of a sequence of so many tokens; None for a damaged record, or one of another sequence."""
    if not isinstance(record, bytes) or _checksum_of(key, record[:-_CHECK_BYTES]) != record[-_CHECK_BYTES:]:
        return None
    count, first, width = _HEAD.unpack_from(record)
    if count != length:
        return None
    some = np.frombuffer(record[_HEAD.size : -_CHECK_BYTES], f"<f{width}")
    values = np.full(length, np.nan, some.dtype)
    values[first : first + len(some)] = some
    return values
