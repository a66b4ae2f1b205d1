"""The notebooks have the cells of their sources, with outputs; executing them yields what they show."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from project import PROJECT

nbformat = pytest.importorskip("nbformat", reason="the extra `docs` is not installed")
pytest.importorskip("jupytext", reason="the extra `docs` is not installed")


_spec = importlib.util.spec_from_file_location("build_notebooks", PROJECT / "docs" / "build_notebooks.py")
assert _spec is not None
assert _spec.loader is not None
build: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(build)
SOURCES = build.sources()


def shown(source: Path) -> Any:
    return nbformat.read(source.with_suffix(".ipynb"), as_version=4)


def printed(notebook: Any) -> list[str]:
    """What each cell printed."""
    cells = (cell for cell in notebook.cells if cell.cell_type == "code")
    return ["".join(output.get("text", "") for output in cell.outputs) for cell in cells]


def test_there_are_notebooks() -> None:
    assert {source.stem for source in SOURCES} >= {"start"}


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_a_notebook_has_the_cells_of_its_source(source: Path) -> None:
    cells = [(cell.cell_type, cell.source) for cell in shown(source).cells]
    assert cells == [(cell.cell_type, cell.source) for cell in build.read(source).cells], "run `make docs`"


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_a_notebook_is_executed(source: Path) -> None:
    notebook = shown(source)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(output.output_type == "error" for output in outputs)
    assert len(source.with_suffix(".ipynb").read_bytes()) < 400_000
    assert str(PROJECT) not in source.with_suffix(".ipynb").read_text(encoding="utf-8")


def test_the_first_notebook_learns_and_finds_the_fault() -> None:
    text = "\n".join(printed(shown(build.FOLDER / "start.py")))
    before, after = re.search(r"share of vowels ([\d.]+) -> ([\d.]+)", text).groups()  # type: ignore[union-attr]
    assert float(after) > float(before) + 0.1
    assert re.search(r"^top_k - ", text, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_executing_a_notebook_yields_what_it_shows(source: Path, tmp_path: Path) -> None:
    """Numbers may differ in the last digits on another machine; the words around them may not."""
    number = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
    again, before = printed(build.execute(source, tmp_path)), printed(shown(source))
    assert [number.sub("#", text).split("\n")[0] for text in again] == [
        number.sub("#", text).split("\n")[0] for text in before
    ]
