"""The notebooks have their sources' cells, with outputs, and executing them gives these outputs."""

import re
from pathlib import Path
from typing import Any

import pytest

from project import PROJECT, script

nbformat = pytest.importorskip("nbformat", reason="the extra `docs` is not installed")
pytest.importorskip("jupytext", reason="the extra `docs` is not installed")


build = script("docs/build_notebooks.py")
SOURCES = build.sources()


def shown(source: Path) -> Any:
    return nbformat.read(source.with_suffix(".ipynb"), as_version=4)


def printed(notebook: Any) -> list[str]:
    """What each cell printed."""
    cells = (cell for cell in notebook.cells if cell.cell_type == "code")
    return ["".join(output.get("text", "") for output in cell.outputs) for cell in cells]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_a_notebook_has_the_cells_of_its_source_with_outputs(source: Path) -> None:
    notebook = shown(source)
    cells = [(cell.cell_type, cell.source) for cell in notebook.cells]
    assert cells == [(cell.cell_type, cell.source) for cell in build.read(source).cells], "run `make docs`"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(output.output_type == "error" for output in outputs)
    written = source.with_suffix(".ipynb").read_bytes()
    assert len(written) < 400_000
    assert str(PROJECT).encode() not in written


def test_the_first_notebook_learns_and_finds_the_fault() -> None:
    text = "\n".join(printed(shown(build.FOLDER / "start.py")))
    ((before, after),) = re.findall(r"share of vowels ([\d.]+) -> ([\d.]+)", text)
    assert float(after) > float(before) + 0.1
    assert re.search(r"^top_k - ", text, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_executing_a_notebook_gives_its_outputs(source: Path, tmp_path: Path) -> None:
    """The words must be equal; last digits of numbers may differ between machines."""
    number = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
    notebooks = build.execute(source, tmp_path), shown(source)
    again, before = ([number.sub("#", text).split("\n")[0] for text in printed(each)] for each in notebooks)
    assert again == before
