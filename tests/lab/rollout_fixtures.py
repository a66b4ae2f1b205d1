"""Fixtures for the test folders that use rollouts. Each `conftest.py` imports them."""

import warnings
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any

import pytest
import tensordict

from toy_models import tiny_model
from toy_rollouts import make_model, make_tokenizer


@pytest.fixture(scope="session", autouse=True)
def _imported_before_the_first_test() -> None:
    """Import modules that load at first use, since this takes longer than a test is allowed."""
    tiny_model()
    for name in ("pandas", "peft"):
        with suppress(ImportError):
            import_module(name)


@pytest.fixture(autouse=True)
def _lists_become_stacks():
    with tensordict.set_list_to_stack(True):
        yield


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="session")
def policy_model(tokenizer: Any) -> Any:
    return make_model(tokenizer, seed=0)


@pytest.fixture(scope="session")
def ref_model(tokenizer: Any) -> Any:
    return make_model(tokenizer, seed=1)


@pytest.fixture(params=[False, True], ids=["nested", "padded"])
def padded(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(autouse=True)
def _tables_have_no_head() -> Iterator[None]:
    """Ignore the warning of scorers that a table of logits has no body and head."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="LogProbScorer takes the model's full forward")
        yield
