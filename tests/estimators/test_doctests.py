"""Every docstring example of the layer runs and prints the documented output."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

import torchrl_llm_kl._numerics
from torchrl_llm_kl import estimators

MODULES = [torchrl_llm_kl._numerics.__name__] + [
    f"{estimators.__name__}.{module.name}" for module in pkgutil.iter_modules(estimators.__path__)
]
PUBLIC = [
    name
    for name, value in ((name, getattr(estimators, name)) for name in estimators.__all__)
    if inspect.isfunction(value) or inspect.isclass(value)
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    results = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert results.attempted
    assert not results.failed


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name):
    assert getattr(estimators, name).__doc__
