"""The replicas as one client sees them: found or created on first use, lost and found again, and chosen by prompt."""

from __future__ import annotations

import hashlib
import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchrl_llm_kl.service._errors import (
    ReplicaGone,
    ServiceClosedError,
    ServiceError,
    ServiceOverloaded,
    ServiceTimeout,
)
from torchrl_llm_kl.service._lifecycle import Leases, ServiceSpec, launch, welcome

_LEASES = Leases()
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 0.5
_ROUTED = 8192  # sequences that a router expects to be continued


@dataclass(eq=False)
class _Link:
    handle: Any
    description: Any  # reference
    welcomed: bool = False
    requested: float = 0.0


class Replicas:
    """Handles of the actors of a service.

    Attributes:
        retries: calls so far that failed with their replica and were repeated.
        newest: latest version of the weights that this client has seen.
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

    def start(self) -> None:
        """Start to create missing replicas, all at once."""
        for replica in range(self.spec.num_replicas):
            self._link(replica)

    def handle(self, replica: int, *, timeout: float) -> Any:
        """The actor, once it is ready.

        Raises:
            ServiceConfigError, ServiceTimeout: as :func:`welcome`.
            ServiceClosedError: if the service was closed.
            Exception: the error of making the model, or one of :func:`failures` if the replica is down.
        """
        link = self._link(replica)
        if not link.welcomed:
            try:
                welcome(self.spec, replica, link.handle, link.description, timeout=timeout)
            except Exception as error:
                if not isinstance(error, (ServiceTimeout, *failures())):
                    self._drop(replica, link)  # the next call starts over
                raise
            name = f"{self._cluster} {self.spec.namespace} {self.spec.replica_name(replica)}"
            with self._lock:
                first = name not in self._held
                if first:
                    self._held.append(name)
                link.welcomed = True
                self._lost.discard(replica)
            _LEASES.hold(name, link.handle, first=first)
        return link.handle

    def choose(self, order: Sequence[int]) -> int:
        """The first replica of ``order`` that is not down; the very first if all are."""
        return next((replica for replica in order if replica not in self._lost or self._is_back(replica)), order[0])

    def call(self, replica: int, method: str, *args: Any, timeout: float) -> Any:
        """Call a method of one replica, with retries until the timeout."""
        import ray

        patience = Patience(timeout, f"{method}() of replica {self.spec.replica_name(replica)}")
        while True:
            try:
                handle = self.handle(replica, timeout=patience.left)
                return ray.get(getattr(handle, method).remote(*args), timeout=patience.left)
            except ray.exceptions.GetTimeoutError:
                raise patience.up() from None
            except failures() as error:
                failure = error
            self.lose(replica, failure)
            patience.rest(failure)

    def lose(self, replica: int, error: Exception) -> None:
        """Drop a replica whose call failed with one of :func:`failures`, so that the next call looks for it again.

        Raises:
            ServiceClosedError: if it was shut down on purpose.
            ServiceError: if it fails before it makes its model, as it would the next time.
        """
        if getattr(error, "actor_init_failed", False) and not _lost_arguments(error):
            raise ServiceError(f"replica {self.spec.replica_name(replica)} cannot start: {error}") from error
        if _was_shut_down(error):
            self.close(f"the service {self.spec.name!r} was shut down.")
            raise ServiceClosedError(self._closed) from error
        with self._lock:
            self.retries += 1
            link = self._links.get(replica)
            self._lost.add(replica)
        if link is not None:
            self._drop(replica, link)

    def close(self, why: str) -> None:
        """Stop using the service; later calls raise :class:`ServiceClosedError` with this text."""
        self._closed = self._closed or why
        self._finalizer()
        self._links.clear()

    def _link(self, replica: int) -> _Link:
        if self._closed:
            raise ServiceClosedError(self._closed)
        with self._lock:
            self._join_cluster()
            if replica not in self._links:
                self._links[replica] = _Link(*launch(self.spec, replica), requested=time.monotonic())
            return self._links[replica]

    def _join_cluster(self) -> None:
        """Join a cluster if this process is part of none; drop handles of another cluster."""
        if self._cluster and self._cluster == _session():
            return
        self.spec = self.spec.here()
        self._links.clear()
        self._lost.clear()
        if self._cluster:
            self.newest = 0
        self._cluster = _session()

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
            hopeless = getattr(error, "actor_init_failed", False)  # a new actor would fail in the same way
            if not hopeless and time.monotonic() - link.requested > _LONGEST_PAUSE:
                self._drop(replica, link)
            return False
        except Exception:  # its model cannot be made: leave the work to the others
            return False
        return True

    def _drop(self, replica: int, link: _Link) -> None:
        with self._lock:
            if self._links.get(replica) is link:
                del self._links[replica]


def _session() -> str:
    """Identifies the connection of this process to a cluster; empty without one."""
    import ray

    if not ray.is_initialized():
        return ""
    context = ray.get_runtime_context()
    return f"{context.gcs_address} {context.get_node_id()} {context.get_job_id()}"


def _release(names: list[str]) -> None:
    for name in names:
        _LEASES.release(name)
    names.clear()


# ------------------------------------------------------------------ failures and retries


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


def _lost_arguments(error: Exception) -> bool:
    """Whether an actor failed to start because Ray lost its arguments; a client that has them can create it anew.

    Ray drops the large arguments of a detached actor (a model given by value) after its first start, so that a restart
    fails: ``ActorDiedError.from_task_error`` then wraps a ``RayTaskError`` whose cause is the error of the lost object.
    """
    from ray import exceptions

    return any(isinstance(getattr(arg, "cause", None), exceptions.ObjectLostError) for arg in error.args)


def _was_shut_down(error: Exception) -> bool:
    """Whether the actor ended itself with ``exit_actor()``, as :meth:`ScoringActor.close` does.

    Ray has no type or attribute for it: ``ActorDiedError.args`` is empty and the actor table's reason is ``WORKER_DIED`` for a
    crash too. Only the message holds the ``WorkerExitType``, put there by ``GenWorkerDiedCause`` in Ray's
    ``gcs_actor_manager.cc``.
    """
    return "INTENDED_USER_EXIT" in str(error)


class Patience:
    """A deadline ``timeout`` seconds from now, and growing pauses between tries; ``what`` names the call in messages."""

    def __init__(self, timeout: float, what: str) -> None:
        self.timeout, self.what = timeout, what
        self._end = time.monotonic() + timeout
        self._pause = _FIRST_PAUSE

    @property
    def left(self) -> float:
        """Seconds until the deadline, at least 0.001."""
        return max(self._end - time.monotonic(), 0.001)

    def rest(self, error: Exception) -> None:
        """Pause before the next try.

        Raises:
            ServiceTimeout: if there is no time for one.
            ServiceOverloaded: if ``error`` is one and there is no time for another try.
        """
        if self._pause > self.left:
            if isinstance(error, ServiceOverloaded):
                raise error
            raise ServiceTimeout(f"{self.what}: no replica came back within {self.timeout:g} s: {error}") from error
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def up(self) -> ServiceTimeout:
        """The error for a missed deadline."""
        return ServiceTimeout(f"{self.what} took more than {self.timeout:g} s. Raise timeout=, or add replicas.")


# ------------------------------------------------------------------ routing


class Router:
    """Sends all responses to one prompt to the same replica, and a continued conversation to the one that cached it.

    The key is the prompt: all tokens before the first one to score, or the whole sequence if all of it is scored. Rendezvous
    hashing ranks the replicas: in the same order in every process, and so that the sequences of a replica that is down
    spread over all others. A sequence that starts with the whole of an earlier one continues it and follows it.
    """

    def __init__(self, num_replicas: int) -> None:
        self.num_replicas = num_replicas
        self._earlier: OrderedDict[tuple[int, bytes], tuple[int, ...]] = OrderedDict()
        self._lengths: Counter[int] = Counter()

    def order(self, row: np.ndarray, first_scored: int, *, goes_on: bool = False) -> tuple[int, ...]:
        """All replicas, the one in charge of a sequence first.

        Args:
            row: token ids ``[n]``.
            first_scored: position of the first token to score.
            goes_on: whether later sequences may continue this one.
        """
        if self.num_replicas == 1:
            return (0,)
        row = np.ascontiguousarray(row, dtype=np.int64)
        order = self._continued(row) if goes_on else None
        if order is None:
            order = self._ranked((row[:first_scored] if first_scored > 1 else row).tobytes())
        if goes_on and len(row):
            self._remember(row, order)
        return order

    def _ranked(self, key: bytes) -> tuple[int, ...]:
        def rank(replica: int) -> bytes:
            return hashlib.blake2b(key, digest_size=8, salt=replica.to_bytes(8, "little")).digest()

        return tuple(sorted(range(self.num_replicas), key=rank))

    def _continued(self, row: np.ndarray) -> tuple[int, ...] | None:
        """The order of the longest earlier sequence that ``row`` starts with."""
        found, done, digest = None, 0, hashlib.blake2b(digest_size=8)
        for length in sorted(n for n in self._lengths if n <= len(row)):
            digest.update(row[done:length].tobytes())
            found, done = self._earlier.get((length, digest.copy().digest()), found), length
        return found

    def _remember(self, row: np.ndarray, order: tuple[int, ...]) -> None:
        key = (len(row), hashlib.blake2b(row.tobytes(), digest_size=8).digest())
        if key not in self._earlier:
            self._lengths[key[0]] += 1
        self._earlier[key] = order
        self._earlier.move_to_end(key)
        if len(self._earlier) > _ROUTED:
            (length, _), _ = self._earlier.popitem(last=False)
            self._lengths[length] -= 1
            if not self._lengths[length]:
                del self._lengths[length]
