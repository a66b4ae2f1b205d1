import asyncio
import inspect

import pytest

from loopback import Loopback
from rollout_fixtures import _lists_become_stacks, _tables_have_no_head  # noqa: F401

pytest.importorskip("ray")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """An asynchronous test runs on an event loop of its own: the ``Loop`` of its file, where there is one."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None

    async def run():
        try:
            await pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames})
        finally:
            if left := asyncio.all_tasks() - {asyncio.current_task()}:
                for task in left:
                    task.cancel()
                await asyncio.wait(left, timeout=1.0)

    loop = getattr(pyfuncitem.module, "Loop", asyncio.new_event_loop)()
    try:
        loop.run_until_complete(run())
    finally:
        loop.close()
    return True


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch):
    """Ray starts a cluster in many of its functions: here none does."""
    monkeypatch.setattr("ray._private.auto_init_hook.enable_auto_connect", False)


@pytest.fixture
def loop():
    return Loopback()
