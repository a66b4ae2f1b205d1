"""``make matrix``: which tests it runs on which processor, and the page it writes."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from project import script

matrix = script(".ci/matrix.py")


def test_the_matrix_runs_the_tests_that_the_makefile_names() -> None:
    assert [(matrix.ROOT / argument).is_dir() for argument in matrix.numeric()] == [True] * 9


@pytest.mark.parametrize("name", ["", "default", "avx2"])
def test_each_processor_has_its_environment_and_report(tmp_path, monkeypatch, name):
    seen: dict[str, Any] = {}
    cases = '<testcase classname="a" name="b"/><testcase classname="a" name="c"><failure/></testcase>'

    def run(command: list[str], *, env: dict[str, str], **_: Any) -> None:
        seen.update(env)
        (report,) = (word.removeprefix("--junit-xml=") for word in command if word.startswith("--junit-xml="))
        Path(report).write_text(f"<testsuite>{cases}</testsuite>")

    monkeypatch.setattr(subprocess, "run", run)
    for variable in ("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(variable, raising=False)
    processor = matrix.PROCESSORS.get(name, {})
    found = matrix.test("newest", Path("python"), tmp_path / "newest", ["tests"], 2, processor)
    assert (found["passed"], found["failed"]) == (1, ["a.c"])
    added = {key: value for key, value in seen.items() if os.environ.get(key) != value}
    assert added == {"OMP_NUM_THREADS": "1", **processor}
    assert (tmp_path / "-".join(["newest", *processor.values()])).with_suffix(".log").exists()


def test_the_page_has_a_row_for_each_processor() -> None:
    record = json.loads(matrix.RECORD.read_text())
    text = matrix.PAGE.read_text(encoding="utf-8")
    assert matrix.written(text, record) == text
    both = {"default": {"passed": 6_100, "failed": []}, "avx2": {"passed": 6_099, "failed": ["a.c"]}}
    record["newest"]["processors"] = both
    assert matrix.page(record).splitlines()[-2:] == [
        "| with `ATEN_CPU_CAPABILITY=default` | not run yet | 6,100 passed, 0 failed |",
        "| with `ATEN_CPU_CAPABILITY=avx2`, `MKL_ENABLE_INSTRUCTIONS=AVX2` | not run yet | 6,099 passed, 1 failed |",
    ]


def test_the_page_has_a_row_for_each_nightly_run_and_the_cause_of_a_failure() -> None:
    versions = dict(zip(matrix.PACKAGES, "abcdefg", strict=True))
    runs = [
        {"date": "2026-11-01", "versions": versions, "passed": 7_000, "failed": {"tests.x": "a name moved"}},
        {"date": "2026-11-02", "versions": versions, "passed": 7_001, "failed": {}},
    ]
    assert matrix.nightly_page(runs).splitlines()[2:] == [
        "| 2026-11-02 | a | b | c | d | e | f | g | 7,001 | 0 |",
        "| 2026-11-01 | a | b | c | d | e | f | g | 7,000 | 1 |",
        "",
        "- `tests.x`: a name moved",
    ]


def test_upper_bounds_end_with_the_newest_tested_minor_release() -> None:
    pinned = dict(re.findall(r"^([a-z]+)==([\d.]+)", (matrix.ROOT / "constraints.txt").read_text(), re.M))
    newest = json.loads(matrix.RECORD.read_text())["newest"]["versions"]
    for name, specifier in matrix.bounds().items():
        tested = max(Version(each[name].partition("+")[0]) for each in (pinned, newest) if name in each)
        assert specifier.endswith(f",<{tested.major}.{tested.minor + 1}"), name
