"""Tiers: the folder of a test says what it may start, how long it may take, and when it runs (CONTRIBUTING.md)."""

import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.pool import RankPool
from waits import pace, slowdown

# The models of the tests are tiny: threads only wait for each other, unless they are asked for.
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))

TESTS = Path(__file__).parent
#: Folder -> seconds that one of its tests may take on an idle machine. Those that are ``slow`` have no limit.
BUDGETS = {
    "units": 2.0,  # no process, no compilation, no Ray
    "ray": 30.0,
    "ranks": 30.0,
    "compiled": 30.0,
    "runs": 30.0,  # whole runs: learning, training, tutorials, benchmarks; in processes where users start some
    "site": 30.0,  # documentation, its examples and its site; what is installed
    "browser": 30.0,
    "device": 30.0,  # an accelerator, simulated or real; in a process of its own: `make test-device`
    "peers": 120.0,  # other libraries beside ours: `make test-peers`
    "engines": 900.0,  # real servers: `make engines`
    "real": 300.0,  # a real pre-trained model: `make real`
}
#: Tiers whose tests share what is expensive to start: all of one runs in one worker.
SHARED = ("ray", "ranks", "site", "browser")
#: How many tests and fixtures `--durations-file` names.
SLOWEST = 100


def tier_of(path: Path | str) -> str:
    """The folder below ``tests`` that holds a test."""
    return Path(path).resolve().relative_to(TESTS).parts[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--durations-file", help=f"write the {SLOWEST} slowest tests and fixtures here")


def pytest_configure(config: pytest.Config) -> None:
    for tier in BUDGETS:
        config.addinivalue_line("markers", f"{tier}: in tests/{tier}; set by conftest.py")
    config.addinivalue_line("markers", "smoke: runs with `make test`; units have it from conftest.py")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations(config.getoption("--durations-file")), "durations")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        tier = tier_of(item.path)
        item.add_marker(tier)
        if tier == "units":
            item.add_marker("smoke")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Warn of a test that takes longer than its tier allows. Time that other processes of this machine take does not count."""
    begin = time.monotonic(), time.thread_time()
    result = yield
    took, own = (time.monotonic() - begin[0]) / slowdown(), time.thread_time() - begin[1]
    tier = tier_of(item.path)
    if tier == "units":  # other threads do not count: those of OpenMP burn their time while they wait
        took = min(took, own)
    if took > BUDGETS[tier] and not item.get_closest_marker("slow") and (took := took / pace()) > BUDGETS[tier]:
        warnings.warn(
            f"{item.nodeid} took {took:.1f} s, a test in tests/{tier} may take {BUDGETS[tier]:g} s. Make it smaller, "
            "or mark it slow.",
            stacklevel=1,
        )
    return result


class Durations:
    """Remembers how long each test and each fixture took."""

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.found: list[tuple[float, str, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.found.append((report.duration, report.when or "", report.nodeid))

    def pytest_sessionfinish(self) -> None:
        if self.path:
            lines = [f"{s:7.2f} {when:8} {name}" for s, when, name in sorted(self.found, reverse=True)[:SLOWEST]]
            Path(self.path).write_text("\n".join(["seconds  phase    test", *lines]) + "\n", encoding="utf-8")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of ``--dist loadfile``: a worker runs a file as a whole, or a tier that shares something."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            tier = nodeid.split("/")[1]
            return tier if tier in SHARED else super()._split_scope(nodeid)

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Ranks that run the functions of any module of the tests, started once."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local Ray cluster with explicit resources, started once."""
    ray = pytest.importorskip("ray")
    os.environ.setdefault("RAY_worker_niceness", "0")  # with Ray's 15 a replica starves beside other programs
    settings: dict[str, Any] = {
        "address": "local",  # not another cluster of this machine
        "num_cpus": 4,
        "num_gpus": 0,
        "object_store_memory": 200 * 2**20,
        "include_dashboard": False,
        "log_to_driver": False,
        "_node_ip_address": "127.0.0.1",
        "runtime_env": {"env_vars": {"PYTHONPATH": str(TESTS / "lab"), "OMP_NUM_THREADS": "1"}},
    }
    for left in range(3, -1, -1):  # Ray gives its node 30 seconds, which cannot be set: a busy machine needs more
        try:
            ray.init(**settings)
            break
        except Exception as error:
            ray.shutdown()
            if not left or "timed out during startup" not in str(error):
                raise
    yield
    ray.shutdown()


#: Part of the reason of a skip -> what was not run, and how to run it.
NOT_RUN = {
    "make test-peers": "comparisons with other libraries (make test-peers)",
    "template_corpus.py": "chat templates of other packages (python tests/lab/template_corpus.py FOLDER)",
    "process of its own": "on an accelerator, simulated or real (make test-device)",
    "kernel of CUDA": "of CUDA's own kernels (make test-device DEVICE=cuda on a machine with a GPU)",
    "no chromium": "of the pages in a browser (apt-get install chromium)",
    "is not installed": "with packages that are not installed",
}


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say in one line what was not run: skips among thousands of tests are easily overlooked."""
    reasons = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", ())]
    found = {what: sum(part in reason for reason in reasons) for part, what in NOT_RUN.items()}
    parts = [f"{number} {what}" for what, number in found.items() if number]
    expression = config.getoption("markexpr")
    if "not slow" in expression:
        parts.append("what is slow (make test-slow)")
    if "smoke" in expression and "not smoke" not in expression:
        parts.append("all but one test of each tier with processes (make test-rest)")
    if parts:
        terminalreporter.line(f"Not run: {'; '.join(parts)}.", yellow=True)
