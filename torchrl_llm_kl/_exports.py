"""Names that a package loads on first use, listed once: in its stub ``__init__.pyi``, which type checkers read too."""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

_REST = "# isort: split"  # what a stub lists after it is for other layers, and not public


def lazy_names(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of a package, from the imports of its stub.

    Args:
        package: its ``__name__``.
        file: its ``__file__``.
    """
    text = Path(file).with_suffix(".pyi").read_text(encoding="utf-8")
    home, public = _imports(text), _imports(text.partition(_REST)[0])

    def load(name: str) -> Any:
        if name in home:
            if home[name] == package:  # a package below this one
                return import_module(f"{package}.{name}")
            return getattr(import_module(home[name]), name)
        from torchrl_llm_kl._registry import no_attribute

        raise no_attribute(package, name, home)

    return load, lambda: sorted(home), sorted(name for name, module in public.items() if module != package)


def _imports(stub: str) -> dict[str, str]:
    """Name -> module of the imports."""
    found = [node for node in ast.parse(stub).body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in found for alias in node.names}
