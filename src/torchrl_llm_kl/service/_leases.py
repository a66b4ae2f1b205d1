"""Clients tell replicas that they are still there."""

from __future__ import annotations

import atexit
import os
import threading
import uuid
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
        self._tell(replica, handle)

    def replace(self, replica: str, handle: Any) -> None:
        """The replica has been made again."""
        with self._lock:
            if replica in self._holders:
                self._handles[replica] = handle
        self._tell(replica, handle)

    def release(self, replica: str) -> None:
        """One object less; with the last one, the replica is told."""
        with self._lock:
            left = self._holders.get(replica, 0) - 1
            if left > 0:
                self._holders[replica] = left
                return
            self._holders.pop(replica, None)
            handle = self._handles.pop(replica, None)
        if handle is not None and _connected():
            try:
                handle.release.remote(client_name())
            except Exception:  # it is gone already
                return

    def _release_all(self) -> None:
        for replica in list(self._holders):
            self._holders[replica] = 1
            self.release(replica)

    def _tell(self, replica: str, handle: Any) -> None:
        """Say that this process is there, and how often the replica has begun as far as is known here."""
        import ray

        if not _connected():
            return
        try:
            lives = ray.get(handle.hold.remote(client_name(), sorted(self._lives.get(replica, ()))), timeout=LEASE / 4)
        except Exception:  # dead or busy: whoever asks it for scores will find out
            return
        self._lives.setdefault(replica, set()).update(lives)

    def _beat(self) -> None:
        pause = threading.Event()
        while not pause.wait(LEASE / 4):
            with self._lock:
                handles = dict(self._handles)
            for replica, handle in handles.items():
                self._tell(replica, handle)


def _connected() -> bool:
    import ray

    return bool(ray.is_initialized())
