from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.pool import RankPool

# The models of the tests are tiny: threads only wait for each other, unless they are asked for.
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


TESTS = Path(__file__).parent
#: Folders whose modules the actors of tests import, before an installed package.
FOLDERS = (TESTS.parent, TESTS, TESTS / "service", TESTS / "in_torchrl")

#: Tests that share what is expensive to start run in one worker: a Ray cluster, pools of ranks.
SHARED = {
    "tests/service/": "ray",
    "tests/in_torchrl/test_ray_recipe.py": "ray",
    "tests/distributed/": "ranks",
    "tests/losses/test_check_ranks.py": "ranks",
    "tests/losses/test_micro_batches.py": "ranks",
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of ``--dist loadfile``: a worker runs a file as a whole, or all that shares something."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            shared = [name for prefix, name in SHARED.items() if nodeid.startswith(prefix)]
            return shared[0] if shared else super()._split_scope(nodeid)

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Ranks that run the functions of any module of the tests, started once."""
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local Ray cluster with explicit resources, started once."""
    ray = pytest.importorskip("ray")
    settings: dict[str, Any] = {
        "address": "local",  # not another cluster of this machine
        "num_cpus": 4,
        "num_gpus": 0,
        "object_store_memory": 200 * 2**20,
        "include_dashboard": False,
        "log_to_driver": False,
        "_node_ip_address": "127.0.0.1",
        "runtime_env": {"env_vars": {"PYTHONPATH": os.pathsep.join(map(str, FOLDERS)), "OMP_NUM_THREADS": "1"}},
    }
    for last in (
        False,
        False,
        False,
        True,
    ):  # Ray gives its node 30 seconds, which cannot be set: a busy machine needs more
        try:
            ray.init(**settings)
            break
        except Exception as error:
            ray.shutdown()
            if last or "timed out during startup" not in str(error):
                raise
    yield
    ray.shutdown()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say loudly that the inspector's page was not tested: a skip among hundreds is easily overlooked."""
    skipped = [report for report in terminalreporter.stats.get("skipped", ()) if "no chromium" in str(report.longrepr)]
    if skipped:
        terminalreporter.section("THE INSPECTOR'S PAGE WAS NOT TESTED", sep="!", red=True, bold=True)
        terminalreporter.line(
            f"{len(skipped)} tests need a browser: `apt-get install chromium` and `pip install playwright`."
        )
