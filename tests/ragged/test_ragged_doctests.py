"""The doctests of the layer run."""

import doctest
import importlib
import pkgutil

import pytest

import torchrl_llm_kl.ragged as layer

MODULES = [f"{layer.__name__}.{module.name}" for module in pkgutil.iter_modules(layer.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_the_main_class_has_an_example():
    assert doctest.testmod(importlib.import_module("torchrl_llm_kl.ragged._ragged")).attempted >= 3


def test_public_names_are_documented():
    assert [name for name in layer.__all__ if name != "PaddingSide" and not getattr(layer, name).__doc__] == []
