"""Checkpoints are there whole or not at all, and damage is found."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchrl_llm_kl.training import Checkpoint, Checkpoints, CheckpointWarning
from torchrl_llm_kl.training._checkpoints import _record_of


def write(checkpoints: Checkpoints, step: int, *, best: int | None = None, text: str = "weights") -> None:
    with checkpoints.writing(step, {"at": step}, best=best) as folder:
        (folder / "model").mkdir()
        (folder / "model" / "a.txt").write_text(f"{text} {step}")
        (folder / "b.txt").write_text("state")


def names(checkpoints: Checkpoints) -> list[str]:
    return [path.name for path in checkpoints.paths()]


def test_the_last_ones_and_the_best_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step, best in ((10, 10), (20, 20), (30, 20), (40, 20), (1_000_000, 20)):
        write(checkpoints, step, best=best)
    assert names(checkpoints) == ["step-000020", "step-000040", "step-1000000"]
    last, best_one = checkpoints.latest(), checkpoints.at(20)
    assert last is not None
    assert best_one is not None
    assert (last.step, last.numbers["at"]) == (1_000_000, 1_000_000)
    assert (best_one.folder / "model" / "a.txt").read_text() == "weights 20"
    assert checkpoints.at(10) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == names(checkpoints)


def test_an_error_while_writing_leaves_nothing(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    write(checkpoints, 1)

    def fail() -> None:
        with checkpoints.writing(2, {}) as folder:
            (folder / "half.txt").write_text("half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001"]


def test_a_step_is_written_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    write(checkpoints, 1)
    write(checkpoints, 1, text="other")
    assert (tmp_path / "step-000001" / "model" / "a.txt").read_text() == "other 1"


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    write(Checkpoints(tmp_path), 1)
    for left in (".new-000002", ".old-step-000000"):
        (tmp_path / left / "model").mkdir(parents=True)
    assert Checkpoints(tmp_path).latest() is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001"]


def truncate(folder: Path) -> None:
    (folder / "model" / "a.txt").write_text("w")


def flip(folder: Path) -> None:
    file = folder / "b.txt"
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])


def cut_record(folder: Path) -> None:
    record = folder / "checkpoint.json"
    record.write_text(record.read_text()[:20])


def replaced(name: str, how: Callable[[Path], None] = lambda path: None) -> Callable[[Path], None]:
    def replace(folder: Path) -> None:
        (folder / name).unlink()
        how(folder / name)

    return replace


#: What happens to a checkpoint, and what is said. Reading a pipe would block for ever, and a link to zeros never end.
DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (truncate, r"model/a\.txt has 1 bytes of 9"),
    "a bit flipped": (flip, r"b\.txt has another content"),
    "removed": (replaced("b.txt"), r"b\.txt is missing"),
    "a cut record": (cut_record, r"checkpoint\.json"),
    "no record": (replaced("checkpoint.json"), r"checkpoint\.json"),
    "a file in its place": (lambda folder: (shutil.rmtree(folder), folder.write_text("no folder")), ""),  # type: ignore[dict-item]
    **{
        f"{kind} for {name}": (replaced(name, how), re.escape(name))
        for name in ("checkpoint.json", "b.txt")
        for kind, how in {
            "a folder": Path.mkdir,
            "a pipe": os.mkfifo,
            "a link": lambda path: path.symlink_to("/dev/zero"),
        }.items()
    },
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    checkpoints = Checkpoints(tmp_path)
    write(checkpoints, 1)
    write(checkpoints, 2)
    damage(tmp_path / "step-000002")
    with pytest.warns(CheckpointWarning, match=f"step-000002 is damaged .{message}"):
        found = checkpoints.latest()
    assert found is not None
    assert found.step == 1


def test_no_flipped_bit_of_a_record_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each bit of the whole text: of a number, a name, the checksum, a bracket or a space."""
    checkpoints = Checkpoints(tmp_path)
    with checkpoints.writing(2, {"seconds": 1.5, "best": None, "name": "a run"}) as folder:
        (folder / "state.pt").write_text("weights")
    path = tmp_path / "step-000002"
    data = (path / "checkpoint.json").read_bytes()
    assert isinstance(checkpoints.read(path), Checkpoint)
    believed = []
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        monkeypatch.setattr(Path, "read_bytes", lambda self, found=bytes(flipped): found)  # faster than to write it
        if isinstance(checkpoints.read(path), Checkpoint):
            believed.append(bit)
    assert not believed, f"{len(believed)} of {8 * len(data)}"
    monkeypatch.setattr(Path, "read_bytes", lambda self: data)
    assert isinstance(checkpoints.read(path), Checkpoint)


WHOLE: dict[str, Any] = {"step": 2, "numbers": {}, "files": {}}

#: What may be in the place of a record, and what is said of it; those of `_record_of` have the right checksum.
RECORDS = {
    "empty": (b"", "Expecting value"),
    "no text": (b"\xff\x00\xfe", "can't decode"),
    "zeros": (bytes(400), "Expecting value"),
    "deep lists": (b"[" * 100_000, "recursion"),
    "deep objects": (b'{"step":' * 100_000, "recursion"),
    "a list": (b"[1]", "no checksum"),
    "a number": (b"3", "no checksum"),
    "a long number": (b'{"step": ' + b"9" * 5000 + b"}", "limit"),
    "an infinite step": (b'{"step": 1e999, "numbers": {}, "files": {}, "checksum": 1}', "another content"),
    "an earlier version's": (json.dumps(WHOLE).encode(), "of an earlier version"),
    "more after it": (_record_of(WHOLE) + b"\n", "another content"),
    "a step of text": (_record_of({**WHOLE, "step": "2"}), "expected a step"),
    "a fraction": (_record_of({**WHOLE, "step": 2.5}), "expected a step"),
    "a negative step": (_record_of({**WHOLE, "step": -2}), "expected a step"),
    "true": (_record_of({**WHOLE, "step": True}), "expected a step"),
    "numbers in a list": (_record_of({**WHOLE, "numbers": [[1, 2]]}), "expected a step"),
    "no files": (_record_of({"step": 2, "numbers": {}}), "expected a step"),
    "files in a list": (_record_of({**WHOLE, "files": ["b.txt"]}), "expected a step"),
    "a file without a checksum": (_record_of({**WHOLE, "files": {"b.txt": 5}}), "a size and a checksum"),
    "a size of text": (_record_of({**WHOLE, "files": {"b.txt": ["5", 1]}}), "a size and a checksum"),
    "a name of no file": (_record_of({**WHOLE, "files": {"\0": [5, 1]}}), "missing"),
    "a long name": (_record_of({**WHOLE, "files": {"b" * 5000: [5, 1]}}), "too long"),
}


@pytest.mark.parametrize(("record", "message"), RECORDS.values(), ids=RECORDS)
def test_whatever_is_wrong_the_one_before_is_taken(tmp_path: Path, record: bytes, message: str) -> None:
    checkpoints = Checkpoints(tmp_path)
    write(checkpoints, 1)
    write(checkpoints, 2)
    (tmp_path / "step-000002" / "checkpoint.json").write_bytes(record)
    with pytest.warns(CheckpointWarning, match=rf"(?s)step-000002 is damaged \(.*{message}.*taking the one before"):
        found = checkpoints.latest()
    assert found is not None
    assert (found.step, found.numbers) == (1, {"at": 1})
    with pytest.warns(CheckpointWarning, match="step-000002 is damaged"):
        assert checkpoints.at(2) is None


def test_at_least_one_is_kept(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Checkpoints(tmp_path, keep=0)
