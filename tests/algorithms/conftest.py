from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _tables_have_no_head() -> Iterator[None]:
    """Scorers warn that a table of logits is no body with a head."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="LogProbScorer takes the model's full forward")
        yield
