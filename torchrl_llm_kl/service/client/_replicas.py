"""A client's view of the replicas: created or found on first use, and found again after a failure."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from torchrl_llm_kl.service._errors import (
    ReplicaGone,
    ServiceClosedError,
    ServiceConfigError,
    ServiceError,
    ServiceOverloaded,
    ServiceTimeout,
    WeightVersionError,
)
from torchrl_llm_kl.service.control._actor import mark_ended, newest_incarnation
from torchrl_llm_kl.service.control._membership import (
    MEMBERSHIPS,
    check_not_forked,
    check_open,
    cluster,
    session,
)
from torchrl_llm_kl.service.control._spec import ServiceSpec
from torchrl_llm_kl.service.control._table import (
    BACKING_OFF,
    DRAINING,
    FAILED,
    HUNG,
    READY,
    check_expected,
    compare,
)

_LOG = logging.getLogger("torchrl_llm_kl.service")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 0.5
_AVOIDED = (HUNG, BACKING_OFF, FAILED)
_JOIN = 60.0  # seconds for the control actor to answer
_LOOK = 1.0  # seconds between two looks for a replica that is gone


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
        self._lock = threading.RLock()
        self._links: dict[int, _Link] = {}
        self._lost: set[int] = set()
        self._looked: dict[int, float] = {}  # when a lost replica was last looked for
        self._closed = ""
        self.retries = self.newest = 0
        self._weights = ""  # digest of the push that made the newest version; empty if it is not known
        self._session = self._cluster = ""
        self._key: list[str] = []  # of the membership, at most one
        self._finalizer = weakref.finalize(self, _release, MEMBERSHIPS.released, self._key)

    # ------------------------------------------------------------------ membership

    @property
    def table(self) -> dict[str, Any]:
        """The control actor's table as this process knows it; empty before the first use."""
        return MEMBERSHIPS.table(self._key[0]) if self._key else {}

    @property
    def active(self) -> list[int]:
        """The replicas that the service has now; fewer than ``spec.num_replicas`` if it was scaled down."""
        return list(range(int(self.table.get("scale", self.spec.plan.least))))

    def control(self, method: str, *args: Any, timeout: float) -> Any:
        """Call the control actor, with retries while it restarts."""
        import ray

        patience = Patience(timeout, f"{method}() of the control actor of {self.spec.name!r}")
        while True:
            self._join(timeout=patience.left)
            try:
                answer = getattr(MEMBERSHIPS.control(self._key[0]), method).remote(*args)
                found = ray.get(answer, timeout=patience.left)
            except ray.exceptions.GetTimeoutError:
                raise patience.up() from None
            except (AttributeError, ray.exceptions.RayActorError) as error:  # none, or one that restarts
                MEMBERSHIPS.beat_soon()
                patience.rest(error)
                continue
            if isinstance(found, Exception):
                raise found
            return found

    def saw(self, version: int, weights: str = "") -> None:
        """Note a version of the weights, and the digest of its push; a WeightVersionError for two of one version."""
        with self._lock:
            if version > self.newest:
                self.newest, self._weights = version, weights
            elif version == self.newest and weights and weights != self._weights:
                if self._weights:
                    raise WeightVersionError(
                        f"version {version} of the weights is {weights} in one replica of {self.spec.name!r}, and "
                        f"{self._weights} was seen before, which are other ones: push all weights under a new version."
                    )
                self._weights = weights

    def quarantine(self, digest: str) -> None:
        """Tell all replicas and clients about a request that ends the process that scores it."""
        control = MEMBERSHIPS.control(self._key[0]) if self._key else None
        if control is not None:
            with contextlib.suppress(Exception):  # the request fails here in any case
                control.quarantine.remote([digest])

    def _join(self, *, timeout: float, new: bool = False) -> None:
        """Join a cluster if this process is part of none, then the service; drop handles of earlier connections."""
        check_not_forked()
        if self._closed:
            raise ServiceClosedError(self._closed)
        try:
            import ray
        except ImportError as error:
            raise ImportError("a service needs Ray: pip install 'torchrl-llm-kl[ray]'.") from error
        if self._session and self._session == session():
            return

        with self._lock:
            if self._session and self._session == session():  # another thread was first
                return
            if not ray.is_initialized():
                ray.init(self.spec.address, log_to_driver=False)
            self._links.clear()
            self._lost.clear()
            elsewhere = self._cluster not in ("", cluster())
            if elsewhere:
                self.newest, self._weights, self.spec = 0, "", replace(self.spec, incarnation=0)
            if self._key and elsewhere:
                _release(MEMBERSHIPS.released, self._key)
            self.spec = replace(self.spec, address=ray.get_runtime_context().gcs_address)
            if not self._key:
                self._enter(timeout=timeout, new=new)
            else:
                MEMBERSHIPS.reconnect(self._key[0])
            self._cluster, self._session = cluster(), session()

    def _enter(self, *, timeout: float, new: bool) -> None:
        try:
            key, table = MEMBERSHIPS.join(self.spec, new=new, timeout=timeout)
        except ServiceClosedError as error:
            self.close(str(error))
            raise
        self._key.append(key)
        self.spec = replace(self.spec, incarnation=table["incarnation"])

    def open(self, *, timeout: float) -> bool:
        """Join for a constructor, and wait for the replicas: all of a new service, one of a service that others use.

        Returns whether others use it. Raises the error of the factory, or says what keeps the replicas from starting.
        """
        self._join(timeout=max(timeout, _JOIN), new=True)
        import ray

        patience = Patience(timeout, f"the start of {self.spec.name!r}")
        in_use = READY in self.table.get("states", {}).values()
        waiting, errors = set(self.active), list[Exception]()
        watch = _StartWatch(self.spec)
        while waiting:
            for replica in sorted(waiting):
                error = self._look_at(replica, patience)
                if isinstance(error, (ServiceConfigError, ServiceClosedError)) or (error is not None and not in_use):
                    raise error
                if error is not None:
                    errors.append(error)
                link = self._links.get(replica)
                if error is not None or (link is not None and link.welcomed):
                    waiting.discard(replica)
            ready = len(self.active) - len(waiting) - len(errors)
            if not waiting or (in_use and ready > 0):
                break
            if patience.left <= 0.001:
                raise self._not_started(watch, timeout)
            descriptions = [self._links[replica].description for replica in waiting if replica in self._links]
            ray.wait(descriptions, timeout=0.2) if descriptions else time.sleep(0.2)
            watch.look(self._links)
        if errors and len(errors) == len(self.active):
            raise errors[0]
        return in_use

    def _look_at(self, replica: int, patience: Patience) -> Exception | None:
        """Welcome a replica if it is ready; the error for which it will never be."""
        import ray

        try:
            if ray.wait([self._link(replica).description], timeout=0)[0]:
                self.handle(replica, timeout=patience.left)
        except failures() as failure:
            try:
                self.lose(replica, failure)
            except Exception as error:
                return error
        except Exception as error:
            return error
        return None

    def end(self, *, timeout: float = 10.0) -> None:
        """End the service for all clients, for good. A later service of the same name is left alone."""
        import ray

        with contextlib.suppress(ServiceClosedError):
            self._join(timeout=timeout)
        spec = self.spec
        if 0 < spec.incarnation < newest_incarnation(spec.namespace, spec.name):
            self.close(f"the service {spec.name!r} was shut down.")
            return
        mark_ended(spec.namespace, spec.name, spec.incarnation)
        handles = []
        for name in spec.replica_names:
            with contextlib.suppress(ValueError):
                handles.append(ray.get_actor(name, namespace=spec.namespace))
        closing = [handle.close.remote() for handle in handles]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=timeout)
        for name in (*spec.replica_names, f"{spec.name}:weights", f"{spec.name}:control"):
            with contextlib.suppress(ValueError, ray.exceptions.RayError):
                ray.kill(ray.get_actor(name, namespace=spec.namespace), no_restart=True)
        self.close(f"the service {spec.name!r} was shut down.")

    def close(self, why: str) -> None:
        """Stop using the service; later calls raise :class:`ServiceClosedError` with this text."""
        self._closed = self._closed or why
        self._finalizer()
        self._links.clear()

    # ------------------------------------------------------------------ calls

    def start(self) -> None:
        """Start creating missing replicas, all at once."""
        self._join(timeout=_JOIN)
        for replica in self.active:
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
            with self._lock:
                link.welcomed = True
                self._lost.discard(replica)
        return link.handle

    def choose(self, order: Sequence[int]) -> int:
        """The first replica of ``order`` that is not down; the very first active one if all are."""
        active = self._active(order)
        return next((replica for replica in active if self._usable(replica, active)), active[0])

    def usable(self) -> list[int]:
        """Active replicas that are not down; all of them if all are."""
        active = self._active(range(self.spec.num_replicas))
        return [replica for replica in active if self._usable(replica, active)] or active

    def _active(self, order: Sequence[int]) -> list[int]:
        scale = self.table.get("scale", self.spec.num_replicas)
        return [replica for replica in order if replica < scale] or list(order)

    def _usable(self, replica: int, active: Sequence[int]) -> bool:
        if len(active) > 1 and self.table.get("states", {}).get(replica) in _AVOIDED:
            return False
        return replica not in self._lost or self._is_back(replica)

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
            del failure  # its traceback holds this frame, and the frame this object

    def ask_all(self, method: str, *, timeout: float) -> dict[int, Any]:
        """What the method of each active replica returns, all at once; an exception for one that does not answer.

        One that the control actor takes for hung is not waited for.
        """
        self._join(timeout=timeout)
        active = self.active

        def ask(replica: int) -> Any:
            try:
                return self._ask(replica, method, timeout)
            except Exception as error:
                return error

        with ThreadPoolExecutor(len(active)) as pool:
            return dict(zip(active, pool.map(ask, active), strict=True))

    def _ask(self, replica: int, method: str, timeout: float) -> Any:
        import ray

        name = self.spec.replica_name(replica)
        patience = Patience(timeout, f"{method}() of replica {name}")
        while True:
            try:
                answer = getattr(self._link(replica).handle, method).remote()
                while not ray.wait([answer], timeout=min(0.5, patience.left))[0]:
                    if patience.left <= 0.001:
                        raise patience.up()
                    if self.table.get("states", {}).get(replica) == HUNG:
                        raise ServiceTimeout(f"replica {name} hangs: its process or node does not answer.")
                    MEMBERSHIPS.beat_soon()
                return ray.get(answer)
            except failures() as error:
                failure = error
            self.lose(replica, failure)
            patience.rest(failure)
            del failure  # its traceback holds this frame, and the frame this object

    def lose(self, replica: int, error: Exception) -> None:
        """Drop a replica whose call failed with one of :func:`failures`, so that the next call looks for it again.

        Raises instead if the service was shut down, or if the replica could not start.
        """
        # It failed before it called the factory, and would fail again.
        if getattr(error, "actor_init_failed", False) and not _lost_arguments(error):
            raise ServiceError(f"replica {self.spec.replica_name(replica)} cannot start: {error}") from error
        try:
            check_open(self.spec)
        except ServiceClosedError as closed:
            self.close(str(closed))
            raise closed from error
        with self._lock:
            self.retries += 1
            link = self._links.get(replica)
            self._lost.add(replica)
        MEMBERSHIPS.beat_soon()
        if link is not None:
            self._drop(replica, link)

    # ------------------------------------------------------------------ links

    def _link(self, replica: int) -> _Link:
        self._join(timeout=_JOIN)
        with self._lock:
            if replica not in self._links:
                handle = self._create_or_find(replica)
                self._links[replica] = _Link(handle, handle.describe.remote())
            return self._links[replica]

    def _create_or_find(self, replica: int) -> Any:
        """Any number of processes may call this at once: Ray creates one actor per name."""
        import ray

        from torchrl_llm_kl.service.replica._actor import MAX_CONCURRENCY, ScoringActor

        spec, name = self.spec, self.spec.replica_name(replica)
        self._looked[replica] = time.monotonic()
        with contextlib.suppress(ValueError):
            return ray.get_actor(name, namespace=spec.namespace)
        check_open(spec)
        if replica not in self.active or self.table.get("states", {}).get(replica) == DRAINING:
            raise ReplicaGone(f"replica {name} is not needed now")
        remote: Any = ray.remote(ScoringActor)
        return remote.options(
            name=name,
            namespace=spec.namespace,
            get_if_exists=True,
            max_concurrency=MAX_CONCURRENCY,
            lifetime="detached",  # its creator may exit before its other clients: their leases decide when it ends
            **spec.options,
        ).remote(spec.for_others(), replica)

    def _welcome(self, replica: int, link: _Link, timeout: float) -> None:
        """Wait until a replica is ready, and compare its configuration with this client's."""
        import ray

        try:
            found = ray.get(link.description, timeout=max(timeout, 0.001))
        except ray.exceptions.GetTimeoutError:
            raise self._not_started(_StartWatch(self.spec), timeout) from None
        name, failure = self.spec.replica_name(replica), found["failure"]
        different = compare(found["config"], self.spec.config(replica))
        if failure is not None:
            self._free(replica, link)
            if different:
                raise ReplicaGone(f"{name} of another configuration failed: {failure}")
            raise failure
        if different:
            raise ServiceConfigError(
                f"the name {name!r} is in use with another configuration: {'; '.join(different)}. Choose another name, or "
                "shut that service down first."
            )
        check_expected(self.spec.expect, found["fingerprint"], self.spec.name)

    def _free(self, replica: int, link: _Link) -> None:
        """End an actor that cannot be used, so that its name is free."""
        import ray

        ray.kill(link.handle, no_restart=True)
        control = MEMBERSHIPS.control(self._key[0]) if self._key else None
        if control is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(control.freed.remote(replica), timeout=5.0)

    def _not_started(self, watch: _StartWatch, timeout: float) -> ServiceTimeout:
        text = f"the service {self.spec.name!r} did not start within {timeout:.3g} s"
        for replica, why, hopeless in watch.missing(self._links, at_once=True):
            if hopeless:  # it would wait forever
                self._free(replica, self._links[replica])
            return ServiceTimeout(f"{text}: replica {self.spec.replica_name(replica)} waits: {why}.")
        return ServiceTimeout(f"{text}. If the model takes longer to load, raise timeout=.")

    def _is_back(self, replica: int) -> bool:
        import ray

        if replica not in self._links and time.monotonic() - self._looked.get(replica, 0.0) < _LOOK:
            return False
        try:
            link = self._link(replica)
        except ServiceClosedError:
            raise
        except (ServiceError, ReplicaGone):
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


