"""Every public name has a docstring with an example that runs, and is in the docs."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import torchrl_llm_kl
from project import PROJECT

SCRIPT = PROJECT / "docs" / "build_api.py"
_spec = importlib.util.spec_from_file_location("build_api", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
api = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(api)

NAMES = [(layer, name) for layer in api.ORDER for name in api.public_names(layer)]
MODULES = [m.name for m in pkgutil.walk_packages(torchrl_llm_kl.__path__, "torchrl_llm_kl.")]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

#: Callables whose use is shown where they are returned or raised, or that need a running Ray (``docs/ray.md``).
WITHOUT_EXAMPLE = {"RayKLRewardTransform", "RayRetrieveKL", "RayRetrieveLogProb", "RemoteModel", "RemoteScorer"}


def test_all_layers_are_in_the_docs() -> None:
    folders = {path.parent.name for path in Path(torchrl_llm_kl.__file__).parent.glob("*/__init__.py")}
    assert set(api.ORDER) == folders


def test_names_of_the_package_are_those_of_its_layers() -> None:
    everywhere = {name for _, name in NAMES}
    assert set(torchrl_llm_kl.__all__) <= everywhere


@pytest.mark.parametrize(("layer", "name"), NAMES)
def test_a_public_name_is_documented(layer: str, name: str) -> None:
    thing = api.public_names(layer)[name]
    assert api.summary(layer, name, thing), f"{layer}.{name} has no docstring (or no `#:` comment)"


def test_the_page_of_public_names_is_up_to_date() -> None:
    assert api.PAGE.read_text(encoding="utf-8") == api.render(), "run `make docs`"


def needs_example(thing: Any) -> bool:
    """Functions, and classes that do something: no errors, records of results, types or constants."""
    if inspect.isclass(thing):
        plain = issubclass(thing, (Exception, Warning, tuple, dict)) or hasattr(thing, "__dataclass_fields__")
        return not plain and not getattr(thing, "_is_protocol", False)
    return inspect.isfunction(thing)


@pytest.mark.parametrize(
    ("layer", "name"),
    [(layer, name) for layer, name in NAMES if needs_example(api.public_names(layer)[name])],
)
def test_a_public_name_has_an_example(layer: str, name: str) -> None:
    if name not in WITHOUT_EXAMPLE:
        assert ">>>" in (inspect.getdoc(api.public_names(layer)[name]) or ""), f"{layer}.{name}"


def test_exceptions_to_the_rule_exist() -> None:
    assert {name for _, name in NAMES} >= WITHOUT_EXAMPLE


@pytest.mark.parametrize("module", MODULES)
def test_examples_run(module: str) -> None:
    """Decorated functions hide from doctest's own search, so each object that is defined here is looked at by itself."""
    found = importlib.import_module(module)
    tests: dict[str, doctest.DocTest] = {}
    for name, thing in vars(found).items():
        if getattr(thing, "__module__", None) == module and (inspect.isclass(thing) or inspect.isfunction(thing)):
            globs = {**vars(found), "torch": torch}
            for test in doctest.DocTestFinder().find(thing, name, module=False, globs=globs):
                tests[test.name] = test
    for test in tests.values():
        if test.examples:
            result = doctest.DocTestRunner(optionflags=FLAGS).run(test, out=sys.stderr.write)
            assert result.failed == 0, test.name
