"""Tests against real servers. Only ``make engines`` collects them, one server at a time."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_server import ENGINES

collect_ignore_glob = [] if os.environ.get(ENGINES) else ["test_*.py"]


@pytest.fixture(scope="session")
def measured() -> Iterator[dict[str, Any]]:
    """Measured values by claim. They are printed at the end, for docs/engines.md."""
    found: dict[str, Any] = {}
    yield found
    print("", *(f"{claim}: {value}" for claim, value in found.items()), sep="\n")


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with each model of :data:`vllm_server.MODELS`."""
    from vllm_server import MODELS, make, save

    top = tmp_path_factory.mktemp("models")
    for name in MODELS:
        save(make(name), top / name)
    return top
