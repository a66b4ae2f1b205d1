"""A local Ray cluster with explicit resources, started once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_fixtures import _lists_become_stacks  # noqa: F401

ray = pytest.importorskip("ray")
TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="session", autouse=True)
def _cluster() -> Iterator[None]:
    paths = os.pathsep.join([str(TESTS), str(TESTS / "service")])
    ray.init(
        address="local",  # not another cluster of this machine
        num_cpus=4,
        num_gpus=0,
        object_store_memory=200 * 2**20,
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        runtime_env={"env_vars": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}},
    )
    yield
    ray.shutdown()
