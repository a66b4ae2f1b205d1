"""Scorers of one model take turns: each may switch its mode or its adapters for the time of a call."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["one_at_a_time"]

_LOCKS: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()
_MAKING = threading.Lock()


@contextmanager
def one_at_a_time(model: Any) -> Iterator[None]:
    """Hold the lock of ``model``, which lives as long as the model does."""
    with _MAKING:
        lock = _LOCKS.setdefault(model, threading.RLock())
    with lock:
        yield
