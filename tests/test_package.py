"""The package as a whole: what importing it costs, what it exports, that its examples run."""

from __future__ import annotations

import doctest
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchrl_llm_kl


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_importing_loads_neither_ray_nor_transformers() -> None:
    loaded = python(
        "import sys, torchrl\nbefore = set(sys.modules)\nimport torchrl_llm_kl\n"
        "print(sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    assert loaded.strip() == "['torchrl_llm_kl']"


def test_the_layers_load_neither_ray_nor_transformers() -> None:
    """``torchrl.envs`` itself loads ray where it is installed: what counts is what the layers add."""
    imports = "; ".join(f"import torchrl_llm_kl.{layer}" for layer in LAYERS)
    code = "import sys, torchrl.envs; before = set(sys.modules); {}; print({{'ray', 'transformers'}} & ({} - before))"
    assert python(code.format(imports, "set(sys.modules)")).strip() == "set()"


def test_every_exported_name_exists() -> None:
    for name in torchrl_llm_kl.__all__:
        assert getattr(torchrl_llm_kl, name).__name__ == name
    assert set(torchrl_llm_kl.__all__) <= set(dir(torchrl_llm_kl))
    with pytest.raises(AttributeError, match="no attribute 'RetrieveKLL'"):
        _ = torchrl_llm_kl.RetrieveKLL


LAYERS = [
    "ragged",
    "head",
    "estimators",
    "masks",
    "scoring",
    "transforms",
    "advantages",
    "losses",
    "algorithms",
    "service",
]


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_go_one_way(layer: str) -> None:
    """Each layer imports only from those before it."""
    before = LAYERS[: LAYERS.index(layer) + 1]
    package = importlib.import_module(f"torchrl_llm_kl.{layer}")
    for path in Path(package.__path__[0]).rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        for other in set(LAYERS) - set(before):
            assert f"torchrl_llm_kl.{other} import" not in source, f"{layer}/{path.name} imports {other}"
            assert f"torchrl_llm_kl.{other}." not in "".join(_imports(source)), f"{layer}/{path.name} imports {other}"


def _imports(source: str) -> list[str]:
    return [line for line in source.splitlines() if line.lstrip().startswith(("from ", "import "))]


@pytest.mark.parametrize("layer", ["losses", "algorithms"])
def test_every_example_in_the_newer_layers_runs(layer: str) -> None:
    """Decorated functions hide from doctest's search by module: each public name is looked at by itself."""
    package = importlib.import_module(f"torchrl_llm_kl.{layer}")
    attempted = 0
    for name in package.__all__:
        thing = getattr(package, name)
        if not callable(thing):
            continue
        globs = {**vars(sys.modules[thing.__module__]), **vars(package), "torch": torch}
        for example in doctest.DocTestFinder(recurse=False).find(thing, name, globs=globs):
            result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example)
            assert result.failed == 0, name
            attempted += result.attempted
    assert attempted > 10


@pytest.mark.parametrize("layer", LAYERS)
def test_every_public_name_is_documented(layer: str) -> None:
    package = importlib.import_module(f"torchrl_llm_kl.{layer}")
    for name in package.__all__:
        thing = getattr(package, name)
        if inspect.isfunction(thing) or inspect.isclass(thing):
            assert thing.__doc__, f"{layer}.{name}"


TRANSFORMS = ["_kl_computation", "_kl_reward", "_retrieve_kl", "_retrieve_log_prob"]


@pytest.mark.parametrize("module", TRANSFORMS)
def test_defect_31_docstring_examples_run(module: str) -> None:
    result = doctest.testmod(
        importlib.import_module(f"torchrl_llm_kl.transforms.{module}"), optionflags=doctest.ELLIPSIS
    )
    assert result.attempted > 0
    assert result.failed == 0
