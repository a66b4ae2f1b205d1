"""A client's view of the replicas: created or found on first use, kept alive by leases, found again after a failure."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import time
import uuid
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchrl_llm_kl.service._errors import (
    ReplicaGone,
    ServiceClosedError,
    ServiceConfigError,
    ServiceError,
    ServiceOverloaded,
    ServiceTimeout,
)
from torchrl_llm_kl.service._lifecycle import LEASE, ServiceSpec

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 0.5


@dataclass(eq=False)
class _Link:
    handle: Any
    description: Any  # reference
    welcomed: bool = False
    requested: float = field(default_factory=time.monotonic)


class Replicas:
    """Handles of the actors of a service.

    Attributes:
        retries: number of calls that were retried after their replica failed.
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
        """Start creating missing replicas, all at once."""
        for replica in range(self.spec.num_replicas):
            self._link(replica)

    def handle(self, replica: int, *, timeout: float) -> Any:
        """The actor, once it is ready; raises the error of its factory, or one of :func:`failures` if it is down."""
        link = self._link(replica)
        if not link.welcomed:
            try:
                self._welcome(replica, link, timeout)
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

    def usable(self) -> list[int]:
        """Replicas that are not down; all of them if all are."""
        everyone = range(self.spec.num_replicas)
        found = [replica for replica in everyone if replica not in self._lost or self._is_back(replica)]
        return found or list(everyone)

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

        Raises instead if the service was shut down on purpose, or if the replica could not start.
        """
        # It failed before it called the factory, and would fail again.
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
                handle = self._create_or_find(replica)
                self._links[replica] = _Link(handle, handle.describe.remote())
            return self._links[replica]

    def _join_cluster(self) -> None:
        """Join a cluster if this process is part of none; drop handles of another cluster."""
        if self._cluster and self._cluster == _session():
            return
        try:
            import ray
        except ImportError as error:
            raise ImportError("a service needs Ray: pip install 'torchrl-llm-kl[ray]'.") from error

        if not ray.is_initialized():
            ray.init(self.spec.address, log_to_driver=False)
        self.spec = replace(self.spec, address=ray.get_runtime_context().gcs_address)
        self._links.clear()
        self._lost.clear()
        if self._cluster:
            self.newest = 0
        self._cluster = _session()

    def _create_or_find(self, replica: int) -> Any:
        """Any number of processes may call this at once: Ray creates one actor per name."""
        import ray

        from torchrl_llm_kl.service._actor import MAX_CONCURRENCY, ScoringActor

        spec, name = self.spec, self.spec.replica_name(replica)
        if spec.make_model is None:
            try:
                return ray.get_actor(name, namespace=spec.namespace)
            except ValueError:
                raise ServiceError(
                    f"replica {name} is gone, and its model was given by value in another process. With factory= every "
                    "client can start it again."
                ) from None
        remote: Any = ray.remote(ScoringActor)
        return remote.options(
            name=name,
            namespace=spec.namespace,
            get_if_exists=True,
            max_concurrency=MAX_CONCURRENCY,
            lifetime="detached",  # its creator may exit before its other clients: leases decide when it ends
            **spec.options,
        ).remote(spec, replica)

    def _welcome(self, replica: int, link: _Link, timeout: float) -> None:
        """Wait until a replica is ready, and compare its configuration with this client's."""
        import ray

        try:
            failure, found = ray.get(link.description, timeout=max(timeout, 0.001))
        except ray.exceptions.GetTimeoutError:
            raise self._not_started(replica, link, timeout) from None
        wanted = self.spec.config(replica)
        different = [
            f"{key}: it has {found.get(key)!r}, requested {wanted.get(key)!r}"
            for key in sorted({*wanted, *found})
            if wanted.get(key) != found.get(key)
        ]
        if failure is not None:
            ray.kill(link.handle, no_restart=True)  # useless: free its name
            if different:
                raise ReplicaGone(f"{wanted['name']} of another configuration failed: {failure}")
            raise failure
        if different:
            raise ServiceConfigError(
                f"the name {wanted['name']!r} is in use with another configuration: {'; '.join(different)}. Choose another "
                "name, or shut that service down first."
            )

    def _not_started(self, replica: int, link: _Link, timeout: float) -> ServiceTimeout:
        import ray

        options = self.spec.options
        needed = {"CPU": options.get("num_cpus", 0), "GPU": options.get("num_gpus", 0), **options.get("resources", {})}
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        text = f"replica {self.spec.replica_name(replica)} did not start within {timeout:.3g} s"
        if not any(all(node.get(name, 0) >= amount for name, amount in needed.items()) for node in nodes):
            ray.kill(link.handle, no_restart=True)  # it would wait forever and occupy the name
            return ServiceTimeout(f"{text}: no node of the cluster has {needed}; they have {nodes}.")
        return ServiceTimeout(
            f"{text}. It needs {needed}, the cluster has {ray.available_resources()} free. If the model takes longer to "
            "load, raise timeout=."
        )

    def _is_back(self, replica: int) -> bool:
        import ray

        try:
            link = self._link(replica)
        except ServiceClosedError:
            raise
        except ServiceError:  # only another process can create its model
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
        except Exception:  # its model cannot be created: the other replicas take its share
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


