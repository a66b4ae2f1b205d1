"""Clients tell replicas that they are still there."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import time
import uuid
from collections.abc import Mapping
from typing import Any

__all__ = ["LEASE", "Leases", "client_name"]

#: Seconds without a sign of any client after which a replica ends.
LEASE = 30.0

_PROCESS = uuid.uuid4().hex[:8]


def client_name() -> str:
    """Of this process."""
    return f"{_PROCESS}-{os.getpid()}"


class Leases:
    """The replicas that this process uses; one thread tells all of them that it is there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handles: dict[str, Any] = {}
        self._holders: dict[str, int] = {}
        self._lives: dict[str, set[str]] = {}
        # Objects may be collected anywhere, also while this thread holds the lock: the queue alone bears that.
        self._released: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def hold(self, replica: str, handle: Any) -> None:
        """One more object of this process uses a replica."""
        with self._lock:
            self._holders[replica] = self._holders.get(replica, 0) + 1
            self._handles[replica] = handle
            if self._thread is None:
                self._thread = threading.Thread(target=self._beat, name="leases", daemon=True)
                self._thread.start()
                atexit.register(self._release_all)
        self._tell({replica: handle})

    def replace(self, replica: str, handle: Any) -> None:
        """The replica has been made again."""
        with self._lock:
            if replica in self._holders:
                self._handles[replica] = handle
        self._tell({replica: handle})

    def release(self, replica: str) -> None:
        """One object less; with the last one, the replica is told."""
        self._released.put(replica)

    def _release(self, replica: str, *, all_of_them: bool = False) -> None:
        with self._lock:
            left = self._holders.get(replica, 0) - 1
            if left > 0 and not all_of_them:
                self._holders[replica] = left
                return
            self._holders.pop(replica, None)
            handle = self._handles.pop(replica, None)
        if handle is not None and _connected():
            with contextlib.suppress(Exception):  # it is gone already
                handle.release.remote(client_name())

    def _release_all(self) -> None:
        for replica in list(self._holders):
            self._release(replica, all_of_them=True)

    def _tell(self, handles: Mapping[str, Any]) -> None:
        """Say that this process is there, and how often a replica has begun as far as is known here."""
        import ray

        end = time.monotonic() + LEASE / 4
        answers = {}
        with contextlib.suppress(Exception):
            if _connected():
                for replica, handle in handles.items():
                    known = sorted(self._lives.get(replica, ()))
                    answers[replica] = handle.hold.remote(client_name(), known)
        for replica, answer in answers.items():
            with contextlib.suppress(Exception):  # dead or busy: whoever asks it for scores will find out
                lives = ray.get(answer, timeout=max(end - time.monotonic(), 0.001))
                self._lives.setdefault(replica, set()).update(lives)

    def _beat(self) -> None:
        next_beat = time.monotonic() + LEASE / 4
        while True:
            with contextlib.suppress(queue.Empty):
                self._release(self._released.get(timeout=max(next_beat - time.monotonic(), 0.0)))
            if time.monotonic() >= next_beat:
                with self._lock:
                    handles = dict(self._handles)
                self._tell(handles)
                next_beat = time.monotonic() + LEASE / 4


def _connected() -> bool:
    import ray

    return bool(ray.is_initialized())
