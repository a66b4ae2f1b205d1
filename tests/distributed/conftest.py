"""Ranks that all tests of this folder share."""

from __future__ import annotations

import pytest

from distributed.pool import RankPool


@pytest.fixture(scope="session")
def pool():
    pool = RankPool(4)
    yield pool
    pool.close()
