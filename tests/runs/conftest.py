"""Ctrl-C reaches the processes of runs."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from rollout_fixtures import _tables_have_no_head  # noqa: F401


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> Iterator[None]:
    """A job in the background of a script ignores SIGINT, and so would each process that it starts."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
