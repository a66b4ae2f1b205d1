"""The script for a GPU reports a part that fails or hangs, and goes on with the others."""

import json
import sys
import time
from pathlib import Path

import pytest

for name in ("rich", "typer"):
    pytest.importorskip(name)
from benchmarks import gpu  # noqa: E402

TESTS = """
import time

def test_passes(): pass
def test_fails(): assert not "red"
def test_hangs(): time.sleep(600)
"""


def test_a_part_that_fails_or_hangs_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    writes = (
        f"from pathlib import Path; Path({str(tmp_path / gpu.FIGURES)!r}).write_text('{{\"ms\": 3}}'); print('done')"
    )
    pytest_of_it = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", str(tmp_path / "test_it.py")]
    parts = [
        gpu.Part("hangs", [*pytest_of_it, "--rootdir", str(tmp_path)], 15),
        gpu.Part("fails", [sys.executable, "-c", "raise SystemExit(3)"], 60),
        gpu.Part("passes", [sys.executable, "-c", writes], 60),
        gpu.Part("half", [sys.executable, "-c", writes.replace("3}", "")], 60),
        gpu.Part("skips", [sys.executable, "-c", "print('x.py::test SKIPPED')"], 60),
    ]
    monkeypatch.setattr(gpu, "parts_of", lambda folder, device, quick: parts)
    monkeypatch.setattr(sys, "argv", ["gpu", str(tmp_path), "--device", "sim"])
    (tmp_path / gpu.FIGURES).write_text("left over")
    start = time.monotonic()
    assert gpu.main() == 1
    assert time.monotonic() - start < 120
    report = json.loads((tmp_path / "report.json").read_text())
    hangs, fails, passes, half, _ = report["parts"]
    assert (hangs["figures"], half["figures"]) == ({}, {})
    assert (hangs["code"], fails["code"], passes["code"]) == (None, 3, 0)
    assert hangs["tests"] == {"PASSED": 1, "FAILED": 1}
    assert [name.rsplit("::", 1)[-1] for name in hangs["failed"]] == ["test_fails"]
    assert passes["figures"] == {"ms": 3}
    assert passes["tail"] == "done\n"
    text = (tmp_path / "report.md").read_text()
    assert "| hangs | stopped: out of time |" in text
    assert "| fails | code 3 |" in text
    assert "| skips | nothing ran |" in text


def test_an_unknown_part_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", str(tmp_path), "--only", "kernel"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "no part ['kernel']: expected some of ['kernels'" in capsys.readouterr().err


def test_parts_without_time_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", str(tmp_path), "--device", "sim", "--minutes", "0.01"])
    assert gpu.main() == 1
    names = [part.name for part in gpu.parts_of(tmp_path, "cuda", False)]
    assert json.loads((tmp_path / "report.json").read_text())["not run"] == names
