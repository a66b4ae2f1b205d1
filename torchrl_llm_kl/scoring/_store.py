"""Scores on disk: a folder of shards that any number of processes read and write. Independent of torch.

A shard is a safetensors file. It is written once, under the folder's lock and another name, then renamed: readers need no
lock. Its header and index have a checksum, which is checked when the shard is opened, and each record has its own, checked
at each read; what a record holds is checked too. So a damaged file costs a forward, never a wrong score. Only regular files
are opened: neither links nor pipes.
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
import threading
import time
import uuid
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

#: Bytes of a key, which identifies weights, settings and token ids.
KEY_BYTES = 16
_CHECK_BYTES = 8
_FORMAT = "1"
_SUFFIX = ".scores.safetensors"  # of no file but a store's own
_LOCK_TIMEOUT = 60.0  # seconds
_TOUCH_EVERY = 1.0  # seconds between marks of use on one shard
_INDEX = ("keys", "checks", "lengths", "counts")
_DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F64": np.dtype("<f8")}


class ScoreStore:
    """A folder of scores, found by the digest of what they depend on. Bounded; shared by threads and processes.

    Records wait in memory until they fill a shard, or until ``flush_after`` seconds have passed at the next call, and are
    written at the end of the process at the latest; a killed process loses those that wait. When the folder is full, the
    shards that were not read for the longest time are removed. Pickles and copies open the same folder.

    A store may be unwritable or damaged at any time: it warns, and the scores are computed again.

    Args:
        folder: created if missing. Every model, setting and process may share one.

    Keyword Args:
        max_bytes: of all shards together, never exceeded. A token takes 4.1 bytes (8.1 in float64), a sequence 40 more.
            Default 4 GiB, about a billion tokens.
        shard_bytes: of one shard, about; at most ``max_bytes``. Default 16 MiB.
        flush_after: seconds that a record may wait in memory. Default 60.

    Attributes:
        tokens_seen: number of tokens that scorers looked up in this process.
        tokens_recalled: number of those that were found.

    Raises:
        ValueError: if a size is out of range.
        OSError: if the folder cannot be created.

    Example:
        >>> import numpy as np, tempfile
        >>> store = ScoreStore(tempfile.mkdtemp(), max_bytes=2**20, shard_bytes=2**16)
        >>> key = b"sixteen bytes 01"
        >>> store.add([key], [3], np.array([False, True, True]), np.array([0, -0.5, -1.5], dtype=np.float32))
        >>> store.read([key, b"sixteen bytes 02"], [3, 1])
        (array([False,  True,  True, False]), array([ 0. , -0.5, -1.5,  0. ], dtype=float32))
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        max_bytes: int = 4 * 2**30,
        shard_bytes: int = 16 * 2**20,
        flush_after: float = 60.0,
    ) -> None:
        if not 1 <= shard_bytes <= max_bytes:
            raise ValueError(
                f"shard_bytes must lie between 1 and max_bytes, got shard_bytes={shard_bytes} and max_bytes={max_bytes}."
            )
        if not flush_after >= 0:
            raise ValueError(f"flush_after must be a number of seconds, at least 0, got {flush_after}.")
        self.folder = Path(folder).absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.max_bytes, self.shard_bytes, self.flush_after = max_bytes, shard_bytes, flush_after
        self.tokens_seen = self.tokens_recalled = 0
        self._pid, self._lock = os.getpid(), threading.RLock()
        self._writer = _Writer(self.folder, max_bytes, shard_bytes)
        self._shards: dict[str, _Shard | None] = {}  # by file name; None if damaged
        self._index = _Index([])
        self._listed = -1  # the folder's time of change when it was last listed, ns
        self._at_end = weakref.finalize(self, self._writer.flush)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (str(self.folder), self.max_bytes, self.shard_bytes, self.flush_after)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.folder)!r}, max_bytes={self.max_bytes})"

    # ------------------------------------------------------------------ reading and writing

    def read(
        self, keys: Sequence[bytes], lengths: Sequence[int], low: float = -math.inf, high: float = math.inf
    ) -> tuple[np.ndarray, np.ndarray]:
        """What is known of some sequences of tokens.

        Args:
            keys: one for each sequence, of 16 bytes.
            lengths: its number of tokens.
            low: the smallest score that can be. A file that holds a smaller one, or one that is not finite, is damaged.
            high: the largest.

        Returns:
            Two arrays ``[N]`` over the tokens of all sequences, end to end: whether the score is known, bool; and the score,
            float32 or float64 as it was stored, 0 where it is not known.
        """
        ends = np.cumsum(np.asarray(lengths, dtype=np.int64))
        found = _Found(keys, ends - lengths, ends, low, high)
        with self._own_lock():
            self._list()
            # First what this process wrote, so that its scores stay the same, whoever else writes them too.
            hits = list(self._index.find(keys))
            for shard, pairs in hits:
                if shard.own:
                    self._read_shard(shard, pairs, found)
            for i, key in enumerate(keys):
                for record in self._writer.waiting.get(key, ()):
                    with suppress(ValueError):  # of another length, or out of bounds
                        found.fill(i, record.mask, record.values)
            for shard, pairs in hits:
                if not shard.own:
                    self._read_shard(shard, pairs, found)
        return found.known, found.values

    def add(self, keys: Sequence[bytes], lengths: Sequence[int], mask: np.ndarray, values: np.ndarray) -> None:
        """Store scores.

        Args:
            keys: see :meth:`read`.
            lengths: see :meth:`read`.
            mask: True at the tokens whose scores are stored; bool ``[N]``.
            values: the scores; float32 or float64 ``[N]``.

        Raises:
            ValueError: if the arrays do not have one element for each token, or the scores are of another dtype or not finite.
        """
        ends = np.cumsum(np.asarray(lengths, dtype=np.int64))
        total = int(ends[-1]) if len(ends) else 0
        if mask.shape != (total,) or values.shape != (total,) or mask.dtype != np.bool_:
            raise ValueError(
                f"expected a boolean mask and scores of {total} tokens, got {mask.dtype} {mask.shape} and {values.shape}."
            )
        if values.dtype not in (np.float32, np.float64):
            raise ValueError(f"scores must be float32 or float64, got {values.dtype}.")
        if not np.isfinite(values[mask]).all():
            raise ValueError("scores must be finite.")
        with self._own_lock():
            for key, end, length in zip(keys, ends.tolist(), lengths, strict=True):
                chosen = mask[end - length : end].copy()
                if chosen.any():
                    self._writer.put(_Record(key, chosen, values[end - length : end][chosen]))
            if self._writer.full(self.flush_after):
                self.flush()

    def flush(self) -> None:
        """Write the records that wait. Returns when other processes can read them."""
        with self._own_lock():
            for name in self._writer.flush():
                self._load(name, own=True)
            self._list(again=True)

    def close(self) -> None:
        """Write the records that wait, and stop doing so at the end of the process."""
        self.flush()
        self._at_end.detach()

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards in the folder."""
        return sum(size for _, _, size in _shards_of(self.folder))

    # ------------------------------------------------------------------ the shards of the folder

    def _own_lock(self) -> threading.RLock:
        if self._pid != os.getpid():  # a fork: the parent writes its records, and may have held the lock
            self._pid, self._lock = os.getpid(), threading.RLock()
            self._writer.drop_of_parent()
        return self._lock

    def _list(self, *, again: bool = False) -> None:
        """Open shards that are new in the folder, and drop those that are gone."""
        changed = _changed(self.folder)
        if changed == self._listed and not again:
            return
        names = {path.name for path, _, _ in _shards_of(self.folder)}
        gone, new = self._shards.keys() - names, names - self._shards.keys()
        for name in gone:
            del self._shards[name]
        for name in sorted(new):
            self._load(name)
        # Within the resolution of file times, another shard may still appear; one that could not be opened is tried again.
        complete = time.time_ns() - changed > 2e9 and not names - self._shards.keys()
        self._listed = changed if complete else -1
        if gone or new or again:
            self._index = _Index(list(filter(None, self._shards.values())))

    def _load(self, name: str, *, own: bool = False) -> None:
        try:
            self._shards[name] = _Shard.open(self.folder / name, own=own)
        except FileNotFoundError:  # removed meanwhile, to make room
            self._shards.pop(name, None)
        except OSError as error:
            self._skip(name, error)
        except Exception as error:  # whatever a file holds, its scores can be computed
            self._give_up(name, f"{type(error).__name__}: {error}")

    def _skip(self, name: str, error: OSError) -> None:
        """Do without a shard this time, for instance with too many files open."""
        self._shards.pop(name, None)
        self._listed = -1
        warnings.warn(
            f"{self.folder / name} could not be read ({error}): its scores are computed again this time.", stacklevel=5
        )

    def _give_up(self, name: str, why: str) -> None:
        self._shards[name] = None
        warnings.warn(
            f"{self.folder / name} is damaged and is not read ({why}): its scores are computed again. Delete the file.",
            stacklevel=5,
        )

    def _read_shard(self, shard: _Shard, pairs: list[tuple[int, int]], found: _Found) -> None:
        """Read the records of one shard: pairs of its row and the sequence."""
        name = shard.path.name
        try:
            with _open(shard.path) as file:
                for row, i in pairs:
                    found.fill(i, *shard.record(file, row, found.keys[i]))
            shard.touch()
        except FileNotFoundError:
            self._shards.pop(name, None)
        except OSError as error:
            self._skip(name, error)
        except Exception as error:
            self._give_up(name, f"{type(error).__name__}: {error}")
        else:
            return
        self._index = _Index([each for each in self._index.shards if each is not shard])


def _reopen(folder: str, max_bytes: int, shard_bytes: int, flush_after: float) -> ScoreStore:
    return ScoreStore(folder, max_bytes=max_bytes, shard_bytes=shard_bytes, flush_after=flush_after)


def _changed(folder: Path) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:  # someone removed the folder
        return -1


def _shards_of(folder: Path) -> list[tuple[Path, int, int]]:
    """Path, time of last use (ns) and bytes of each shard."""
    found = []
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                if entry.name.endswith(_SUFFIX):
                    info = entry.stat(follow_symlinks=False)
                    size = info.st_size if stat.S_ISREG(info.st_mode) else 0  # what is no file is not a shard's
                    found.append((Path(entry.path), info.st_mtime_ns, size))
    return found


def within(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """Which scores are finite and in a range."""
    return np.isfinite(values) & (values >= low) & (values <= high)


class _Found:
    """The scores found so far, over the tokens of all sequences."""

    def __init__(self, keys: Sequence[bytes], starts: np.ndarray, ends: np.ndarray, low: float, high: float) -> None:
        self.keys, self._starts, self._ends, self._low, self._high = keys, starts.tolist(), ends.tolist(), low, high
        total = self._ends[-1] if self._ends else 0
        self.known, self.values = np.zeros(total, np.bool_), np.zeros(total, np.float32)

    def fill(self, i: int, mask: np.ndarray, values: np.ndarray) -> None:
        """Take the scores of sequence ``i`` that are not known yet."""
        start, end = self._starts[i], self._ends[i]
        if mask.shape[0] != end - start:
            raise ValueError(f"a record of {mask.shape[0]} tokens has the key of a sequence of {end - start}")
        if values.shape[0] != np.count_nonzero(mask):
            raise ValueError(f"a record has {values.shape[0]} scores of {np.count_nonzero(mask)} tokens")
        good = within(values, self._low, self._high)
        if not good.all():
            raise ValueError(f"a record holds {values[~good][0]}, expected numbers in [{self._low:g}, {self._high:g}]")
        if values.dtype.itemsize > self.values.dtype.itemsize:
            self.values = self.values.astype(values.dtype)
        known = self.known[start:end]
        new = mask & ~known
        self.values[start:end][new] = values[new[mask]]
        known |= new


# ------------------------------------------------------------------ one shard


@dataclass(frozen=True, eq=False)
class _Record:
    """Scores of one sequence."""

    key: bytes
    mask: np.ndarray  # True at tokens with a score, bool [T]
    values: np.ndarray  # their scores

    @property
    def num_bytes(self) -> int:
        return KEY_BYTES + _CHECK_BYTES + 16 + -(-self.mask.shape[0] // 8) + self.values.nbytes


def _encode(records: Sequence[_Record]) -> bytes:
    """A shard: the index (``keys``, ``checks``, ``lengths``, ``counts``), packed masks and scores, end to end."""
    from safetensors.numpy import save

    masks = [np.packbits(record.mask) for record in records]
    values = [record.values.astype(record.values.dtype.newbyteorder("<"), copy=False) for record in records]
    checks = [_check(record.key, m.tobytes(), v.tobytes()) for record, m, v in zip(records, masks, values, strict=True)]
    arrays: dict[str, np.ndarray] = {
        "keys": np.frombuffer(b"".join(record.key for record in records), np.uint8),
        "checks": np.frombuffer(b"".join(checks), np.uint8),
        "lengths": np.array([record.mask.shape[0] for record in records], np.int64),
        "counts": np.array([record.values.shape[0] for record in records], np.int64),
        "masks": np.concatenate(masks),
        "values": np.concatenate(values),
    }
    return save(arrays, {"format": _FORMAT, "index": _digest(arrays[name].tobytes() for name in _INDEX)})


def _check(key: bytes, mask: bytes, values: bytes) -> bytes:
    return blake2b(mask + values, digest_size=_CHECK_BYTES, key=key).digest()


def _digest(parts: Iterable[bytes]) -> str:
    return blake2b(b"".join(parts), digest_size=16).hexdigest()


@dataclass(eq=False)
class _Shard:
    """The index of one file."""

    path: Path
    own: bool  # whether this process wrote it
    keys: np.ndarray  # uint8 [R, 16]
    checks: np.ndarray  # uint8 [R, 8]
    lengths: np.ndarray  # tokens, int64 [R]
    counts: np.ndarray  # scores, int64 [R]
    masks_at: np.ndarray  # place of the packed mask in the file, int64 [R]
    values_at: np.ndarray  # place of the scores, int64 [R]
    dtype: np.dtype[Any]  # of the scores
    touched: float = 0.0

    @classmethod
    def open(cls, path: Path, *, own: bool) -> _Shard:
        """Read the index; any exception if it is not that of a whole shard."""
        with _open(path) as file:
            size = os.fstat(file.fileno()).st_size
            (head_size,) = struct.unpack("<Q", _read(file, 0, 8))
            if head_size > size - 8:
                raise ValueError(f"its header has {head_size} bytes, the file {size}")
            header = json.loads(_read(file, 8, head_size))
            about = header.pop("__metadata__")
            if about["format"] != _FORMAT:
                raise ValueError(f"it has format {about['format']}, expected {_FORMAT}")
            first = 8 + head_size
            end = first + max(entry["data_offsets"][1] for entry in header.values())
            if end != size:
                raise ValueError(f"it has {size} bytes, expected {end}")
            raw = {}
            for name in _INDEX:
                start, stop = header[name]["data_offsets"]
                raw[name] = _read(file, first + start, stop - start)
        if _digest(raw[name] for name in _INDEX) != about["index"]:
            raise ValueError("its index has another checksum")
        dtype = _DTYPES[header["values"]["dtype"]]
        lengths, counts = (np.frombuffer(raw[name], "<i8") for name in ("lengths", "counts"))
        if not len(raw["keys"]) / KEY_BYTES == len(raw["checks"]) / _CHECK_BYTES == len(lengths) == len(counts):
            raise ValueError("the parts of its index have different lengths")
        if bool((counts < 0).any() or (counts > lengths).any() or (lengths > 8 * size).any()):
            raise ValueError("a record has more scores than tokens")
        mask_bytes, value_bytes = -(-lengths // 8), counts * dtype.itemsize
        spans = {"masks": int(mask_bytes.sum()), "values": int(value_bytes.sum())}
        for name, expected in spans.items():
            start, stop = header[name]["data_offsets"]
            if stop - start != expected:
                raise ValueError(f"its {name} have {stop - start} bytes, expected {expected}")
        return cls(
            path,
            own,
            np.frombuffer(raw["keys"], np.uint8).reshape(-1, KEY_BYTES),
            np.frombuffer(raw["checks"], np.uint8).reshape(-1, _CHECK_BYTES),
            lengths,
            counts,
            first + header["masks"]["data_offsets"][0] + np.cumsum(mask_bytes) - mask_bytes,
            first + header["values"]["data_offsets"][0] + np.cumsum(value_bytes) - value_bytes,
            dtype,
        )

    def record(self, file: Any, row: int, key: bytes) -> tuple[np.ndarray, np.ndarray]:
        """Mask and scores of one record; a ValueError if it is not what was written under the key."""
        length, count = int(self.lengths[row]), int(self.counts[row])
        packed = _read(file, int(self.masks_at[row]), -(-length // 8))
        raw = _read(file, int(self.values_at[row]), count * self.dtype.itemsize)
        if _check(key, packed, raw) != self.checks[row].tobytes():
            raise ValueError(f"record {row} has another checksum")
        return np.unpackbits(np.frombuffer(packed, np.uint8), count=length).view(np.bool_), np.frombuffer(
            raw, self.dtype
        )

    def touch(self) -> None:
        """Mark the file as used."""
        now = time.monotonic()
        if now - self.touched >= _TOUCH_EVERY:
            self.touched = now
            with suppress(OSError):
                os.utime(self.path)


def _open(path: Path) -> Any:
    """Open a regular file; a ValueError for a link, a pipe or anything else."""
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise ValueError("it is no regular file")
    # It may be replaced meanwhile: no link is followed, and no writer of a pipe awaited.
    extra = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)  # Windows has neither
    return open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | extra))


def _read(file: Any, start: int, size: int) -> bytes:
    if start < 0 or size < 0:
        raise ValueError(f"it names {size} bytes at {start}")
    file.seek(start)
    parts, missing = [], size
    while missing > 0:
        part = file.read(missing)
        if not part:
            raise ValueError(f"it ends {missing} bytes early")
        parts.append(part)
        missing -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


class _Index:
    """The records of all shards, by the first 8 bytes of their keys, sorted."""

    def __init__(self, shards: list[_Shard]) -> None:
        self.shards = shards
        prefixes = [shard.keys.view("<u8")[:, 0] for shard in self.shards]
        everything = np.concatenate(prefixes) if prefixes else np.zeros(0, np.uint64)
        order = np.argsort(everything, kind="stable")  # of equal keys, that of the first shard comes first
        self._prefixes = everything[order]
        self._shard = np.repeat(np.arange(len(prefixes), dtype=np.int32), list(map(len, prefixes)))[order]
        rows = [np.arange(len(prefix), dtype=np.int32) for prefix in prefixes]
        self._row = (np.concatenate(rows) if rows else np.zeros(0, np.int32))[order]

    def find(self, keys: Sequence[bytes]) -> Iterator[tuple[_Shard, list[tuple[int, int]]]]:
        """The shards that hold some of the keys, with pairs of row and place in ``keys``."""
        wanted = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES)
        prefixes = wanted.view("<u8")[:, 0]
        low, high = (np.searchsorted(self._prefixes, prefixes, side) for side in ("left", "right"))
        pairs: dict[int, list[tuple[int, int]]] = {}
        for i in np.flatnonzero(high > low).tolist():
            for at in range(int(low[i]), int(high[i])):
                number, row = int(self._shard[at]), int(self._row[at])
                if self.shards[number].keys[row].tobytes() == keys[i]:
                    pairs.setdefault(number, []).append((row, i))
        for number in sorted(pairs):
            yield self.shards[number], pairs[number]


# ------------------------------------------------------------------ writing


class _Writer:
    """Records that wait, and the shards that they become."""

    def __init__(self, folder: Path, max_bytes: int, shard_bytes: int) -> None:
        self.folder, self._max_bytes, self._shard_bytes = folder, max_bytes, shard_bytes
        self.waiting: dict[bytes, list[_Record]] = {}
        self.num_bytes = 0
        self._since = 0.0  # when the first one came
        self._pid = os.getpid()
        self._warned = False

    def put(self, record: _Record) -> None:
        if not self.waiting:
            self._since = time.monotonic()
        self.waiting.setdefault(record.key, []).append(record)
        self.num_bytes += record.num_bytes

    def full(self, seconds: float) -> bool:
        """Whether it is time to write."""
        late = bool(self.waiting) and time.monotonic() - self._since >= seconds
        return late or self.num_bytes >= self._shard_bytes

    def flush(self) -> list[str]:
        """Write all records; returns the names of the new shards."""
        self.drop_of_parent()
        records = [record for some in self.waiting.values() for record in some]
        self._clear()
        names = []
        try:
            for part in self._parts(records):
                names += self._write(_encode(part))
        except Exception as error:  # a store must not end a training run
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"scores cannot be stored in {self.folder} and will be computed again ({type(error).__name__}: {error}). "
                    "Check that the folder is writable and the disk has room.",
                    stacklevel=4,
                )
        return names

    def drop_of_parent(self) -> None:
        """Drop records that a fork inherited: its parent writes them."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._clear()

    def _clear(self) -> None:
        self.waiting.clear()
        self.num_bytes = 0

    def _parts(self, records: Sequence[_Record]) -> Iterator[list[_Record]]:
        """Records of one dtype that fill a shard."""
        for dtype in (np.float32, np.float64):
            part: list[_Record] = []
            size = 0
            for record in records:
                if record.values.dtype != dtype:
                    continue
                if part and size + record.num_bytes > self._shard_bytes:
                    yield part
                    part, size = [], 0
                part.append(record)
                size += record.num_bytes
            if part:
                yield part

    def _write(self, data: bytes) -> list[str]:
        from filelock import FileLock

        if len(data) > self._max_bytes:  # one sequence that fills the whole store
            return []
        name = uuid.uuid4().hex + _SUFFIX
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / "lock", timeout=_LOCK_TIMEOUT):
            for left in self.folder.glob(f"*{_SUFFIX}.tmp"):  # of a process that was killed
                left.unlink(missing_ok=True)
            shards = sorted(_shards_of(self.folder), key=lambda shard: shard[1])
            total = sum(size for _, _, size in shards)
            for path, _, size in shards:
                if total + len(data) <= self._max_bytes:
                    break
                if not size:
                    continue
                path.unlink(missing_ok=True)
                total -= size
            draft = self.folder / f"{name}.tmp"
            draft.write_bytes(data)
            os.replace(draft, self.folder / name)
        return [name]
