"""Checkpoints on disk. They are written atomically, damaged ones are skipped, and the last ones and the best are kept."""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from torchrl_llm_kl._files import replacing
from torchrl_llm_kl._typing import Json

RECORD = "checkpoint.json"
_NAME = re.compile(r"step-\d{6,}")


class CheckpointWarning(UserWarning):
    """A checkpoint is damaged and was skipped."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk.

    Args:
        folder: the folder of its files.
        step: the number of finished steps.
        numbers: the plain values that were saved with the files.
        files: size and checksum of each file, by path.
        resumes: whether a run can resume from it. A checkpoint that is kept only as the best has lost some files.
    """

    folder: Path
    step: int
    numbers: Json
    files: dict[str, tuple[int, int]]
    resumes: bool = True

    @property
    def record(self) -> bytes:
        """The content of ``checkpoint.json``: all fields except the folder, and a checksum of them."""
        values = {name: value for name, value in vars(self).items() if name != "folder"}
        return (json.dumps({**values, "checksum": zlib.crc32(json.dumps(values).encode())}, indent=1) + "\n").encode()

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """Read the record of a folder. Its files may still be damaged (:meth:`check_files`).

        Raises:
            ValueError: if the record differs in any bit from :attr:`record`.
        """
        if not (folder / RECORD).is_file():  # opening a pipe would block
            raise ValueError(f"{RECORD} is missing")
        data = (folder / RECORD).read_bytes()
        try:
            values = json.loads(data.decode())
            values.pop("checksum", None)
            read = cls(folder, **values)
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{RECORD}: {error}") from error
        # Comparing the whole text also finds a flipped bit in a bracket, a space or the checksum itself.
        if data != read.record:
            raise ValueError(f"{RECORD} has another content")
        return read

    def check_files(self) -> None:
        """Raise a ValueError or an OSError if a file is damaged."""
        for name, entry in self.files.items():
            file = self.folder / name
            if not file.is_file():
                raise ValueError(f"{name} is missing")
            if _size_and_checksum(file) != tuple(entry):
                raise ValueError(f"{name} has another content")


