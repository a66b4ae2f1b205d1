from collections.abc import Iterator
from typing import Any

import pytest
import tensordict

import task_lab


@pytest.fixture(autouse=True)
def _lists_as_stacks() -> Iterator[None]:
    with tensordict.set_list_to_stack(True):
        yield


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return task_lab.make_tokenizer()


@pytest.fixture(params=[True, False], ids=["padded", "unpadded"])
def padded(request: pytest.FixtureRequest) -> bool:
    return request.param
