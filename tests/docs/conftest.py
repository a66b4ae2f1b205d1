from __future__ import annotations

import pytest
from built_site import Site, build


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The site, built once for all tests."""
    folder = tmp_path_factory.mktemp("site")
    return Site(folder, build(folder))
