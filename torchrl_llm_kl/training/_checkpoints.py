"""Checkpoints on disk: each is there whole or not at all, a damaged one is passed over, the last and the best are kept."""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from torchrl_llm_kl._files import replacing
from torchrl_llm_kl._typing import Json

RECORD = "checkpoint.json"
_NAME = re.compile(r"step-(\d{6,})")


class CheckpointWarning(UserWarning):
    """A checkpoint is damaged and was passed over."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read whole.

    Args:
        folder: with its files.
        step: steps that were done.
        numbers: what was saved with it: plain values.
        resumes: whether it has all that a run needs to go on from it.
    """

    folder: Path
    step: int
    numbers: Json
    resumes: bool = True


class Checkpoints:
    """The checkpoints of a run: folders ``step-000040``, of which the last few and the best are kept.

    A checkpoint is written into a folder of another name, flushed to the disk, and renamed: a process that is killed at any
    time leaves whole checkpoints only. Each has a record with the size and the checksum of its files, and a checksum of the
    record, by which damage of another kind is found.

    Args:
        folder: of the run's checkpoints; created with the first one. What a killed process left half written is removed.

    Keyword Args:
        keep: how many of the last ones are kept.
        to_resume: files that only a resumed run reads, such as the optimiser's state. A checkpoint loses them when it is not
            among the last ones any more and kept as the best.

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
            raise ValueError(f"keep is {keep}: expected at least 1, the last checkpoint.")
        self.folder, self.keep, self.to_resume = Path(folder), keep, frozenset(to_resume)
        for left in (*self.folder.glob(".new-*"), *self.folder.glob(".old-*")):
            shutil.rmtree(left, ignore_errors=True)

    def paths(self) -> list[Path]:
        """The checkpoints' folders, from the first step to the last; whole or not."""
        found = {path: int(name[1]) for path in self.folder.glob("step-*") if (name := _NAME.fullmatch(path.name))}
        return sorted(found, key=found.__getitem__)

    @contextmanager
    def writing(self, step: int, numbers: Mapping[str, object], *, best: int | None = None) -> Iterator[Path]:
        """Write a checkpoint: yields a folder for its files, which has its name once all is on the disk.

        If the body raises an error, nothing is left of it. An earlier checkpoint of this step is replaced.

        Args:
            step: steps that were done.
            numbers: plain values to keep with it, as JSON.

        Keyword Args:
            best: the step of the best checkpoint, which is kept too.
        """
        new, path = self.folder / f".new-{step:06d}", self.folder / f"step-{step:06d}"
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        try:
            yield new
            files = {str(file.relative_to(new)): _flushed(file) for file in sorted(new.rglob("*")) if file.is_file()}
            record = new / RECORD
            record.write_bytes(_record_of({"step": step, "numbers": dict(numbers), "files": files}))
            _flushed(record)
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
        """The last whole checkpoint from which a run can go on; None if there is none.

        Warns:
            CheckpointWarning: for each later one that is damaged, with what is wrong; it is left where it is.
        """
        found = (self._whole(path, ": taking the one before.") for path in reversed(self.paths()))
        return next((each for each in found if each is not None and each.resumes), None)

    def at(self, step: int) -> Checkpoint | None:
        """The checkpoint of a step; None if it is not there or damaged.

        Warns:
            CheckpointWarning: if it is damaged, with what is wrong.
        """
        path = self.folder / f"step-{step:06d}"
        return self._whole(path, ".") if path.exists() else None

    def _whole(self, path: Path, then: str) -> Checkpoint | None:
        """The checkpoint in a folder; None, and a warning with what is wrong, if it is damaged."""
        found = self.read(path)
        if isinstance(found, Checkpoint):
            return found
        warnings.warn(f"the checkpoint {path} is damaged ({found}){then}", CheckpointWarning, stacklevel=3)
        return None

    @staticmethod
    def read(path: Path) -> Checkpoint | str:
        """The checkpoint in a folder, or what is wrong with it."""
        try:
            step, numbers, files, resumes = _read_record(path / RECORD)
        except (OSError, ValueError, RecursionError) as error:
            return f"{RECORD}: {error}"
        if (name_of := _NAME.fullmatch(path.name)) and int(name_of[1]) != step:
            return f"{RECORD}: it is of step {step}"
        try:
            for name, (size, checksum) in files.items():
                file = path / name
                if not file.is_file():
                    return f"{name} is missing"
                if file.stat().st_size != size:
                    return f"{name} has {file.stat().st_size} bytes of {size}"
                if _checksum(file) != checksum:
                    return f"{name} has another content"
        except OSError as error:
            return f"{name}: {error}"
        return Checkpoint(path, step, numbers, resumes)

    def _reduce(self, path: Path) -> None:
        """Remove the files that only a resumed run reads: the record names them no more before the first is gone."""
        with suppress(OSError, ValueError, RecursionError):  # a damaged one is left as it is
            step, numbers, files, _ = _read_record(path / RECORD)
            left = {name: entry for name, entry in files.items() if name not in self.to_resume}
            with replacing(path / RECORD) as part:
                part.write_bytes(_record_of({"step": step, "numbers": numbers, "files": left, "resumes": False}))
            for name in self.to_resume:
                (path / name).unlink(missing_ok=True)

    def _remove(self, path: Path) -> None:
        """Remove a checkpoint: its name is gone before its first file is."""
        if path.exists():
            old = self.folder / f".old-{path.name}"
            shutil.rmtree(old, ignore_errors=True)
            path.rename(old)
            shutil.rmtree(old, ignore_errors=True)


def _record_of(values: Mapping[str, object]) -> bytes:
    """The bytes of a record, with the checksum of its values."""
    sealed = {**values, "checksum": zlib.crc32(json.dumps(values).encode())}
    return (json.dumps(sealed, indent=1) + "\n").encode()


def _read_record(file: Path) -> tuple[int, Json, dict[str, tuple[int, int]], bool]:
    """Step, numbers and files of a record, and whether a run can go on from them.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is not what :func:`_record_of` wrote, to the last bit, or has other values.
        RecursionError: if it is nested too deeply.
    """
    if not file.is_file():  # to open a pipe would block
        raise ValueError("there is no such file" if not file.exists() else "it is not a file")
    data = file.read_bytes()
    values = json.loads(data.decode())
    if not isinstance(values, dict) or "checksum" not in values:
        raise ValueError("it has no checksum: it is damaged, or of an earlier version")
    del values["checksum"]
    if data != _record_of(values):  # the values, their checksum or the text around them
        raise ValueError("its checksum is of another content")
    step, numbers, files = (values.get(name) for name in ("step", "numbers", "files"))
    if not (_is_count(step) and isinstance(numbers, dict) and isinstance(files, dict)):
        raise ValueError("expected a step, numbers and files")
    for name, entry in files.items():
        if not (isinstance(entry, list) and len(entry) == 2 and all(map(_is_count, entry))):
            raise ValueError(f"the entry of {name}: expected a size and a checksum")
    return step, numbers, files, values.get("resumes", True) is True


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _checksum(file: Path) -> int:
    value = 0
    with file.open("rb") as data:
        while block := data.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


def _flushed(file: Path) -> tuple[int, int]:
    """Flush a file to the disk; returns its size and checksum."""
    with file.open("rb") as data:
        os.fsync(data.fileno())
    return file.stat().st_size, _checksum(file)


def flush_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    number = os.open(folder, os.O_RDONLY)
    with suppress(OSError):  # some network file systems cannot
        os.fsync(number)
    os.close(number)
