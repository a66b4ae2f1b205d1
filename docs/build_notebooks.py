"""Execute the notebooks of ``docs/notebooks``. ``NAME.py`` in percent format becomes ``NAME.ipynb`` with outputs.

Run ``make docs`` after a change. A test fails if the cells of a notebook differ from its source. ``python
docs/build_notebooks.py start`` builds a single notebook.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("notebooks")
TIMEOUT = 600  # seconds per cell


def sources() -> list[Path]:
    """The notebooks' sources, by name."""
    return sorted(FOLDER.glob("*.py"))


def read(source: Path) -> Any:
    """The notebook without outputs. Cells are numbered, since random ids would change in each build."""
    import jupytext

    notebook = jupytext.read(source)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
        cell["metadata"] = {}
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook["metadata"] = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return notebook


def execute(source: Path, folder: Path) -> Any:
    """Run a notebook in ``folder``, and return it with its outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: if a cell fails.
    """
    from nbclient import NotebookClient

    notebook = read(source)
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # otherwise the kernel's debugger warns
    NotebookClient(
        notebook, timeout=TIMEOUT, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    for cell in notebook.cells:
        cell["metadata"] = {}  # it holds the times of the run
        if cell.cell_type == "code":
            cell["outputs"] = [output for output in cell["outputs"] if output.get("name") != "stderr"]
    return notebook


def write(source: Path) -> None:
    """Execute a notebook and write it beside its source."""
    import nbformat

    nbformat.write(execute(source, FOLDER), source.with_suffix(".ipynb"))


if __name__ == "__main__":
    wanted = sys.argv[1:] or [source.stem for source in sources()]
    for source in sources():
        if source.stem in wanted:
            write(source)