# ------------------------------------------------------------------ leases

_PROCESS = uuid.uuid4().hex[:8]


def client_name() -> str:
    """Name of this process among the clients."""
    return f"{_PROCESS}-{os.getpid()}"


class Leases:
    """The replicas that this process uses; one thread renews the leases of all of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handles: dict[str, Any] = {}
        self._holders: dict[str, int] = {}
        self._lives: dict[str, set[str]] = {}
        # A finalizer may run while this thread holds the lock: only the queue is safe to touch there.
        self.released: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def hold(self, replica: str, handle: Any, *, first: bool) -> None:
        """Register one more object that uses a replica, for the first time or after the replica was created again."""
        with self._lock:
            if first:
                self._holders[replica] = self._holders.get(replica, 0) + 1
            if replica in self._holders:
                self._handles[replica] = handle
            if self._thread is None:
                self._thread = threading.Thread(target=self._beat, name="leases", daemon=True)
                self._thread.start()
                atexit.register(self._release_all)
        self._renew({replica: handle})

    def _release(self, replica: str, *, all_holders: bool = False) -> None:
        """Unregister an object that used a replica; the last one ends the lease."""
        import ray

        with self._lock:
            left = self._holders.get(replica, 0) - 1
            if left > 0 and not all_holders:
                self._holders[replica] = left
                return
            self._holders.pop(replica, None)
            handle = self._handles.pop(replica, None)
        if handle is not None and ray.is_initialized():
            with contextlib.suppress(Exception):  # the replica may be gone
                handle.release.remote(client_name())

    def _release_all(self) -> None:
        for replica in list(self._holders):
            self._release(replica, all_holders=True)

    def _renew(self, handles: Mapping[str, Any]) -> None:
        """Renew leases, and exchange the known incarnation marks with the replicas."""
        import ray

        end = time.monotonic() + LEASE / 4
        answers = {}
        with contextlib.suppress(Exception):
            if ray.is_initialized():
                for replica, handle in handles.items():
                    answers[replica] = handle.hold.remote(client_name(), sorted(self._lives.get(replica, ())))
        for replica, answer in answers.items():
            with contextlib.suppress(Exception):  # dead or busy: the next request will detect it
                lives = ray.get(answer, timeout=max(end - time.monotonic(), 0.001))
                self._lives.setdefault(replica, set()).update(lives)

    def _beat(self) -> None:
        next_beat = time.monotonic() + LEASE / 4
        while True:
            with contextlib.suppress(queue.Empty):
                self._release(self.released.get(timeout=max(next_beat - time.monotonic(), 0.0)))
            if time.monotonic() >= next_beat:
                with self._lock:
                    handles = dict(self._handles)
                self._renew(handles)
                next_beat = time.monotonic() + LEASE / 4


_LEASES = Leases()


def _release(names: list[str]) -> None:
    for name in names:
        _LEASES.released.put(name)
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
    """Whether an actor failed to start because Ray lost its arguments; a client that has them can create it again.

    Ray drops the large arguments of a detached actor (a model given by value) after its first start, so that a restart
    fails: ``ActorDiedError.from_task_error`` then wraps a ``RayTaskError`` whose cause is the error of the lost object.
    """
    from ray import exceptions

    return any(isinstance(getattr(arg, "cause", None), exceptions.ObjectLostError) for arg in error.args)


def _was_shut_down(error: Exception) -> bool:
    """Whether the actor exited through ``exit_actor()``, as :meth:`ScoringActor.close` does.

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
        """Pause before the next try; without time for one raise :class:`ServiceTimeout`, or ``error`` for a full queue."""
        if self._pause > self.left:
            if isinstance(error, ServiceOverloaded):
                raise error
            raise ServiceTimeout(f"{self.what}: no replica came back within {self.timeout:g} s: {error}") from error
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def up(self) -> ServiceTimeout:
        """The error of a missed deadline."""
        return ServiceTimeout(f"{self.what} took more than {self.timeout:g} s. Raise timeout=, or add replicas.")
