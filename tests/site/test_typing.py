"""A wrong name is an error in an editor: mypy reports every wrong call of ``typing_calls.py`` and no right one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from project import PROJECT

CALLS = Path(__file__).with_name("typing_calls.py")


def test_mypy_reports_wrong_calls_and_accepts_right_ones() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", str(CALLS)],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.stderr, done.stderr
    reported = {int(line) for line in re.findall(rf"{CALLS.name}:(\d+): error:", done.stdout)}
    wrong = {n for n, line in enumerate(CALLS.read_text().splitlines(), 1) if line.endswith("# reported")}
    assert len(wrong) > 25
    assert reported - wrong == set(), done.stdout
    assert wrong - reported == set(), f"not reported: {sorted(wrong - reported)}"
