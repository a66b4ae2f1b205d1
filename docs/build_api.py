"""The public names of the layers with a summary of each docstring, for ``build_pages.py`` and the site."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import torchrl_llm_kl
from torchrl_llm_kl.advantages import available_advantages
from torchrl_llm_kl.losses import available_objectives

PACKAGE = Path(torchrl_llm_kl.__file__).parent

#: The layers in the order of the page, the most used first.
ORDER = (
    "transforms",
    "algorithms",
    "tasks",
    "losses",
    "advantages",
    "datasets",
    "estimators",
    "scoring",
    "service",
    "diagnostics",
    "training",
    "cli",
    "masks",
    "rollouts",
    "ragged",
    "head",
)


def public_names(layer: str) -> dict[str, Any]:
    """Name -> object for the public names of a layer."""
    module = importlib.import_module(f"torchrl_llm_kl.{layer}")
    return {name: getattr(module, name) for name in sorted(module.__all__, key=str.lower)}


def home_of(layer: str, name: str, thing: Any) -> str:
    """The layer that defines a public name. ``layer`` itself if the defining layer does not export the name."""
    module = str(getattr(thing, "__module__", ""))
    home = module.split(".")[1] if module.startswith(f"{PACKAGE.name}.") else layer
    return home if home in ORDER and name in public_names(home) else layer


def summary(layer: str, name: str, thing: Any) -> str:
    """The first paragraph of a docstring, or the ``#:`` comment of a constant or a type. Empty if there is none."""
    if inspect.isfunction(thing) or (inspect.isclass(thing) and thing.__module__.startswith("torchrl_llm_kl")):
        text = inspect.getdoc(thing) or ""
    else:
        text = comment(layer, name)
    return _first_paragraph(text)


def _first_paragraph(text: str) -> str:
    """The first paragraph on one line, with Sphinx roles as code."""
    paragraph = " ".join(text.split("\n\n")[0].split())
    paragraph = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", paragraph.replace("``", "`"))
    return re.sub(r":math:`([^`]*)`", r"`\1`", paragraph).replace("|", "\\|")


def comment(layer: str, name: str) -> str:
    """The lines ``#: ...`` above the assignment of ``name`` in the layer's files."""
    for path in sorted([*(PACKAGE / layer).rglob("*.py"), *(PACKAGE / layer).rglob("*.pyi")]):
        lines = path.read_text(encoding="utf-8").splitlines()
        for at, line in enumerate(lines):
            if re.match(rf"{name}\b.*=", line):
                above = at
                while above and lines[above - 1].startswith("#:"):
                    above -= 1
                if above < at:
                    return " ".join(line.removeprefix("#:").strip() for line in lines[above:at])
    return ""


def described_elsewhere(layer: str) -> dict[str, list[str]]:
    """Start of a line -> the names of a layer that another page or another layer describes."""
    lines: dict[str, list[str]] = {}
    for name, thing in public_names(layer).items():
        if home_of(layer, name, thing) != layer:
            lines.setdefault(f"Defined in `{home_of(layer, name, thing)}`", []).append(name)
        elif layer == "losses" and name in available_objectives():
            lines.setdefault("Objectives, described in [losses](losses.md#objectives)", []).append(name)
        elif layer == "advantages" and name in available_advantages():
            lines.setdefault("Advantages, described in [losses](losses.md#advantages)", []).append(name)
    return lines


def table(layer: str) -> str:
    """A table of the names of a layer, and lists of the names that are described elsewhere."""
    module, others = importlib.import_module(f"torchrl_llm_kl.{layer}"), described_elsewhere(layer)
    left_out = {name for names in others.values() for name in names}
    shown = {name: f"**`{name}`**" if name in torchrl_llm_kl.__all__ else f"`{name}`" for name in public_names(layer)}
    rows = [
        f"| {shown[name]} | {summary(layer, name, thing)} |"
        for name, thing in public_names(layer).items()
        if name not in left_out
    ]
    lists = [f"\n{start}: {', '.join(shown[name] for name in names)}.\n" for start, names in others.items()]
    first = _first_paragraph(module.__doc__ or "")
    return f"{first}\n\n| name | meaning |\n|---|---|\n" + "\n".join(rows) + "\n" + "".join(lists)
