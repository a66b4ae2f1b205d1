"""A client's connection to a service: its lease, the handles of the replicas, and calls that are retried."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torchrl_llm_kl._registry import install_hint
from torchrl_llm_kl._typing import Json
from torchrl_llm_kl.service._actors import actor_of
from torchrl_llm_kl.service._controller import FAILED, READY, SILENT, controller_of
from torchrl_llm_kl.service._errors import (
    ReplicaGone,
    ServiceClosedError,
    ServiceConfigError,
    ServiceError,
    ServiceOverloaded,
    ServiceTimeout,
)
from torchrl_llm_kl.service._spec import ServiceSpec

_LOG = logging.getLogger("torchrl_llm_kl.service")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 0.5
_JOIN = 60.0  # seconds for the controller to answer
_LOOK = 0.3  # seconds between two looks at the controller's table
_ANSWER = 2.0  # seconds for it to answer such a look
_SHUTDOWN = 15.0  # seconds for a service to end by itself


class Connection:
    """The replicas of a service, as one client uses them. It connects on first use.

    Attributes:
        retries: number of calls that were retried after their replica failed.
        newest: latest version of the weights that this client has seen.
    """

    _of_parent: ClassVar[bool] = False  # whether Ray here is connected by a parent process only

    def __init__(self, spec: ServiceSpec, make: Callable[[], Any] | None = None) -> None:
        self.spec, self.make = spec, make  # a factory that only the process which passed it has
        self._lock = threading.RLock()
        self._controller: Any = None
        self._session = self._place = self._closed = ""
        self._down: dict[int, float] = {}  # replicas that did not answer, or were not ready, and when
        self._table: tuple[float, Json] = (0.0, {})  # the last one, and when it came
        self.retries = self.newest = 0
        self._lease: list[Any] = []

    # ------------------------------------------------------------------ the lease

    def check_not_forked(self) -> None:
        """A :class:`ServiceError` in a child that was forked from a connected process, where calls would hang."""
        if Connection._of_parent:
            raise ServiceError(
                f"process {os.getpid()} was forked from one that was connected to Ray, whose connection does not survive a "
                "fork: start it with multiprocessing's 'spawn' or 'forkserver' method, or fork before the service is used."
            )

    def connect(self, *, new: bool = False, timeout: float = _JOIN) -> None:
        """Join a cluster if this process is part of none, then the service; again after ``ray.shutdown()``."""
        self.check_not_forked()
        if self._closed:
            raise ServiceClosedError(self._closed)
        try:
            import ray
        except ImportError as error:
            raise ImportError(f"a service needs Ray: {install_hint('ray')}.") from error
        if self._session and self._session == _session():
            return
        with self._lock:
            if self._session and self._session == _session():  # another thread was first
                return
            if not ray.is_initialized():
                ray.init(self.spec.address, log_to_driver=False)
            context = ray.get_runtime_context()
            place = f"{context.gcs_address} {context.get_node_id()}"
            if self._place not in ("", place):  # another cluster: the service is made again there
                self.newest, self.spec = 0, replace(self.spec, id="")
                new = self.spec.factory is not None or self.make is not None
            self.spec = replace(self.spec, address=context.gcs_address)
            self._enter(new=new, timeout=timeout)
            self._place, self._session = place, _session()

    def _enter(self, *, new: bool, timeout: float) -> None:
        patience, key = Patience(timeout, f"joining the service {self.spec.name!r}"), uuid.uuid4().hex
        while True:
            controller: Any = controller_of(self._named()) if new else actor_of(self.spec, "control")
            found: Any = None if controller is None else self._ask_to_join(controller, patience, key, new=new)
            if isinstance(found, ServiceConfigError) or (isinstance(found, Exception) and not new):
                raise found
            if controller is not None and not isinstance(found, Exception) and not found["ended"]:
                break
            if not new:
                self.close(f"the service {self.spec.name!r} was shut down, or ended with its last client.")
                raise ServiceClosedError(self._closed)
            patience.rest(found if isinstance(found, Exception) else ServiceError("the last service of that name ends"))
        self._lease.clear()  # of a connection that ended
        held = controller.hold.remote(key)
        self._lease = [held, controller.watch.remote(key, [held])]
        weakref.finalize(self, _forget, self._lease).atexit = False  # Ray tells of the end of a process
        self._controller = controller
        self._down = {i: 0.0 for i, state in enumerate(found["states"]) if state != READY}
        self._table = (time.monotonic(), found)
        self.spec = replace(self.spec, id=found["id"])
        if not found["has_model"]:
            self._hand_in()

    def _named(self) -> ServiceSpec:
        return replace(self.spec, id=self.spec.id or uuid.uuid4().hex)

    def _ask_to_join(self, controller: Any, patience: Patience, key: str, *, new: bool) -> Any:
        import ray

        try:
            asked = controller.join.remote(self.spec.config, "" if new else self.spec.id, new=new, client=key)
            return ray.get(asked, timeout=patience.left)
        except ray.exceptions.GetTimeoutError:
            raise ServiceTimeout(
                f"the controller of the service {self.spec.name!r} did not answer within {patience.timeout:g} s: check the "
                "cluster."
            ) from None
        except ray.exceptions.RayActorError as error:  # it ended just now
            return ServiceClosedError(f"the service {self.spec.name!r} ended: {error}")

    def _hand_in(self) -> None:
        """Give the controller the factory that is not part of the spec, so that replicas can start from it."""
        if self.make is not None:
            import ray

            ray.get(self._controller.deposit.remote(ray.cloudpickle.dumps(self.make)), timeout=600.0)

    def close(self, why: str) -> None:
        """Stop using the service; later calls raise :class:`ServiceClosedError` with this text."""
        self._closed = self._closed or why  # handles stay, for calls in other threads
        _release(self._lease)

    def end(self) -> None:
        """End the service for all clients, for good. A later service of the same name is left alone."""
        import ray

        try:
            self.connect()
        except ServiceClosedError:
            return
        spec, controller, handles = self.spec, self._controller, self._table[1]["replicas"]
        ending = controller.end.remote()
        if not ray.wait([ending], timeout=_SHUTDOWN)[0]:  # its process is stopped, or a node is out of reach
            keeper = actor_of(spec, "weights")
            for handle in (controller, *handles, *([] if keeper is None else [keeper])):
                ray.kill(handle, no_restart=True)
        gone = time.monotonic() + _ANSWER
        while actor_of(spec, "control") is not None and time.monotonic() < gone:  # its name is free then
            time.sleep(0.02)
        self.close(f"the service {spec.name!r} was shut down.")

    # ------------------------------------------------------------------ which replicas

    def table(self, *, timeout: float = _ANSWER) -> Json:
        """The controller's table, a fraction of a second old at most; an older one if it does not answer.

        Raises :class:`ServiceClosedError` if the service has ended.
        """
        import ray

        self.connect()
        seen, found = self._table
        if time.monotonic() - seen > _LOOK:
            try:
                found = ray.get(self._controller.table.remote(), timeout=timeout)
                self._table = (time.monotonic(), found)
            except ray.exceptions.GetTimeoutError:
                self._table = (time.monotonic(), found)
            except ray.exceptions.ActorDiedError as error:
                self.close(f"the service {self.spec.name!r} was shut down, or ended with its last client.")
                raise ServiceClosedError(self._closed) from error
            except ray.exceptions.RayActorError:
                pass  # it is started again
            if not found["has_model"]:
                self._hand_in()
        if found["ended"]:
            self.close(f"the service {self.spec.name!r} was shut down.")
            raise ServiceClosedError(self._closed)
        return found

    def usable(self) -> list[int]:
        """The replicas that are not down; all of them if all are. Raises the error of a model that no replica has."""
        self.connect()
        everyone = range(self.spec.num_replicas)
        if self._down:
            table, now = self.table(), time.monotonic()
            if all(state == FAILED for state in table["states"]):
                # Later calls find them started again, in a table that is asked for anew.
                self._controller.join.remote(self.spec.config, self.spec.id, new=True)
                self._table = (0.0, table)
                raise table["errors"][0]
            for replica, since in list(self._down.items()):
                if table["states"][replica] == READY and now - since > _LOOK:
                    self._down.pop(replica, None)
        return [replica for replica in everyone if replica not in self._down] or list(everyone)

    def is_away(self, replica: int) -> bool:
        """Whether the controller says that a replica failed, or does not answer or has no model yet where others may."""
        states = self.table()["states"]
        state, several = states[replica], len(states) > 1
        return state == FAILED or (several and state == SILENT) or (state != READY and READY in states)

    @property
    def handles(self) -> list[Any]:
        """The actors of the replicas."""
        found: list[Any] = self._table[1]["replicas"]
        return found

    def lose(self, replica: int) -> None:
        """Avoid a replica whose call failed until the controller says that it is ready."""
        self.retries += 1
        self._down[replica] = time.monotonic()

    def saw(self, version: int) -> None:
        """Note a version of the weights."""
        with self._lock:
            self.newest = max(self.newest, version)

    # ------------------------------------------------------------------ calls

    def call(self, method: str, *args: Any, timeout: float) -> Any:
        """Call a method of any one replica, with retries until the timeout."""
        patience = Patience(timeout, f"{method}() of the service {self.spec.name!r}")
        while True:
            replica = self.usable()[0]
            found = self.gather(method, *args, replicas=[replica], timeout=patience.left, give_up=True)[replica]
            if not isinstance(found, failures()):
                if isinstance(found, Exception):
                    raise found
                return found
            self.lose(replica)
            patience.rest(found)

    def gather(
        self,
        method: str,
        *args: Any,
        replicas: Sequence[int],
        timeout: float,
        wait: float | None = None,
        needed: Sequence[int] | None = None,
        give_up: bool = False,
    ) -> dict[int, Any]:
        """What a method of several replicas returns, all at once; an exception for one that does not answer in time.

        Args:
            method: of the replica's :class:`Server`.
            args: its arguments.

        Keyword Args:
            replicas: numbers.
            timeout: seconds.
            wait: seconds to wait for others once one has returned; None for ``timeout``.
            needed: those to wait for; all of them by default.
            give_up: whether a replica that is down is an error at once; otherwise it is asked again.
        """
        import ray

        self.connect()
        name, end = self.spec.replica_name, time.monotonic() + timeout
        asked = {self.handles[i].call.remote(method, *args): i for i in replicas}
        found: dict[int, Any] = {}
        last: dict[int, Exception] = {}
        missing = set(replicas if needed is None else needed)
        while missing - found.keys() and asked and time.monotonic() < end:
            done, _ = ray.wait(list(asked), timeout=min(0.5, max(end - time.monotonic(), 0.001)))
            for reference in done:
                i = asked.pop(reference)
                try:
                    answer = ray.get(reference)
                except failures() as error:
                    answer = error
                if isinstance(answer, failures()) and not give_up:
                    last[i] = answer
                    time.sleep(_FIRST_PAUSE)
                    asked[self.handles[i].call.remote(method, *args)] = i
                    continue
                found[i] = answer
                if wait is not None and not isinstance(answer, Exception):
                    end = min(end, time.monotonic() + wait)
            if asked:
                states = self.table()["states"]
                for i in [i for i in asked.values() if states[i] in (SILENT, FAILED)]:
                    found[i] = ServiceTimeout(f"replica {name(i)} hangs: its process or node does not answer.")
                asked = {reference: i for reference, i in asked.items() if i not in found}
        for i in asked.values():
            why = f": {last[i]}" if i in last else ""
            found.setdefault(i, ServiceTimeout(f"replica {name(i)} did not answer within {timeout:.3g} s{why}"))
        return found

    # ------------------------------------------------------------------ the start

    def open(self, *, timeout: float) -> None:
        """Join for a constructor, and wait for the replicas: all of a new service, one of a service that others use.

        Raises the error of the factory, or says what keeps the replicas from starting.
        """
        self.connect(new=True, timeout=max(timeout, _JOIN))
        patience = Patience(timeout, f"the start of {self.spec.name!r}")
        in_use, next_look = READY in self.table()["states"], time.monotonic() + 1.0
        while True:
            table = self.table()
            states: list[str] = table["states"]
            ready, failed = states.count(READY), [error for error in table["errors"] if error is not None]
            if failed and (not in_use or len(failed) == len(states)):
                raise failed[0]
            if ready + len(failed) == len(states) or (in_use and ready):
                break
            if patience.left <= 0.001:
                why = (
                    f"did not start within {timeout:.3g} s{_lacks(self.spec, states)}: raise timeout= for a slow model."
                )
                raise ServiceTimeout(f"the service {self.spec.name!r} {why}")
            if time.monotonic() >= next_look and (why := _lacks(self.spec, states)):
                _LOG.warning("the service %s%s", self.spec.name, why)
                next_look = time.monotonic() + 30.0
            time.sleep(0.1)


def _after_fork() -> None:
    """Runs in each forked child: Ray counts as connected there if the parent was, and every call would hang."""
    ray = sys.modules.get("ray")
    Connection._of_parent = ray is not None and ray.is_initialized()


os.register_at_fork(after_in_child=_after_fork)


def _session() -> str:
    """Identifies the connection of this process to a cluster; empty without one."""
    import ray

    if not ray.is_initialized():
        return ""
    context = ray.get_runtime_context()
    return f"{context.gcs_address} {context.get_job_id()} {context.get_worker_id()}"


def _release(lease: list[Any]) -> None:
    """Cancel the call that a client holds."""
    held = lease[:1]
    lease.clear()
    if held:
        import ray

        if ray.is_initialized():
            ray.cancel(held[0])


def _forget(lease: list[Any]) -> None:
    """:func:`_release` in a thread: an object may be freed in the midst of anything."""
    if lease:
        threading.Thread(target=_release, args=(lease,), name="release", daemon=True).start()


def _lacks(spec: ServiceSpec, states: Sequence[str]) -> str:
    """What a replica without a process waits for; empty if none does, or a node has what it needs."""
    import ray

    options = spec.options
    needed = {"CPU": options.get("num_cpus", 0), "GPU": options.get("num_gpus", 0), **options.get("resources", {})}
    waiting = [spec.replica_name(i) for i, state in enumerate(states) if state == "pending"]
    total, free = ray.cluster_resources(), ray.available_resources()
    if not waiting or all(free.get(name, 0) >= amount for name, amount in needed.items()):
        return ""
    has = ", ".join(
        f"{name}: {amount:g} requested, {total.get(name, 0):g} in the cluster, {free.get(name, 0):g} free"
        for name, amount in needed.items()
        if amount
    )
    return f": replica {waiting[0]} waits ({has}); free some, or add a node"


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