class Checkpoints:
    """The checkpoints of a run, in folders such as ``step-000040``. The last ones and the best are kept.

    A checkpoint is written into a temporary folder, flushed to disk, and renamed, so a process that is killed at any time
    leaves only complete checkpoints. A record holds the size and the checksum of each file, and its own checksum, to find
    other damage.

    Args:
        folder: the folder of the checkpoints, created with the first one. Half-written checkpoints of a killed process are
            removed from it.

    Keyword Args:
        keep: the number of last checkpoints to keep.
        to_resume: files and folders that only a resumed run reads, such as the optimiser's state. An older checkpoint that is
            kept only as the best loses them.

    Raises:
        ValueError: if ``keep`` is less than 1.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> checkpoints = Checkpoints(folder, keep=1)
        >>> for step in (10, 20, 30):
        ...     with checkpoints.writing(step, {"reward": 0.1 * step}, best=10) as new:
        ...         _ = (new / "weights.txt").write_text("1 2 3")
        >>> [path.name for path in checkpoints.paths()]
        ['step-000010', 'step-000030']
        >>> last = checkpoints.latest()
        >>> last.step, last.numbers, (last.folder / "weights.txt").read_text()
        (30, {'reward': 3.0}, '1 2 3')
    """

    def __init__(self, folder: str | Path, *, keep: int = 2, to_resume: Collection[str] = ()) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}: expected at least 1, to keep the last checkpoint.")
        self.folder, self.keep, self.to_resume = Path(folder), keep, frozenset(to_resume)
        for left in (*self.folder.glob(".new-*"), *self.folder.glob(".old-*")):
            shutil.rmtree(left, ignore_errors=True)

    def paths(self) -> list[Path]:
        """The folders of all checkpoints in the order of their steps, including damaged ones."""
        return sorted(
            (path for path in self.folder.glob("step-*") if _NAME.fullmatch(path.name)),
            key=lambda path: int(path.name.removeprefix("step-")),
        )

    @contextmanager
    def writing(self, step: int, numbers: Mapping[str, object], *, best: int | None = None) -> Iterator[Path]:
        """Write a checkpoint. Yields a temporary folder for its files, which is renamed after they are on disk.

        If the body raises an error, the folder is removed. An earlier checkpoint of this step is replaced.

        Args:
            step: the number of finished steps.
            numbers: plain values to save with the files, as JSON.

        Keyword Args:
            best: the step of the best checkpoint, which is kept too.
        """
        new, path = self.folder / f".new-{step:06d}", self.folder / f"step-{step:06d}"
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        try:
            yield new
            files = {str(file.relative_to(new)): _flushed(file) for file in sorted(new.rglob("*")) if file.is_file()}
            (new / RECORD).write_bytes(Checkpoint(path, step, dict(numbers), files).record)
            _flushed(new / RECORD)
            for inner in (*(each for each in new.rglob("*") if each.is_dir()), new):
                flush_folder(inner)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        self._remove(path)
        new.rename(path)
        flush_folder(self.folder)
        for other in self.paths()[: -self.keep]:
            if best is None or other.name != f"step-{best:06d}":
                self._remove(other)
            elif self.to_resume:
                self._reduce(other)

    def latest(self) -> Checkpoint | None:
        """The last undamaged checkpoint from which a run can resume, or None.

        Warns:
            CheckpointWarning: for each later checkpoint that is damaged. Its folder stays.
        """
        wholes = (self._whole(path, ". The previous one is used.") for path in reversed(self.paths()))
        return next((each for each in wholes if each is not None and each.resumes), None)

    def at(self, step: int) -> Checkpoint | None:
        """The checkpoint of a step. None if it is missing or damaged.

        Warns:
            CheckpointWarning: if the checkpoint is damaged.
        """
        path = self.folder / f"step-{step:06d}"
        return self._whole(path, ".") if path.exists() else None

    def renumber(self, saved: Checkpoint) -> None:
        """Replace the ``numbers`` of a checkpoint on disk by ``saved.numbers``. Its files stay."""
        with replacing(saved.folder / RECORD) as part:
            part.write_bytes(saved.record)

    def _whole(self, path: Path, then: str) -> Checkpoint | None:
        """The checkpoint in a folder. None if it is damaged, after a warning with the reason."""
        try:
            saved = Checkpoint.read(path)
            saved.check_files()
            return saved
        except (OSError, ValueError) as error:
            warnings.warn(f"the checkpoint {path} is damaged ({error}){then}", CheckpointWarning, stacklevel=3)
            return None

    def _reduce(self, path: Path) -> None:
        """Remove the files that only a resumed run reads.

        The record is replaced first, so that it never names a file that is gone.
        """
        with suppress(ValueError):  # a damaged checkpoint stays as it is
            saved = Checkpoint.read(path)
            left = {name: entry for name, entry in saved.files.items() if Path(name).parts[0] not in self.to_resume}
            self.renumber(replace(saved, files=left, resumes=False))
            for file in [each for each in path.rglob("*") if each.relative_to(path).parts[0] in self.to_resume]:
                if not file.is_dir():
                    file.unlink(missing_ok=True)

    def _remove(self, path: Path) -> None:
        """Remove a checkpoint. It is renamed first, so that a kill leaves no half-removed folder with its name."""
        if path.exists():
            old = self.folder / f".old-{path.name}"
            shutil.rmtree(old, ignore_errors=True)
            path.rename(old)
            shutil.rmtree(old, ignore_errors=True)


def _size_and_checksum(file: Path) -> tuple[int, int]:
    value = 0
    with file.open("rb") as data:
        for block in iter(lambda: data.read(1 << 22), b""):
            value = zlib.crc32(block, value)
    return file.stat().st_size, value


def _flushed(file: Path) -> tuple[int, int]:
    """Flush a file to disk. Returns its size and checksum."""
    with file.open("rb") as data:
        os.fsync(data.fileno())
    return _size_and_checksum(file)


def flush_folder(folder: Path) -> None:
    """Flush the entries of a folder to disk. Otherwise a crash of the machine may undo a rename."""
    number = os.open(folder, os.O_RDONLY)
    with suppress(OSError):  # some network file systems do not support this
        os.fsync(number)
    os.close(number)
