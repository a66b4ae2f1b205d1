"""A local Ray cluster for this benchmark, on the loopback address."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Niceness of the actors. With Ray's default of 15, other programs on the machine would decide the figures.
NICENESS = "0"


@contextmanager
def cluster() -> Iterator[None]:
    """Start a cluster, independent of others on the machine, and stop it. Each model gets one thread."""
    import ray

    os.environ.setdefault("RAY_worker_niceness", NICENESS)
    ray.init(
        address="local",
        num_cpus=8,  # slots for actors, not cores
        num_gpus=0,
        namespace="benchmark",
        object_store_memory=512 * 2**20,
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join((str(ROOT), *_path())), "OMP_NUM_THREADS": "1"}},
    )
    try:
        yield
    finally:
        ray.shutdown()


def _path() -> list[str]:
    return [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
