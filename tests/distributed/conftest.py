from __future__ import annotations

import pytest

from distributed.pool import RankPool


@pytest.fixture(scope="session")
def pool():
    """Four processes for all tests of this folder."""
    pool = RankPool(4)
    yield pool
    pool.close()
