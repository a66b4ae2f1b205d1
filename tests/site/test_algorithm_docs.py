"""The page of the documentation is up to date with the presets."""

from __future__ import annotations

import importlib.util

from project import PROJECT

SCRIPT = PROJECT / "docs" / "build_algorithm_table.py"


def test_the_page_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("build_algorithm_table", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.PAGE.read_text(encoding="utf-8") == script.render(), "run docs/build_algorithm_table.py"
