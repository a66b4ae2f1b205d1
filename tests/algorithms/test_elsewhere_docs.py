"""The page of other libraries' settings is up to date, and what its table calls things exists."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from torchrl_llm_kl._foreign import FOREIGN, foreign_hint
from torchrl_llm_kl.algorithms import AlgorithmOverrides, make_algorithm

SCRIPT = Path(__file__).parents[2] / "docs" / "build_elsewhere_table.py"


def test_the_page_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("build_elsewhere_table", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.PAGE.read_text(encoding="utf-8") == script.render(), "run `make docs`"


def test_names_of_this_package_exist() -> None:
    """An identifier in small letters is an argument of make_algorithm."""
    accepted = {*AlgorithmOverrides.__annotations__, *make_algorithm.__annotations__}
    named = {row.here for row in FOREIGN if re.fullmatch("[a-z_]+", row.here)}
    assert named <= accepted, sorted(named - accepted)


def test_every_setting_outside_or_refused_says_what_to_do() -> None:
    assert not [row.name for row in FOREIGN if row.place in ("outside", "refused") and not row.note]
    assert not [row.name for row in FOREIGN if row.place in ("override", "sampling") and not row.here]


@pytest.mark.parametrize(("name", "start"), [("n", " verl's 'n' is 'group_size'"), ("nothing_at_all", "")])
def test_hint(name: str, start: str) -> None:
    assert foreign_hint(name).startswith(start)
    assert bool(foreign_hint(name)) == bool(start)