def _release(released: queue.SimpleQueue[str], keys: list[str]) -> None:
    for key in keys:
        released.put(key)
    keys.clear()


# ------------------------------------------------------------------ replicas that do not start


class _StartWatch:
    """Says which resource replicas wait for."""

    def __init__(self, spec: ServiceSpec) -> None:
        given = {"CPU": spec.options.get("num_cpus", 0), "GPU": spec.options.get("num_gpus", 0)}
        given |= spec.options.get("resources", {})
        self._spec, self._needed = spec, {name: amount for name, amount in given.items() if amount}
        self._began, self._next_look = time.monotonic(), 0.0

    def look(self, links: dict[int, _Link]) -> None:
        """Log what is missing: at once if no node has it, else after three seconds; again every 30 s."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + 1.0
        for replica, why, _ in self.missing(links):
            _LOG.warning("replica %s waits: %s", self._spec.replica_name(replica), why)
            self._next_look = time.monotonic() + 30.0

    def missing(self, links: dict[int, _Link], *, at_once: bool = False) -> Iterator[tuple[int, str, bool]]:
        """Replicas without a process, what they wait for, and whether no node has it at all."""
        import ray
        from ray._private.state import actors, available_resources_per_node

        def fits(nodes: Iterable[Mapping[str, float]]) -> bool:
            return any(all(node.get(name, 0) >= amount for name, amount in self._needed.items()) for node in nodes)

        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        possible = fits(nodes)
        if possible and not at_once and time.monotonic() - self._began < 3.0:
            return
        for replica, link in list(links.items()):
            if link.welcomed or actors(link.handle._actor_id.hex()).get("Pid"):
                continue
            total, free = ray.cluster_resources(), ray.available_resources()
            has = ", ".join(
                f"{name}: {amount:g} requested, {total.get(name, 0):g} in the cluster, {free.get(name, 0):g} free"
                for name, amount in self._needed.items()
            )
            if not possible:
                yield replica, f"no node of the cluster has {self._needed} ({has}); they have {nodes}", True
            elif not fits(available_resources_per_node().values()):
                yield replica, f"no node has {self._needed} free ({has}); free some, or add a node", False


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
