"""Scripts of the repository that are no modules of a package, such as those that write pages of the documentation."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

from project import PROJECT


@cache
def script(name: str) -> Any:
    """``script("docs/build_api.py")``, run once."""
    path = PROJECT / name
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found
