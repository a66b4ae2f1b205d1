"""Scores on disk, in a SQLite file that any number of processes read and write. This module does not import torch.

Each record has a checksum over its key and scores, which every read verifies. So a damaged file costs a forward, but never
gives a wrong score. Every call opens the file again, so threads, forks and copies share no connection.
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
_HEAD = struct.Struct("<QQB")  # number of tokens, index of the first one with a score, bytes per score
_BUSY = 60.0  # seconds to wait for another process that holds the file
_PAGE = 4096
_AT_ONCE = 500  # keys per query, since SQLite limits the number of parameters
_MARK_EVERY = 60.0  # seconds between updates of the time of use, since each is a commit
_SETUP = (
    f"PRAGMA page_size = {_PAGE}",
    "PRAGMA synchronous = NORMAL",
    "PRAGMA trusted_schema = OFF",
    "CREATE TABLE IF NOT EXISTS records (key BLOB PRIMARY KEY, used REAL, record BLOB) WITHOUT ROWID",
    "CREATE INDEX IF NOT EXISTS oldest ON records (used)",
)
T = TypeVar("T")


class ScoreStore:
    """A folder of scores, looked up by a digest of everything that they depend on. Its size is bounded.

    Threads and processes may share it. Scores are written when they are added; if two processes add the same one, the first is
    kept. When the folder is full, the least recently read scores are removed. Pickles and copies open the same folder.
    Processes on several machines need a file system with working locks.

    If the file cannot be written or is damaged, the store warns and the scores are computed again.

    Args:
        folder: created if missing. All models, settings and processes may share one.

    Keyword Args:
        max_bytes: upper bound of the file's size. A larger existing file does not shrink. Each sequence takes about 80 bytes,
            plus 4 bytes (8 in float64) per token from its first scored token to its last. The default of 4 GiB is about a
            billion tokens.

    Attributes:
        tokens_seen: number of tokens that scorers of this process looked up.
        tokens_recalled: how many of them were found.

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
        self._used: set[bytes] = set()  # keys that were read since the last update of the time of use
        self._marked = time.monotonic()

    def __reduce__(self) -> tuple[Callable[..., ScoreStore], tuple[Path]]:
        return partial(type(self), max_bytes=self.max_bytes), (self.folder,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.folder)!r}, max_bytes={self.max_bytes})"

    def read(self, keys: Sequence[bytes], lengths: Sequence[int]) -> np.ndarray:
        """Look up the scores of some sequences.

        Args:
            keys: one key of 16 bytes for each sequence.
            lengths: the number of tokens of each sequence.

        Returns:
            The scores of all tokens, sequence after sequence, NaN where unknown, ``[N]`` in the dtype in which they were
            stored.
        """
        stored = self._tried("read", partial(self._look_up, dict(zip(keys, lengths, strict=True)))) or {}
        unknown = (np.full(length, np.nan, np.float32) for length in (0, *lengths))
        return np.concatenate([next(unknown), *(stored.get(*pair) for pair in zip(keys, unknown, strict=True))])

    def add(self, keys: Sequence[bytes], lengths: Sequence[int], values: np.ndarray) -> None:
        """Store scores. A score that is stored already stays as it is.

        Args:
            keys: see :meth:`read`.
            lengths: see :meth:`read`.
            values: the scores of all tokens, NaN at tokens without one; float32 or float64 ``[N]``.
        """
        new: dict[bytes, np.ndarray] = {}
        for key, own in zip(keys, np.split(values, np.cumsum(lengths)[:-1]), strict=True):
            if not np.isnan(own).all():
                new[key] = _joined(new.get(key), own)
        size = sum(own.nbytes + 80 for own in new.values())
        if 2 * size > self.max_bytes:
            self._warn(
                "too large",
                f"cannot store the scores of a call: they take {size} bytes, more than half of max_bytes={self.max_bytes}.",
            )
        elif new:
            self._tried("written", partial(self._write, new, size))

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        path = self.folder / _FILE
        return path.stat().st_size if path.exists() else 0

    # ------------------------------------------------------------------ the file

    def _tried(self, what: str, work: Callable[[sqlite3.Connection], T]) -> T | None:
        """The result of ``work`` with the open file. If it fails, warn and return None."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.folder / _FILE, timeout=_BUSY, isolation_level=None)) as file:
                for statement in (*_SETUP, f"PRAGMA max_page_count = {self.max_bytes // _PAGE}"):
                    file.execute(statement)
                return work(file)
        except (sqlite3.Error, OSError, UnicodeDecodeError) as error:  # the last: SQLite quotes damaged text
            self._warn(
                what,
                f"could not be {what} ({type(error).__name__}: {error}). Its scores are recomputed. Check the free space of "
                "the disk. If the file is damaged, delete it.",
            )
            return None

    def _warn(self, cause: str, text: str) -> None:
        """Warn once for each cause."""
        if cause not in self._warned:
            self._warned.add(cause)
            warnings.warn(f"{self.folder / _FILE} {text}", stacklevel=4)

    def _look_up(self, wanted: Mapping[bytes, int], file: sqlite3.Connection) -> dict[bytes, np.ndarray]:
        stored = self._records(file, wanted)
        self._used.update(stored)
        if time.monotonic() - self._marked >= _MARK_EVERY:
            self._marked = time.monotonic()  # set first: after a failure the next attempt waits, too
            # This fails if the file is read-only or another process writes. The scores that were read are valid anyway.
            with suppress(sqlite3.OperationalError), file:
                file.execute("BEGIN IMMEDIATE")
                self._mark_used(file)
        return stored

    def _write(self, new: dict[bytes, np.ndarray], size: int, file: sqlite3.Connection) -> None:
        with file:  # commits at the end, and writes nothing after an error
            file.execute("BEGIN IMMEDIATE")
            for key, earlier in self._records(file, {key: len(own) for key, own in new.items()}).items():
                new[key] = _joined(earlier, new[key])
            self._mark_used(file)
            self._make_room(file, size)
            rows = [(key, time.time(), _encode_scores(key, own)) for key, own in new.items()]
            file.executemany("INSERT OR REPLACE INTO records VALUES (?, ?, ?)", rows)

    def _records(self, file: sqlite3.Connection, wanted: Mapping[bytes, int]) -> dict[bytes, np.ndarray]:
        """The stored scores of these sequences, by key. Damaged records are left out, with a warning."""
        keys, stored = list(wanted), {}
        for start in range(0, len(keys), _AT_ONCE):
            some = keys[start : start + _AT_ONCE]
            query = f"SELECT key, record FROM records WHERE key IN ({','.join('?' * len(some))})"
            for key, record in file.execute(query, some):
                own = _decoded(key, record, wanted.get(key, -1))  # a damaged index may return other keys
                if own is None:
                    self._warn("damaged", "holds a damaged record. Its scores are recomputed and replace it.")
                else:
                    stored[key] = own
        return stored

    def _mark_used(self, file: sqlite3.Connection) -> None:
        """Update the time of use of the scores that were read."""
        used, self._used = self._used, set()
        file.executemany("UPDATE records SET used = ? WHERE key = ?", [(time.time(), key) for key in used])
        self._marked = time.monotonic()

    def _make_room(self, file: sqlite3.Connection, size: int) -> None:
        """Remove the least recently used tenth of the records, again and again, until ``size`` bytes are free."""

        def free() -> int:
            pages, unused = (file.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count"))
            return self.max_bytes - (int(pages) - int(unused)) * _PAGE

        while free() < 2 * size and (count := file.execute("SELECT count(*) FROM records").fetchone()[0]):
            few = "SELECT key FROM records ORDER BY used LIMIT ?"
            file.execute(f"DELETE FROM records WHERE key IN ({few})", (-(-count // 10),))


# ------------------------------------------------------------------ records


def _joined(earlier: np.ndarray | None, later: np.ndarray) -> np.ndarray:
    """Merge scores. Where both have one, the earlier one counts."""
    return later if earlier is None else np.where(np.isnan(earlier), later, earlier)


def _encode_scores(key: bytes, values: np.ndarray) -> bytes:
    """A record: the header, the scores from the first to the last one, and the checksum."""
    known = np.flatnonzero(~np.isnan(values))
    first, some = known[0], values[known[0] : known[-1] + 1]
    body = _HEAD.pack(len(values), first, some.itemsize) + some.astype(some.dtype.newbyteorder("<")).tobytes()
    return body + _checksum_of(key, body)


def _checksum_of(key: bytes, body: bytes) -> bytes:
    return blake2b(body, digest_size=_CHECK_BYTES, key=key).digest()


def _decoded(key: bytes, record: object, length: int) -> np.ndarray | None:
    """The scores in a record of a sequence of ``length`` tokens, or None if it is damaged or belongs to another sequence."""
    if not isinstance(record, bytes) or _checksum_of(key, record[:-_CHECK_BYTES]) != record[-_CHECK_BYTES:]:
        return None
    count, first, width = _HEAD.unpack_from(record)
    if count != length:
        return None
    some = np.frombuffer(record[_HEAD.size : -_CHECK_BYTES], f"<f{width}")
    values = np.full(length, np.nan, some.dtype)
    values[first : first + len(some)] = some
    return values
