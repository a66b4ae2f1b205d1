"""Notebooks as pages, with text, code, printed outputs and pictures."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import nbformat


def to_markdown(path: Path, stem: str) -> tuple[str, dict[str, bytes]]:
    """Convert the notebook at ``path`` to a page, and its pictures to files: name -> content.

    Args:
        path: the executed notebook.
        stem: the beginning of the pictures' names.

    Raises:
        ValueError: if a cell ended with an error.
    """
    notebook = nbformat.read(path, as_version=4)
    parts, pictures = [], dict[str, bytes]()
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        elif cell.cell_type == "code":
            parts.append(f"```python\n{cell.source}\n```")
            parts += [_shown(output, stem, pictures) for output in cell.outputs]
    parts.append(f"*This page is a notebook: [{path.name}]({path.name}) has the same cells to run.*")
    return "\n\n".join(part for part in parts if part) + "\n", pictures


def _shown(output: Any, stem: str, pictures: dict[str, bytes]) -> str:
    if output.output_type == "error":
        raise ValueError(
            f"the notebook {stem} has a cell that failed: {output.ename}: {output.evalue}. Build it again."
        )
    if output.output_type == "stream":
        return _block(output.text)
    data = output.data
    if "image/png" in data:
        name = f"{stem}_{len(pictures)}.png"
        pictures[name] = base64.b64decode(data["image/png"])
        return f"![Output of the code above]({name})"
    if "text/html" in data:
        return f'<div class="notebook-output">\n{data["text/html"]}\n</div>'
    return _block(data.get("text/plain", ""))


def _block(text: str) -> str:
    return f"```{{.text .output}}\n{text.rstrip()}\n```" if text.strip() else ""
