"""The replicas as one client sees them: found or made on first use, lost and found again."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchrl_llm_kl.service._errors import (
    ReplicaGone,
    ServiceClosedError,
    ServiceError,
    ServiceOverloaded,
    ServiceTimeout,
)
from torchrl_llm_kl.service._leases import Leases
from torchrl_llm_kl.service._lifecycle import ServiceSpec, launch, welcome

__all__ = ["Patience", "Replicas", "failures"]

_LEASES = Leases()
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 0.5


def failures() -> tuple[type[Exception], ...]:
    """Errors after which the same call may succeed."""
    from ray import exceptions

    return (
        ReplicaGone,
        exceptions.RayActorError,
        exceptions.ObjectLostError,
        exceptions.ObjectStoreFullError,
        exceptions.WorkerCrashedError,
        exceptions.NodeDiedError,
    )


class Patience:
    """Time that is left, and longer and longer pauses.

    Args:
        timeout: seconds in all.
        what: is tried, for the message.
    """

    def __init__(self, timeout: float, what: str) -> None:
        self.timeout, self.what = timeout, what
        self._end = time.monotonic() + timeout
        self._pause = _FIRST_PAUSE

    @property
    def left(self) -> float:
        """Seconds, a little more than none."""
        return max(self._end - time.monotonic(), 0.001)

    def rest(self, error: Exception) -> None:
        """Wait before the next try.

        Raises:
            ServiceTimeout: if there is no time for one.
            ServiceOverloaded: if that is what the last try came to.
        """
        if self._pause > self.left:
            if isinstance(error, ServiceOverloaded):
                raise error
            raise ServiceTimeout(f"{self.what}: no replica came back within {self.timeout:g} s: {error}") from error
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def up(self) -> ServiceTimeout:
        """The error for when the time is up."""
        return ServiceTimeout(f"{self.what} took more than {self.timeout:g} s. Raise timeout=, or add replicas")


@dataclass(eq=False)
class _Link:
    handle: Any
    description: Any  # to come
    welcomed: bool = False
    asked: float = 0.0


class Replicas:
    """Handles of a service's actors.

    Args:
        spec: the service.

    Attributes:
        retries: calls that failed with their replica so far, and were made again.
        newest: latest version of the weights that was seen.
    """

    def __init__(self, spec: ServiceSpec) -> None:
        self.spec = spec
        self._lock = threading.Lock()
        self._links: dict[int, _Link] = {}
        self._lost: set[int] = set()
        self._held: list[str] = []
        self._closed = ""
        self.retries = self.newest = 0
        self._cluster = ""
        self._finalizer = weakref.finalize(self, _release, self._held)

    def _link(self, replica: int) -> _Link:
        if self._closed:
            raise ServiceClosedError(self._closed)
        with self._lock:
            self._look_around()
            if replica not in self._links:
                self._links[replica] = _Link(*launch(self.spec, replica), asked=time.monotonic())
            return self._links[replica]

    def _look_around(self) -> None:
        """Join a cluster, and forget what was known of another one."""
        if self._cluster and self._cluster == _session():
            return
        self.spec = self.spec.here()
        self._links.clear()
        self._lost.clear()
        if self._cluster:
            self.newest = 0
        self._cluster = _session()

    def start(self) -> None:
        """Begin to make those that are not there, all at once."""
        for replica in range(self.spec.num_replicas):
            self._link(replica)

    def handle(self, replica: int, *, timeout: float) -> Any:
        """The actor, once it is ready.

        Raises:
            ServiceConfigError, ServiceTimeout: as :func:`welcome`.
            ServiceClosedError: if the service was closed.
            Exception: whatever making the model raised; errors of Ray if the replica is down.
        """
        link = self._link(replica)
        if not link.welcomed:
            try:
                welcome(self.spec, replica, link.handle, link.description, timeout=timeout)
            except Exception as error:
                if not isinstance(error, (ServiceTimeout, *failures())):
                    self._drop(replica, link)  # the next call finds out anew
                raise
            name = f"{self._cluster} {self.spec.namespace} {self.spec.replica_name(replica)}"
            with self._lock:
                first = name not in self._held
                if first:
                    self._held.append(name)
                link.welcomed = True
                self._lost.discard(replica)
            (_LEASES.hold if first else _LEASES.replace)(name, link.handle)
        return link.handle

    def choose(self, order: Sequence[int]) -> int:
        """The first one that is not down; if all are, the first."""
        return next((replica for replica in order if replica not in self._lost or self._is_back(replica)), order[0])

    def _is_back(self, replica: int) -> bool:
        import ray

        try:
            link = self._link(replica)
        except ServiceClosedError:
            raise
        except ServiceError:  # its model is in another process
            return False
        if link.welcomed:
            return True
        if not ray.wait([link.description], timeout=0)[0]:
            return False
        try:
            self.handle(replica, timeout=1.0)
        except failures() as error:
            hopeless = getattr(error, "actor_init_failed", False)  # another actor would fail as this one did
            if not hopeless and time.monotonic() - link.asked > _LONGEST_PAUSE:
                self._drop(replica, link)
            return False
        except Exception:  # its model cannot be made: the others have to do
            return False
        return True

    def lose(self, replica: int, error: Exception) -> None:
        """A call failed: look for it again.

        Raises:
            ServiceClosedError: if it was shut down on purpose.
            ServiceError: if it cannot even begin, which it could not the next time either.
        """
        text = str(error)
        # What Ray kept of a model by value may be gone with its maker; here it may be there.
        again = any(word in text for word in ("ReferenceCounting", "OwnerDied", "ObjectLost", "ObjectFreed"))
        if getattr(error, "actor_init_failed", False) and not again:
            raise ServiceError(f"replica {self.spec.replica_name(replica)} cannot begin: {error}") from error
        if "INTENDED_USER_EXIT" in text:
            self.close(f"the service {self.spec.name!r} was shut down")
            raise ServiceClosedError(self._closed) from error
        with self._lock:
            self.retries += 1
            link = self._links.get(replica)
            self._lost.add(replica)
        if link is not None:
            self._drop(replica, link)

    def _drop(self, replica: int, link: _Link) -> None:
        with self._lock:
            if self._links.get(replica) is link:
                del self._links[replica]

    def call(self, replica: int, method: str, *args: Any, timeout: float) -> Any:
        """Call a method of one replica, as often as needed until the time is up."""
        patience = Patience(timeout, f"{method}() of replica {self.spec.replica_name(replica)}")
        while True:
            error = self._try(replica, method, args, patience)
            if not isinstance(error, Exception):
                return error[0]
            self.lose(replica, error)
            patience.rest(error)

    def _try(self, replica: int, method: str, args: tuple[Any, ...], patience: Patience) -> tuple[Any] | Exception:
        """What the method returns, in a tuple; or the failure of the replica."""
        import ray

        try:
            handle = self.handle(replica, timeout=patience.left)
            return (ray.get(getattr(handle, method).remote(*args), timeout=patience.left),)
        except ray.exceptions.GetTimeoutError:
            raise patience.up() from None
        except failures() as error:
            return error

    def close(self, why: str) -> None:
        """Use them no longer."""
        self._closed = self._closed or why
        self._finalizer()
        self._links.clear()


def _session() -> str:
    """Of the cluster that this process is connected to; empty if it is connected to none."""
    import ray

    if not ray.is_initialized():
        return ""
    context = ray.get_runtime_context()
    return f"{context.gcs_address} {context.get_node_id()} {context.get_job_id()}"


def _release(names: list[str]) -> None:
    for name in names:
        _LEASES.release(name)
    names.clear()
