"""Every public name has a docstring with an example that runs, and is in the docs; mypy knows wrong calls."""

import doctest
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import torchrl_llm_kl
import typing_calls
from project import PROJECT, script

api = script("docs/build_api.py")
NAMES = [(layer, name) for layer in api.ORDER for name in api.public_names(layer)]
MODULES = [m.name for m in pkgutil.walk_packages(torchrl_llm_kl.__path__, "torchrl_llm_kl.")]

#: Callables whose use is shown where they are returned or raised, or that need a running Ray (``docs/ray.md``).
WITHOUT_EXAMPLE = {"RayKLRewardTransform", "RayRetrieveKL", "RayRetrieveLogProb", "RemoteModel", "RemoteScorer"}


def needs_example(thing: Any) -> bool:
    """True for functions and for classes with behaviour; not for errors, result records, types and constants."""
    if inspect.isclass(thing):
        plain = issubclass(thing, (Exception, Warning, tuple, dict)) or hasattr(thing, "__dataclass_fields__")
        return not plain and not getattr(thing, "_is_protocol", False)
    return inspect.isfunction(thing)


def test_every_public_name_is_documented_with_an_example() -> None:
    folders = {path.parent.name for path in Path(torchrl_llm_kl.__file__).parent.glob("*/__init__.py")}
    assert set(api.ORDER) == folders
    assert {name for _, name in NAMES} >= {*torchrl_llm_kl.__all__, *WITHOUT_EXAMPLE}
    things = {(layer, name): api.public_names(layer)[name] for layer, name in NAMES}
    assert len(things) > 300
    bare = [f"{layer}.{name}" for (layer, name), thing in things.items() if not api.summary(layer, name, thing)]
    assert bare == [], "no docstring (or no `#:` comment)"
    needed = {key: thing for key, thing in things.items() if needs_example(thing) and key[1] not in WITHOUT_EXAMPLE}
    assert [key for key, thing in needed.items() if ">>>" not in (inspect.getdoc(thing) or "")] == [], "no example"


def examples(module: str) -> dict[str, doctest.DocTest]:
    """Looks at each object defined here, because doctest's own search misses decorated functions."""
    found = vars(importlib.import_module(module))
    things = {name: thing for name, thing in found.items() if inspect.isclass(thing) or inspect.isfunction(thing)}
    own = [(thing, name) for name, thing in things.items() if thing.__module__ == module]
    find = partial(doctest.DocTestFinder().find, module=False, globs={**found, "torch": torch})
    tests = [test for thing in own for test in find(*thing)]
    return {test.name: test for test in tests if test.examples}


def test_examples_run() -> None:
    tests = {f"{module}.{name}": test for module in MODULES for name, test in examples(module).items()}
    assert len(tests) > 250
    runner = partial(doctest.DocTestRunner, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    runs = {name: runner().run(test, out=sys.stderr.write) for name, test in tests.items()}
    assert [name for name, run in runs.items() if run.failed] == []


def test_the_stubs_list_what_is_registered() -> None:
    """Type checkers know exactly the current objectives, advantages, estimators, presets and hyper-parameters."""
    for path, text in script("docs/build_stubs.py").render().items():
        assert path.read_text(encoding="utf-8") == text, "run `make stubs`"


@pytest.fixture(scope="module")
def mypy() -> str:
    """mypy's output for ``typing_calls.py``. Without its cache, reading torch takes half a minute."""
    command = [sys.executable, "-m", "mypy", "--no-error-summary", typing_calls.__file__]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert not done.stderr, done.stderr
    return done.stdout


def test_mypy_reports_wrong_calls_and_accepts_right_ones(mypy: str) -> None:
    """The errors must be on the marked lines of ``typing_calls.py`` and on no others."""
    calls = Path(typing_calls.__file__)
    reported = {int(line) for line in re.findall(rf"{calls.name}:(\d+): error:", mypy)}
    wrong = {n for n, line in enumerate(calls.read_text().splitlines(), 1) if line.endswith("# reported")}
    assert len(wrong) > 25
    assert reported == wrong, mypy
