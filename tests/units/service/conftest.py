import pytest

from loopback import Loopback
from rollout_fixtures import _lists_become_stacks, _tables_have_no_head  # noqa: F401

pytest.importorskip("ray")


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch):
    """Ray starts a cluster in many of its functions: here none does."""
    monkeypatch.setattr("ray._private.auto_init_hook.enable_auto_connect", False)


@pytest.fixture
def loop(monkeypatch):
    return Loopback(monkeypatch)
