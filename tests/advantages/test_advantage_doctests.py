"""Docstrings: the examples run, and every argument is documented."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import torchrl_llm_kl.advantages as layer

MODULES = [f"{layer.__name__}.{module.name}" for module in pkgutil.iter_modules(layer.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS).failed == 0


@pytest.mark.parametrize("name", layer.available_advantages())
def test_every_advantage_has_an_example_and_a_source(name: str) -> None:
    function = layer.get_advantage(name)
    assert doctest.testmod(importlib.import_module(function.__module__)).attempted
    for part in ("Returns:", "Example:", "Source:"):
        assert part in (function.__doc__ or "")


@pytest.mark.parametrize("name", layer.available_advantages())
def test_every_argument_is_documented(name: str) -> None:
    """Inputs in the module, which its functions share; hyper-parameters in the function."""
    function = layer.get_advantage(name)
    spec = layer.advantage_spec(function)
    shared = importlib.import_module(function.__module__).__doc__ or ""
    assert [key for key in (*spec.needs, *spec.optional) if f"\n    {key}: " not in shared] == []
    assert [key for key in spec.hyper if f"\n    {key}: " not in (function.__doc__ or "")] == []


def test_public_names_are_documented() -> None:
    assert [
        name
        for name in layer.__all__
        if name not in ("AdvantageName", "DEFAULT_KEYS") and not getattr(layer, name).__doc__
    ] == []
