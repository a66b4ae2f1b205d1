"""One pool of ranks for all tests of this folder."""

from __future__ import annotations

import pytest

from distributed.pool import RankPool


@pytest.fixture(scope="session")
def pool():
    pool = RankPool(4)
    yield pool
    pool.close()
