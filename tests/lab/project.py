"""The project's folder, and files of it that are loaded by path, such as the scripts that write pages."""

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import yaml

PROJECT = Path(__file__).resolve().parents[2]


@cache
def script(name: str) -> Any:
    """``script("docs/build_api.py")``, run once."""
    path = PROJECT / name
    spec = importlib.util.spec_from_file_location(path.stem, path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def tables(test: str, name: str = "") -> Any:
    """The tables of cases in the YAML file beside a test. By default it has the test's name without ``test_``."""
    file = Path(test).with_name(f"{name or Path(test).stem.removeprefix('test_')}.yaml")
    return yaml.safe_load(file.read_text(encoding="utf-8"))
