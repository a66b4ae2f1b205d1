"""Write ``docs/api.md``: every public name, layer by layer, with the first line of its docstring.

Run ``make docs`` after a change to a public name; a test fails while the page is out of date.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import torchrl_llm_kl

PAGE = Path(__file__).with_name("api.md")
PACKAGE = Path(torchrl_llm_kl.__file__).parent

#: From what most people use to what few do.
ORDER = (
    "transforms",
    "algorithms",
    "losses",
    "advantages",
    "estimators",
    "scoring",
    "service",
    "masks",
    "rollouts",
    "ragged",
    "head",
)

INTRO = """\
# Public names

*Written by `docs/build_api.py` from the docstrings; `help(torchrl_llm_kl.NAME)` shows the whole of one.*

Names in **bold** can be imported from `torchrl_llm_kl` itself, all others from their layer: `from torchrl_llm_kl.losses
import aggregate`. What is not listed here is private and may change.
"""


def public_names(layer: str) -> dict[str, Any]:
    """The public names of a layer: name -> object."""
    module = importlib.import_module(f"torchrl_llm_kl.{layer}")
    return {name: getattr(module, name) for name in sorted(module.__all__, key=str.lower)}


def summary(layer: str, name: str, thing: Any) -> str:
    """The first paragraph of a docstring, or the ``#:`` comment of a constant or a type; empty if there is none."""
    if inspect.isfunction(thing) or (inspect.isclass(thing) and thing.__module__.startswith("torchrl_llm_kl")):
        text = inspect.getdoc(thing) or ""
    else:
        text = _comment(layer, name)
    return _first_paragraph(text)


def _first_paragraph(text: str) -> str:
    """The first paragraph on one line, with Sphinx roles as code."""
    paragraph = " ".join(text.split("\n\n")[0].split())
    paragraph = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", paragraph.replace("``", "`"))
    return re.sub(r":math:`([^`]*)`", r"`\1`", paragraph).replace("|", "\\|")


def _comment(layer: str, name: str) -> str:
    """The lines ``#: ...`` above the assignment of ``name`` in the layer's files."""
    for path in sorted((PACKAGE / layer).rglob("*.py")):
        lines = path.read_text(encoding="utf-8").splitlines()
        for at, line in enumerate(lines):
            if re.match(rf"{name}\b.*=", line):
                above = at
                while above and lines[above - 1].startswith("#:"):
                    above -= 1
                if above < at:
                    return " ".join(line.removeprefix("#:").strip() for line in lines[above:at])
    return ""


def render() -> str:
    """Build the page's text."""
    parts = [INTRO]
    for layer in ORDER:
        module = importlib.import_module(f"torchrl_llm_kl.{layer}")
        first = _first_paragraph(module.__doc__ or "")
        rows = [
            f"| {f'**`{name}`**' if name in torchrl_llm_kl.__all__ else f'`{name}`'} | {summary(layer, name, thing)} |"
            for name, thing in public_names(layer).items()
        ]
        parts.append(f"\n## `{layer}`\n\n{first}\n\n| name | |\n|---|---|\n" + "\n".join(rows) + "\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
