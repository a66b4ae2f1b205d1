"""The README's example runs as it stands, with a tiny checkpoint in place of the hub's; and the layers hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from test_layers import wrong_imports

from code_blocks import run_example


def test_the_example_of_the_readme_runs(tmp_path: Path, capsys: Any) -> None:
    run_example(tmp_path)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("KL")]
    kl, clipped, tokens = (float(x) for x in re.findall(r"tensor\((.*?)\)", line))
    assert kl == 0.0, "policy and reference are the same checkpoint"
    assert clipped == 0.0, "nothing has moved since the answers were sampled"
    assert 8 <= tokens <= 8 * 64


def test_imports_go_down_the_layers() -> None:
    assert wrong_imports() == []
