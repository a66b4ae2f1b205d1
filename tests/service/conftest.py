"""Tests of the service run on the local Ray cluster."""

from __future__ import annotations

import pytest

from rollout_fixtures import _lists_become_stacks  # noqa: F401

pytest.importorskip("ray")


@pytest.fixture(scope="session", autouse=True)
def _cluster(ray_cluster: None) -> None:
    """Started before the first test."""
