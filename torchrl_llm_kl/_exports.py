"""Names that a package loads on first use. Its stub ``__init__.pyi`` lists them, also for type checkers."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

#: Modules that fill a registry of a lower layer. The root package lists them, and :func:`load_plugins` imports them.
PLUGINS: list[str] = []
_REST = "# isort: split"  # names after this line are for other layers, and not public


def lazy_names(package: str, file: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package, from the imports and the types in its stub.

    Args:
        package: its ``__name__``.
        file: its ``__file__``.
    """
    text = Path(file).with_suffix(".pyi").read_text(encoding="utf-8")
    home, public, types = _imports(text), _imports(text.partition(_REST)[0]), _types(text)

    @cache
    def typed(name: str) -> object:
        return _typed(package, types[name], load)

    def load(name: str) -> object:
        if name in types:
            return typed(name)
        if name in home:
            if home[name] == package:  # a subpackage
                return import_module(f"{package}.{name}")
            return getattr(import_module(home[name]), name)
        from torchrl_llm_kl._registry import no_attribute

        raise no_attribute(package, name, home)

    own = [name for name, module in public.items() if module != package]
    return load, lambda: sorted({*home, *types}), sorted({*own, *types})


def load_plugins() -> None:
    """Import the modules that fill registries. Call it before a registry is read for a name that a plugin may add."""
    for module in PLUGINS:
        import_module(module)


def _imports(stub: str) -> dict[str, str]:
    """Name -> module of the names that a stub exports: ``from module import name as name``."""
    imports = [node for node in ast.parse(stub).body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names if alias.asname == alias.name}


def _types(stub: str) -> dict[str, ast.Assign | ast.ClassDef]:
    """Name -> definition of each type in a stub."""
    nodes = [node for node in ast.parse(stub).body if isinstance(node, (ast.Assign, ast.ClassDef))]
    return {node.name if isinstance(node, ast.ClassDef) else ast.unparse(node.targets[0]): node for node in nodes}


def _typed(package: str, node: ast.Assign | ast.ClassDef, load: Callable[[str], object]) -> object:
    """Build the Literal or the TypedDict that a stub defines. The field types of a TypedDict stay strings."""
    if isinstance(node, ast.Assign):
        assert isinstance(node.value, ast.Subscript)
        names = ast.literal_eval(node.value.slice)
        return Literal[names if isinstance(names, tuple) else (names,)]
    from typing_extensions import TypedDict

    fields: dict[str, str] = {}
    for base in map(ast.unparse, node.bases):
        fields |= {} if base == "TypedDict" else load(base).__annotations__
    for field in node.body:
        if isinstance(field, ast.AnnAssign):
            fields[ast.unparse(field.target)] = ast.unparse(field.annotation)
    made: Any = TypedDict(node.name, fields, total=False)  # type: ignore[misc]
    made.__module__, made.__doc__ = package, ast.get_docstring(node)
    return made
