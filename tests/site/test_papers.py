"""The paper index is up to date, and has every paper that the code names and every value of every preset."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest

from project import PROJECT
from torchrl_llm_kl.algorithms import ALGORITHMS

_spec = importlib.util.spec_from_file_location("build_paper_index", PROJECT / "docs" / "build_paper_index.py")
assert _spec is not None
assert _spec.loader is not None
index: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(index)
PAGE = index.PAGE.read_text(encoding="utf-8")


def section(name: str) -> str:
    """The text below the heading of an algorithm."""
    return PAGE.split(f"\n### `{name}`\n")[1].split("\n## ")[0].split("\n### ")[0]


def test_the_page_is_up_to_date() -> None:
    assert index.render() == PAGE, "run `make docs`"


def test_every_paper_that_the_code_names_is_listed() -> None:
    """Found by another way than the page's: in the text of the files."""
    files = [*PROJECT.glob("torchrl_llm_kl/losses/**/*.py"), *PROJECT.glob("torchrl_llm_kl/advantages/*.py")]
    files.append(PROJECT / "torchrl_llm_kl" / "algorithms" / "presets.py")
    named = {
        number for file in files for number in re.findall(r"arXiv (\d{4}\.\d{5})", file.read_text(encoding="utf-8"))
    }
    listed = set(re.findall(r"^\| \[(\d{4}\.\d{5})\]", PAGE, re.MULTILINE))
    assert len(named) > 50
    assert named <= listed


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_value_with_a_source_is_there(name: str) -> None:
    shown = section(name)
    for field in ALGORITHMS[name].sources:
        assert re.search(rf"`{field}=[^`]+`", shown), field


@pytest.mark.parametrize(
    ("name", "value", "source"),
    [
        ("dapo", "objective.clip_high=0.28", "2503.14476"),
        ("dpo", "objective.beta=0.1", "2305.18290"),
        ("gspo", "objective.clip_low=0.0003", "2507.18071"),
        ("simpo", "objective.margin=1.0", "2405.14734"),
        ("gigpo", "advantage.omega=1.0", "2505.10978"),
    ],
)
def test_a_hyperparameter_is_beside_its_paper(name: str, value: str, source: str) -> None:
    (row,) = [line for line in section(name).splitlines() if f"`{value}`" in line]
    assert source in row


def test_each_paper_names_its_authors() -> None:
    rows = re.findall(r"^\| \[\d{4}\.\d{5}\]\(\S+\) \| (.*?) \| (.*?) \|$", PAGE, re.MULTILINE)
    assert len(rows) > 50
    assert [row for row in rows if not re.match(r"[A-Z]", row[0]) or "`" not in row[1]] == []
