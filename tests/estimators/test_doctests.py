"""Every example in a docstring of the layer runs and prints what it says."""

import doctest
import importlib
import pkgutil

import pytest

import torchrl_llm_kl._numerics
from torchrl_llm_kl import estimators

MODULES = [torchrl_llm_kl._numerics.__name__] + [
    f"{estimators.__name__}.{module.name}" for module in pkgutil.iter_modules(estimators.__path__)
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    results = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert results.attempted
    assert not results.failed


@pytest.mark.parametrize("name", [n for n in estimators.__all__ if callable(getattr(estimators, n))])
def test_public_names_are_documented(name):
    assert getattr(estimators, name).__doc__
