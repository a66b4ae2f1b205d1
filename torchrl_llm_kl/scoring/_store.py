"""Scores on disk: a SQLite file that any number of processes read and write. Independent of torch.

Each record has a checksum over its key, mask and scores, which is checked at each read together with what it may hold: a
damaged file costs a forward, never a wrong score.
"""

from __future__ import annotations

import math
import os
import sqlite3
import struct
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

#: Bytes of a key, which identifies weights, settings and token ids.
KEY_BYTES = 16
_CHECK_BYTES = 8
_FILE = "scores.sqlite3"
_HEAD = struct.Struct("<QB")  # of a mask: tokens, bytes of a score
_BUSY = 60.0  # seconds that another process may hold the file
_PAGE = 4096
_AT_ONCE = 500  # keys in a query
_MARK_EVERY = 60.0  # seconds between marks of use: a commit each
_TABLE = (
    "CREATE TABLE IF NOT EXISTS scores (key BLOB PRIMARY KEY, used REAL, mask BLOB, scores BLOB, digest BLOB) WITHOUT ROWID",
    "CREATE INDEX IF NOT EXISTS oldest ON scores (used)",
)
#: Mask and scores of a sequence: bool [T], and the scores where it is True.
Record = tuple[np.ndarray, np.ndarray]
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
        max_bytes: of the file, never exceeded; one that is larger already does not shrink. A token takes 4.1 bytes (8.1 in
            float64), a sequence about 80 more. Default 4 GiB, about a billion tokens.

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
        >>> store.add([key], [3], np.array([False, True, True]), np.array([0, -0.5, -1.5], dtype=np.float32))
        >>> store.read([key, b"sixteen bytes 02"], [3, 1])
        (array([False,  True,  True, False]), array([ 0. , -0.5, -1.5,  0. ], dtype=float32))
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
        self._pid, self._lock, self._file = os.getpid(), threading.RLock(), _Connection()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (str(self.folder), self.max_bytes)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.folder)!r}, max_bytes={self.max_bytes})"

    def read(
        self, keys: Sequence[bytes], lengths: Sequence[int], low: float = -math.inf, high: float = math.inf
    ) -> tuple[np.ndarray, np.ndarray]:
        """What is known of some sequences of tokens.

        Args:
            keys: one for each sequence, of 16 bytes.
            lengths: its number of tokens.
            low: the smallest score that can be. A record that holds a smaller one, or one that is not finite, is damaged.
            high: the largest.

        Returns:
            Two arrays ``[N]`` over the tokens of all sequences, end to end: whether the score is known, bool; and the score,
            float32 or float64 as it was stored, 0 where it is not known.
        """
        found = self._tried("read", partial(self._look_up, set(keys))) or {}
        known, values = np.zeros(sum(lengths), np.bool_), np.zeros(sum(lengths), np.float32)
        end = 0
        for key, length in zip(keys, lengths, strict=True):
            start, end = end, end + length
            if key not in found:
                continue
            mask, scores = found[key]
            if len(mask) != length or not within(scores, low, high).all():
                self._warn(
                    "impossible",
                    f"holds a record that does not fit its sequence ({length} tokens, scores in [{low:g}, {high:g}]); its "
                    "scores are recomputed. Delete the file.",
                )
                continue
            values = values.astype(np.result_type(values, scores), copy=False)
            known[start:end] = mask
            values[start:end][mask] = scores
        return known, values

    def add(self, keys: Sequence[bytes], lengths: Sequence[int], mask: np.ndarray, values: np.ndarray) -> None:
        """Store scores. Those that are stored already stay.

        Args:
            keys: see :meth:`read`.
            lengths: see :meth:`read`.
            mask: True at the tokens whose scores are stored; bool ``[N]``.
            values: the scores; float32 or float64 ``[N]``.

        Raises:
            ValueError: if the arrays do not have one element for each token, or the scores are of another dtype or not finite.
        """
        total = sum(lengths)
        if mask.shape != (total,) or values.shape != (total,) or mask.dtype != np.bool_:
            raise ValueError(
                f"expected a boolean mask and scores of {total} tokens, got {mask.dtype} {mask.shape} and {values.shape}."
            )
        if values.dtype not in (np.float32, np.float64):
            raise ValueError(f"scores must be float32 or float64, got {values.dtype}.")
        if not np.isfinite(values[mask]).all():
            raise ValueError("scores must be finite.")
        ends = np.cumsum(np.asarray(lengths, dtype=np.int64)).tolist()
        new: dict[bytes, Record] = {}
        for key, end, length in zip(keys, ends, lengths, strict=True):
            own = mask[end - length : end]
            if own.any():
                new[key] = _joined(new.get(key), (own, values[end - length : end][own]))
        size = sum(len(own) // 8 + scores.nbytes + 80 for own, scores in new.values())
        if 2 * size > self.max_bytes:
            self._warn(
                "too large",
                f"did not store the scores of a call: they take {size} bytes, more than half of max_bytes={self.max_bytes}.",
            )
        elif new:
            self._tried("written", partial(self._write, new, size))

    def close(self) -> None:
        """Close the file, until the next use."""
        if self._used:
            self._tried("written", self._mark)
        with self._own_lock():
            self._file.close()

    @property
    def num_bytes(self) -> int:
        """Bytes of the file."""
        path = self.folder / _FILE
        return path.stat().st_size if path.exists() else 0

    # ------------------------------------------------------------------ the file

    def _own_lock(self) -> threading.RLock:
        if self._pid != os.getpid():  # a fork: the parent's connection and lock are not for this process
            self._pid, self._lock, self._file = os.getpid(), threading.RLock(), _Connection(self._file)
        return self._lock

    def _tried(self, what: str, work: Callable[[sqlite3.Connection], T]) -> T | None:
        """What ``work`` does with the open file, this thread alone; None and a warning if it fails."""
        with self._own_lock():
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                return work(self._file.open(self.folder / _FILE, self.max_bytes))
            except (sqlite3.Error, OSError) as error:
                self._file.close()
                self._warn(
                    what,
                    f"could not be {what} ({type(error).__name__}: {error}); its scores are recomputed. Check the free space "
                    "of the disk; if the file is damaged, delete it.",
                )
                return None

    def _warn(self, cause: str, text: str) -> None:
        """Once for each cause."""
        if cause not in self._warned:
            self._warned.add(cause)
            warnings.warn(f"{self.folder / _FILE} {text}", stacklevel=4)

    def _look_up(self, keys: Set[bytes], file: sqlite3.Connection) -> dict[bytes, Record]:
        found = self._records(file, keys)
        self._used.update(found)
        if time.monotonic() - self._marked >= _MARK_EVERY:
            # Read-only, or another process writes: what was read is right all the same.
            with suppress(sqlite3.OperationalError):
                self._mark(file)
        return found

    def _write(self, new: dict[bytes, Record], size: int, file: sqlite3.Connection) -> None:
        with _transaction(file):
            for key, earlier in self._records(file, new.keys()).items():
                new[key] = _joined(earlier, new[key])
            self._mark_used(file)
            self._make_room(file, size)
            rows = [(key, time.time(), *_encode(key, *record)) for key, record in new.items()]
            file.executemany("INSERT OR REPLACE INTO scores VALUES (?, ?, ?, ?, ?)", rows)

    def _records(self, file: sqlite3.Connection, keys: Set[bytes]) -> dict[bytes, Record]:
        """What the file holds under these keys; damaged records are left out, with a warning."""
        wanted, found = list(keys), {}
        for start in range(0, len(wanted), _AT_ONCE):
            some = wanted[start : start + _AT_ONCE]
            query = f"SELECT key, mask, scores, digest FROM scores WHERE key IN ({','.join('?' * len(some))})"
            for key, *columns in file.execute(query, some):
                record = _decoded(key, *columns)
                if record is None:
                    self._warn("damaged", "holds a damaged record; its scores are recomputed and replace it.")
                else:
                    found[key] = record
        return found

    def _mark(self, file: sqlite3.Connection) -> None:
        self._marked = time.monotonic()  # also if it fails: not at each read
        with _transaction(file):
            self._mark_used(file)

    def _mark_used(self, file: sqlite3.Connection) -> None:
        """Write that the scores that were read were used now."""
        now = time.time()
        file.executemany("UPDATE scores SET used = ? WHERE key = ?", [(now, key) for key in self._used])
        self._used.clear()
        self._marked = time.monotonic()

    def _make_room(self, file: sqlite3.Connection, size: int) -> None:
        """Remove what was not used for the longest time, a tenth of the records at once, until ``size`` bytes are free."""

        def free() -> int:
            pages, unused = (file.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count"))
            return self.max_bytes - (int(pages) - int(unused)) * _PAGE

        while free() < 2 * size and (count := file.execute("SELECT count(*) FROM scores").fetchone()[0]):
            few = "SELECT key FROM scores ORDER BY used LIMIT ?"
            file.execute(f"DELETE FROM scores WHERE key IN ({few})", (-(-count // 10),))


@contextmanager
def _transaction(file: sqlite3.Connection) -> Iterator[None]:
    """One commit; nothing is written if the body raises an error."""
    file.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        file.rollback()
        raise
    file.commit()


def _reopen(folder: str, max_bytes: int) -> ScoreStore:
    return ScoreStore(folder, max_bytes=max_bytes)


class _Connection:
    """The connection of one process.

    Args:
        inherited: that of the parent of a fork, which must be neither used nor closed here.
    """

    def __init__(self, inherited: _Connection | None = None) -> None:
        self._inherited = inherited
        self._open: sqlite3.Connection | None = None

    def open(self, path: Path, max_bytes: int) -> sqlite3.Connection:
        """The connection; a new one if the file is not there any more."""
        if self._open is not None and not path.exists():
            self.close()
        if self._open is None:
            found = sqlite3.connect(path, timeout=_BUSY, isolation_level=None, check_same_thread=False)
            try:
                found.execute(f"PRAGMA page_size = {_PAGE}")
                found.execute("PRAGMA synchronous = NORMAL")
                found.execute("PRAGMA trusted_schema = OFF")
                for statement in _TABLE:
                    found.execute(statement)
                found.execute(f"PRAGMA max_page_count = {max_bytes // _PAGE}")
            except BaseException:
                found.close()
                raise
            self._open = found
        return self._open

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None


# ------------------------------------------------------------------ records


def within(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """Which scores are finite and in a range."""
    return np.isfinite(values) & (values >= low) & (values <= high)


def _joined(earlier: Record | None, later: Record) -> Record:
    """The scores of both; where both have one, the earlier."""
    if earlier is None or len(earlier[0]) != len(later[0]):
        return later
    (known, scores), (mask, others) = earlier, later
    every = np.zeros(len(mask), np.result_type(scores, others))
    every[mask], every[known] = others, scores
    return known | mask, every[known | mask]


def _encode(key: bytes, mask: np.ndarray, scores: np.ndarray) -> tuple[bytes, bytes, bytes]:
    """Mask, scores and digest of a record. The mask begins with its length and the bytes of a score."""
    packed = _HEAD.pack(len(mask), scores.itemsize) + np.packbits(mask).tobytes()
    raw = scores.astype(scores.dtype.newbyteorder("<"), copy=False).tobytes()
    return packed, raw, _digest(key, packed, raw)


def _digest(key: bytes, packed: bytes, raw: bytes) -> bytes:
    return blake2b(packed + raw, digest_size=_CHECK_BYTES, key=key).digest()


def _decoded(key: Any, packed: Any, raw: Any, digest: Any) -> Record | None:
    """A record, None for a damaged one."""
    if not all(isinstance(part, bytes) for part in (key, packed, raw, digest)) or _digest(key, packed, raw) != digest:
        return None
    length, width = _HEAD.unpack_from(packed) if len(packed) >= _HEAD.size else (1, 0)
    bits = np.frombuffer(packed, np.uint8, offset=min(len(packed), _HEAD.size))
    if width not in (4, 8) or len(bits) != -(-length // 8):
        return None
    mask = np.unpackbits(bits, count=length).view(np.bool_)
    scores = np.frombuffer(raw, f"<f{width}") if len(raw) % width == 0 else np.zeros(0)
    return (mask, scores) if 0 < len(scores) == np.count_nonzero(mask) else None
