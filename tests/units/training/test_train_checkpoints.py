"""Tests of checkpoints: they are written atomically, and damage is found."""

import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from torchrl_llm_kl.training import Checkpoint, Checkpoints, CheckpointWarning


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
    last, best, none = checkpoints.latest(), checkpoints.at(20), checkpoints.at(10)
    assert (last.step, last.numbers["at"], none) == (1_000_000, 1_000_000, None)
    assert (best.folder / "model" / "a.txt").read_text() == "weights 20"
    assert sorted(path.name for path in tmp_path.iterdir()) == names(checkpoints)


def test_a_checkpoint_kept_only_as_the_best_loses_the_files_of_resuming(tmp_path: Path) -> None:
    """The checkpoint stays undamaged, but no run resumes from it, even if all later ones are damaged."""
    checkpoints = Checkpoints(tmp_path, keep=2, to_resume=("b.txt", "not there"))
    for step in (10, 20, 30):
        write(checkpoints, step, best=10)
    files = [sorted(path.name for path in folder.iterdir()) for folder in checkpoints.paths()]
    assert files == [["checkpoint.json", "model"], *[["b.txt", "checkpoint.json", "model"]] * 2]
    best, last = checkpoints.at(10), checkpoints.latest()
    assert best is not None
    assert last is not None
    assert (best.resumes, last.resumes, last.step, best.numbers) == (False, True, 30, {"at": 10})
    write(checkpoints, 40, best=10)
    assert checkpoints.at(10) == best
    for step in (30, 40):
        (tmp_path / f"step-{step:06}" / "b.txt").unlink()
    with pytest.warns(CheckpointWarning, match="b.txt is missing"):
        assert checkpoints.latest() is None


def test_a_kill_before_the_files_are_removed_leaves_a_complete_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1, to_resume=("b.txt",))
    write(checkpoints, 10, best=10)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            write(checkpoints, 20, best=10)
    found = checkpoints.at(10)
    assert found is not None
    assert (found.resumes, (tmp_path / "step-000010" / "b.txt").exists()) == (False, True)
    write(checkpoints, 30, best=10)
    assert not (tmp_path / "step-000010" / "b.txt").exists()


def test_an_interrupted_write_leaves_no_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    write(checkpoints, 1)

    with pytest.raises(UnicodeEncodeError):
        write(checkpoints, 2, text="\udc00")  # ends in the middle of a file
    assert names(checkpoints) == [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    write(checkpoints, 1, text="other")  # a step is written again
    assert (tmp_path / "step-000001" / "model" / "a.txt").read_text() == "other 1"
    for left in (".new-000002", ".old-step-000000"):
        (tmp_path / left / "model").mkdir(parents=True)
    assert Checkpoints(tmp_path).latest() is not None
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    with pytest.raises(ValueError, match="at least 1"):
        Checkpoints(tmp_path, keep=0)


def replaced(name: str, how: Callable[[Path], object] = lambda path: None) -> Callable[[Path], None]:
    def replace(folder: Path) -> None:
        (folder / name).unlink()
        how(folder / name)

    return replace


def record(content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / "checkpoint.json").write_bytes(content)


def record_of(file: str) -> Callable[[Path], object]:
    return record(Checkpoint(Path(), 2, {}, {file: (5, 1)}).record)


#: What happens to a checkpoint, and what is said. Reading a pipe would block for ever, and a link to zeros never end.
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda folder: (folder / "model" / "a.txt").write_text("w"), r"model/a\.txt has another content"),
    "a bit flipped": (lambda folder: (folder / "b.txt").write_text("rtate"), r"b\.txt has another content"),
    "removed": (replaced("b.txt"), r"b\.txt is missing"),
    "no record": (replaced("checkpoint.json"), r"checkpoint\.json"),
    "a file in its place": (lambda folder: (shutil.rmtree(folder), folder.write_text("no folder")), ""),
    **{
        f"{kind} for {name}": (replaced(name, how), re.escape(name))
        for name in ("checkpoint.json", "b.txt")
        for kind, how in (("a folder", Path.mkdir), ("a pipe", os.mkfifo), ("a link", partial(os.symlink, "/dev/zero")))
    },
    "no text": (record(b"\xff\x00\xfe"), "can't decode"),
    "deep lists": (record(b"[" * 100_000), "recursion"),
    "a list": (record(b"[1]"), "pop expected"),
    "a long number": (record(b'{"step": ' + b"9" * 5000 + b"}"), "limit"),
    "an earlier version's": (record(b'{"step": 2, "numbers": {}, "files": {}}'), "another content"),
    "other entries": (record(b'{"steps": 2, "checksum": 1}'), "unexpected keyword argument"),
    "a name of no file": (record_of("\0"), "missing"),
    "a long name": (record_of("b" * 5000), "too long"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_skipped(tmp_path, damage, message):
    checkpoints = Checkpoints(tmp_path)
    write(checkpoints, 1)
    write(checkpoints, 2)
    damage(tmp_path / "step-000002")
    with pytest.warns(CheckpointWarning, match=rf"(?s)step-000002 is damaged \(.*{message}.*The previous one is used"):
        found = checkpoints.latest()
    assert (found.step, found.numbers) == (1, {"at": 1})
    with pytest.warns(CheckpointWarning, match="step-000002 is damaged"):
        assert checkpoints.at(2) is None


def test_every_flipped_bit_of_a_record_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits include those of the checksum, of brackets and of spaces."""
    checkpoints = Checkpoints(tmp_path)
    with checkpoints.writing(2, {"seconds": 1.5, "best": None, "name": "a run"}) as folder:
        (folder / "state.pt").write_text("weights")
    path = tmp_path / "step-000002"
    data = (path / "checkpoint.json").read_bytes()
    believed = []
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        monkeypatch.setattr(Path, "read_bytes", lambda self, found=bytes(flipped): found)  # faster than to write it
        with suppress(ValueError):
            Checkpoint.read(path)
            believed.append(bit)
    assert not believed, f"{len(believed)} of {8 * len(data)}"
    monkeypatch.setattr(Path, "read_bytes", lambda self: data)
    assert Checkpoint.read(path).step == 2
