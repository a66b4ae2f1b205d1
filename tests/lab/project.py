"""The project's folder, and files of it that are loaded by path, such as the scripts that write pages."""

import importlib.util
import sys
from functools import cache
from pathlib import Path
from typing import Any

import yaml

PROJECT = Path(__file__).resolve().parents[2]


@cache
def script(name: str) -> Any:
    """``script("docs/build_api.py")``, run once. Objects of its classes can be pickled."""
    path = PROJECT / name
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tables(test: str, name: str = "") -> Any:
    """The tables of cases in the YAML file beside a test. By default it has the test's name without ``test_``."""
    file = Path(test).with_name(f"{name or Path(test).stem.removeprefix('test_')}.yaml")
    return yaml.safe_load(file.read_text(encoding="utf-8"))
