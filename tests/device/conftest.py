"""The accelerator that these tests run on: the simulated one, or a real one (``make test-device DEVICE=cuda``)."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import simulated
from rollout_fixtures import _lists_become_stacks  # noqa: F401

HERE = Path(__file__).parent
FIGURES = pytest.StashKey[dict[str, dict[str, tuple[str, ...]]]]()
#: Reason of skipped tests, which conftest.py of all tests reports.
NOT_BUILT = "the simulated accelerator cannot be built"


@pytest.fixture(scope="session", autouse=True)
def device(request: pytest.FixtureRequest) -> torch.device:
    """The first device of the accelerator. The simulated one changes the process for good, so it needs its own process."""
    kind = os.environ.get("TORCHRL_LLM_KL_DEVICE", "sim")
    if any(HERE not in Path(item.path).parents for item in request.session.items):
        pytest.skip("needs a process of its own: make test-device")
    if kind == "sim":
        try:
            simulated.load()
        except simulated.NoCompiler as error:
            pytest.skip(f"{NOT_BUILT}: {error}")
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type != kind:
        pytest.exit(f"DEVICE={kind}, but the accelerator of this machine is {found}.", returncode=2)
    return torch.device(kind, 0)


@pytest.fixture(scope="session")
def sim(device: torch.device) -> torch.device:
    """The device, for tests of reports that only the simulated accelerator makes."""
    if device.type != "sim":
        pytest.skip("counted on the simulated accelerator alone")
    return device


@pytest.fixture
def figures(device: torch.device, request: pytest.FixtureRequest) -> Callable[..., None]:
    """Record a measured number: ``figures(table, row, *cells)``. ``TORCHRL_LLM_KL_FIGURES`` is the file for all numbers."""
    tables = request.config.stash.setdefault(FIGURES, {})

    def note(table: str, row: str, *cells: str) -> None:
        tables.setdefault(table, {})[row] = cells

    return note


def pytest_sessionfinish(session: pytest.Session) -> None:
    path, tables = os.environ.get("TORCHRL_LLM_KL_FIGURES"), session.config.stash.get(FIGURES, {})
    if path and tables:
        found: Any = torch.accelerator.current_accelerator()
        name = torch.get_device_module(found).get_device_name(0)
        out = {"device": name, "torch": torch.__version__, **tables}
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if any(NOT_BUILT in str(report.longrepr) for report in terminalreporter.stats.get("skipped", ())):
        terminalreporter.section("NOTHING was tested on an accelerator", red=True, bold=True)
        line = "tests/device needs a compiler of C++ and Python's headers (apt-get install g++)."
        terminalreporter.line(line, red=True)
