from typing import Any

import pytest

import task_lab
from rollout_fixtures import _lists_become_stacks, padded  # noqa: F401


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return task_lab.make_tokenizer()
