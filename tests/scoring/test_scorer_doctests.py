"""The examples in docstrings run."""

from __future__ import annotations

import doctest

import pytest

from torchrl_llm_kl.scoring import _critic, _passes, _scorer, _scores, _tree


@pytest.mark.parametrize("module", [_critic, _passes, _scorer, _scores, _tree], ids=lambda module: module.__name__)
def test_examples_in_docstrings(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
