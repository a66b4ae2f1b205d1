"""Where the project is, and its files that are loaded by path: scripts that write pages, modules without their package."""

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]


@cache
def script(name: str) -> Any:
    """``script("docs/build_api.py")``, run once."""
    path = PROJECT / name
    spec = importlib.util.spec_from_file_location(path.stem, path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found
