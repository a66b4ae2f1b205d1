"""Scorers of one model take turns: each may switch its mode or its adapters for the time of a call."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from torchrl_llm_kl.scoring._model import find_body

__all__ = ["one_at_a_time"]

_LOCKS: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()
_MAKING = threading.Lock()


@contextmanager
def one_at_a_time(*models: Any) -> Iterator[None]:
    """Hold the lock of each model's body, which lives as long as the body does."""
    with ExitStack() as stack:
        # What a model and another one around it have in common. Always in the same order, so that nobody waits for
        # somebody who waits for them.
        for model in sorted((find_body(m) or m if isinstance(m, nn.Module) else m for m in models), key=id):
            with _MAKING:
                lock = _LOCKS.setdefault(model, threading.RLock())
            stack.enter_context(lock)
        yield
