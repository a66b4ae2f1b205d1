"""The services that this process uses: one lease and one table for each, renewed by one thread."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import queue
import sys
import threading
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from torchrl_llm_kl.service._errors import ServiceClosedError, ServiceError, ServiceTimeout
from torchrl_llm_kl.service.control._actor import control_of, ended, find_control, whereabouts
from torchrl_llm_kl.service.control._spec import HeldModel, ServiceSpec
from torchrl_llm_kl.service.control._table import Plan, check_expected

_LOG = logging.getLogger("torchrl_llm_kl.service")
_BEAT = 5.0  # seconds between two heartbeats
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 0.5

_PROCESS = uuid.uuid4().hex[:8]
_forked = False


def _note_fork() -> None:
    global _forked
    ray = sys.modules.get("ray")
    _forked = ray is not None and bool(ray.is_initialized())


os.register_at_fork(after_in_child=_note_fork)


def check_not_forked() -> None:
    """A :class:`ServiceError` in a child that was forked from a process with a connection to Ray, where calls would hang."""
    if _forked:
        raise ServiceError(
            f"process {os.getpid()} was forked from one that was connected to Ray, whose connection does not survive a fork: "
            "start it with multiprocessing's 'spawn' or 'forkserver' method, or fork before ray.init()."
        )


def client_name() -> str:
    """Name of this process among the clients."""
    return f"{_PROCESS}-{os.getpid()}"


def session() -> str:
    """Identifies the connection of this process to a cluster; empty without one."""
    import ray

    return f"{cluster()} {ray.get_runtime_context().get_job_id()}" if ray.is_initialized() else ""


def cluster() -> str:
    """Identifies the cluster of this process; empty without one."""
    import ray

    if not ray.is_initialized():
        return ""
    found = getattr(getattr(ray._private.worker.global_worker, "gcs_client", None), "cluster_id", None)
    return f"{ray.get_runtime_context().gcs_address} {found.hex() if found is not None else ''}"


@dataclass(eq=False)
class Member:
    """The lease of this process on one service, and the last table it received."""

    plan: Plan
    cluster: str
    incarnation: int
    table: dict[str, Any] = field(default_factory=dict)
    held: HeldModel | None = None  # the model, if this process passed it by value
    holders: int = 1
    lease: int = 0
    control: Any = None
    session: str = ""


class Memberships:
    """All services of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._members: dict[str, Member] = {}
        self._leases = itertools.count(1)
        # A finalizer may run while this thread holds the lock: only the queue is safe to touch there.
        self.released: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ending = False
        self._next_beat = 0.0

    # ------------------------------------------------------------------ join, look, leave

    def join(self, spec: ServiceSpec, *, new: bool, timeout: float) -> tuple[str, dict[str, Any]]:
        """Take a lease on a service for one more object; creates its control actor if there is none.

        Args:
            spec: the service.
            new: whether a constructor asks.
            timeout: seconds.

        Returns:
            A key for :meth:`table` and :attr:`released`, and the table.
        """
        import ray

        end, pause = time.monotonic() + timeout, _FIRST_PAUSE
        while True:
            check_open(spec)
            control = control_of(spec.plan)
            lease = next(self._leases)
            options = {"config": spec.config(0), "incarnation": spec.incarnation, "new": new, "lease": lease}
            failure: Exception | None = None
            try:
                asked = control.join.remote(client_name(), whereabouts(), **options)
                found = ray.get(asked, timeout=max(end - time.monotonic(), 0.001))
            except ray.exceptions.GetTimeoutError:
                raise ServiceTimeout(
                    f"the control actor of the service {spec.name!r} did not answer within {timeout:g} s: check the cluster."
                ) from None
            except ray.exceptions.RayActorError as error:  # it ends, or restarts
                found, failure = {"ended": "?"}, error
            if isinstance(found, Exception):
                raise found
            if not found["ended"]:
                break
            if time.monotonic() + pause > end:
                raise ServiceTimeout(f"the service {spec.name!r} ends, and did not within {timeout:g} s.") from failure
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        held = spec.make_model if isinstance(spec.make_model, HeldModel) else None
        key = f"{cluster()} {spec.namespace} {spec.name} {found['incarnation']}"
        with self._lock:
            member = self._members.get(key)
            if member is None:
                member = self._members[key] = Member(spec.plan, cluster(), found["incarnation"], holders=0)
            member.holders += 1
            member.lease = max(member.lease, lease)
            member.held = member.held or held
            member.table, member.control, member.session = found, control, session()
            self._start()
        try:
            check_expected(spec.expect, found["fingerprint"] or spec.expect, spec.name)
            if held is not None and not found["has_model"]:
                _deposit(member)
        except BaseException:
            self.released.put(key)
            raise
        return key, found

    def table(self, key: str) -> dict[str, Any]:
        """The last table of a service; empty if this process does not use it."""
        member = self._members.get(key)
        return {} if member is None else member.table

    def control(self, key: str) -> Any | None:
        """The control actor as last seen."""
        member = self._members.get(key)
        return None if member is None else member.control

    def reconnect(self, key: str) -> None:
        """Find the control actor again: a handle ends with its connection."""
        member = self._members.get(key)
        if member is not None and member.session != session():
            member.control, member.session = self._find(member), session()
        self.beat_soon()

    def beat_soon(self) -> None:
        """Ask for new tables within a second."""
        self._next_beat = 0.0

    def release_all(self) -> None:
        """End all leases, at the exit of the process."""
        self._ending = True
        if _forked:
            return
        if self._thread is not None:  # a call to Ray after its shutdown ends the process with an error
            self._thread.join(timeout=_BEAT + 1.0)
        for key in list(self._members):
            self._release(key, all_holders=True)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="leases", daemon=True)
            self._thread.start()
            atexit.register(self.release_all)

    def _release(self, key: str, *, all_holders: bool = False) -> None:
        """Unregister an object that used a service; the last one ends the lease."""
        with self._lock:
            member = self._members.get(key)
            if member is None:
                return
            member.holders -= 1
            if member.holders > 0 and not all_holders:
                return
            del self._members[key]
        with contextlib.suppress(Exception):  # it may be gone, or the connection
            if member.cluster == cluster():
                usable = member.control is not None and member.session == session()
                control = member.control if usable else find_control(member.plan.namespace, member.plan.name)
                if control is not None:
                    control.release.remote(client_name(), member.lease, member.incarnation)

    # ------------------------------------------------------------------ heartbeats

    def _run(self) -> None:
        connected = ""
        while not self._ending:
            with contextlib.suppress(queue.Empty):
                self._release(self.released.get(timeout=0.5))
                continue
            with contextlib.suppress(Exception):  # the connection may end at any time; the next round looks again
                now = session()
                if time.monotonic() >= self._next_beat or now != connected:
                    self._next_beat, connected = time.monotonic() + _BEAT, now
                    self._beat(now)

    def _beat(self, now: str) -> None:
        """Renew every lease of the current cluster, and take the new tables."""
        import ray

        asked: list[tuple[Member, Any]] = []
        where = whereabouts() if now else {}
        for member in list(self._members.values()):
            if not now or member.cluster != cluster() or member.table.get("ended"):
                continue
            if member.control is None or member.session != now:  # a handle dies with its connection
                member.control, member.session = self._find(member), now
            if member.control is not None:
                version = member.table.get("version", 0)
                held = (client_name(), where, version, member.lease, member.incarnation)
                asked.append((member, member.control.hold.remote(*held)))
        end = time.monotonic() + _BEAT
        for member, answer in asked:
            try:
                found = ray.get(answer, timeout=max(end - time.monotonic(), 0.001))
            except ray.exceptions.GetTimeoutError:
                continue
            except Exception:
                member.control = None
                self.beat_soon()
                continue
            if found is None:
                continue
            if found["incarnation"] > member.incarnation:  # this one was shut down: no more heartbeats
                member.table = {**member.table, "ended": found["ended"]}
            elif not found["ended"]:
                member.table = found
                if member.held is not None and not found["has_model"]:
                    _deposit(member)

    def _find(self, member: Member) -> Any | None:
        """The control actor, created again if it was lost while the service goes on."""
        found = find_control(member.plan.namespace, member.plan.name)
        if found is None and ended(member.plan.namespace, member.plan.name) < member.incarnation:
            found = control_of(member.plan)
        return found


MEMBERSHIPS = Memberships()


def check_open(spec: ServiceSpec) -> None:
    """A :class:`ServiceClosedError` if the service was shut down since this client joined it."""
    if 0 < spec.incarnation <= ended(spec.namespace, spec.name):
        raise ServiceClosedError(f"the service {spec.name!r} was shut down.")


def _deposit(member: Member) -> None:
    """Give the control actor a model that was passed by value, so that replicas can start from it again."""
    import ray

    assert member.held is not None
    member.table = {**member.table, "has_model": True}
    packed = ray.cloudpickle.dumps(member.held.model)
    ray.get(member.control.deposit.remote(packed, member.incarnation), timeout=600.0)
