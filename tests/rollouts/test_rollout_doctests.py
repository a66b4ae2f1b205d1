"""The examples in the docstrings of rollouts and transforms run."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil

import pytest

from torchrl_llm_kl import rollouts, transforms

LAYERS = [rollouts, transforms]
MODULES = [f"{layer.__name__}.{module.name}" for layer in LAYERS for module in pkgutil.iter_modules(layer.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS).failed == 0


@pytest.mark.parametrize("layer", LAYERS)
def test_public_classes_and_functions_are_documented(layer: object) -> None:
    for name in layer.__all__:  # type: ignore[attr-defined]
        thing = getattr(layer, name)
        if not inspect.isclass(thing) and not inspect.isfunction(thing):
            continue  # a Literal
        assert thing.__doc__
        if layer is transforms:
            assert "Example:" in thing.__doc__
