from __future__ import annotations

import os
from pathlib import Path

import pytest

from built_site import Site, build


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The site, built once for all tests; ``TORCHRL_LLM_KL_SITE`` names one that is built already."""
    if built := os.environ.get("TORCHRL_LLM_KL_SITE"):
        return Site(Path(built).resolve(), "")
    folder = tmp_path_factory.mktemp("site")
    return Site(folder, build(folder))
