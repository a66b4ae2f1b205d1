"""The README's example runs as it stands, with a tiny checkpoint in place of the hub's; and the layers hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from test_layers import wrong_imports

from code_blocks import run_example
from project import PROJECT


def test_the_example_of_the_readme_runs(tmp_path: Path, capsys: Any) -> None:
    run_example(tmp_path)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("reward")]
    (_, entropy, kl), (*_, moved) = ([float(x) for x in re.findall(r"[\d.]+(?:e[-+]\d+)?", line)] for line in lines)
    assert entropy > 1, "the first batch shows something"
    assert kl == 0, "policy and reference are the same checkpoint"
    assert 0 < moved < 1e-3


def test_imports_go_down_the_layers() -> None:
    assert wrong_imports() == []


def test_the_tests_that_the_docs_name_exist() -> None:
    files = list((PROJECT / "tests").rglob("*.py"))
    known = {name for path in files for name in re.findall(r"def (test_\w+)", path.read_text())}
    known |= {name for path in files for name in (path.name, path.stem)}
    pages = [*(PROJECT / "docs").glob("*.md"), *PROJECT.glob("*.md"), *(PROJECT / ".ci").glob("*.py")]
    named = {(page.name, name) for page in pages for name in re.findall(r"\btest_\w+(?:\.py)?", page.read_text())}
    assert len(named) > 80
    gone = {each for each in named if not any(name.startswith(each[1]) for name in known)}
    assert gone == set()
