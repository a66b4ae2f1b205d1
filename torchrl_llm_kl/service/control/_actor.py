"""The control actor of a service, and how clients and replicas find it. Imports no torch, so that it starts fast."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchrl_llm_kl.service._errors import portable
from torchrl_llm_kl.service.control._table import FAILED, Control, Plan, Scaling, Start

_LOG = logging.getLogger("torchrl_llm_kl.service")
_PULSE = 1.0  # seconds between two pulses of a replica
_LOOK = 3.0  # seconds between two looks into Ray's tables for the end of silent clients


class ControlActor:
    """Owns the table of a service. Ray restarts it; it then learns the table from the replicas and its clients."""

    def __init__(self, plan: Plan, scaling: Scaling | None = None) -> None:
        self._plan, self._lock = plan, threading.RLock()
        kept = _kept(plan.namespace, plan.name)
        incarnation = max(int(kept.get("incarnation", 1)), ended(plan.namespace, plan.name) + 1)
        self._control = Control(plan, incarnation=incarnation, scaling=scaling)
        self._control.version = time.time_ns()  # not one that a client has of a table that was lost
        self._saved = kept
        self._model: Any = None  # reference to the packed model given by value
        self._handles: dict[int, Any] = {}
        self._pulses: dict[int, Any] = {}
        self._looked = time.monotonic()
        self._rebuild()
        threading.Thread(target=self._run, name="control", daemon=True).start()

    # ------------------------------------------------------------------ for clients

    def join(self, *args: Any, **kwargs: Any) -> dict[str, Any] | Exception:
        """See :meth:`Control.join`; errors are returned."""
        return self._ask(lambda control: control.join(*args, **kwargs))

    def hold(
        self, client: str, where: Mapping[str, Any], version: int, lease: int, incarnation: int
    ) -> dict[str, Any] | None:
        """See :meth:`Control.hold`."""
        with self._lock:
            return self._control.hold(client, where, version, lease, incarnation)

    def release(self, client: str, lease: int, incarnation: int) -> None:
        """See :meth:`Control.release`."""
        with self._lock:
            self._control.release(client, lease, incarnation)

    def table(self) -> dict[str, Any]:
        """See :meth:`Control.table`."""
        with self._lock:
            return self._control.table()

    def quarantine(self, digests: Sequence[str]) -> None:
        """See :meth:`Control.quarantine`."""
        with self._lock:
            self._control.quarantine(digests)

    def deposit(self, packed: bytes, incarnation: int) -> None:
        """Keep a model given by value, from which any replica can start again, unless it is an earlier incarnation's."""
        import ray

        kept = ray.put(packed)
        with self._lock:
            if self._control.serves(incarnation):
                self._model, self._control.has_model = kept, True
                self._control.version += 1

    def model(self) -> list[Any]:
        """The reference of the kept model; empty if there is none."""
        return [self._model] if self._control.has_model else []

    def freed(self, replica: int) -> None:
        """A client killed a replica that could not start."""
        with self._lock:
            self._control.freed(replica)

    # ------------------------------------------------------------------ for replicas

    def starting(self, replica: int, life: str) -> Start:
        """See :meth:`Control.starting`."""
        with self._lock:
            return self._control.starting(replica, life)

    def failed(self, replica: int, life: str, text: str) -> None:
        """See :meth:`Control.failed`."""
        with self._lock:
            self._control.failed(replica, life, text)

    def ready(self, replica: int, life: str, facts: Mapping[str, Any]) -> str:
        """See :meth:`Control.ready`."""
        with self._lock:
            return self._control.ready(replica, life, facts)

    # ------------------------------------------------------------------ supervision

    def _ask(self, call: Callable[[Control], Any]) -> Any:
        with self._lock:
            try:
                found = call(self._control)
            except Exception as error:
                return portable(error)
            self._save()
            return found

    def _save(self) -> None:
        """Keep what the replicas do not know in the cluster's store."""
        state = {"incarnation": self._control.incarnation}
        if state != self._saved:
            _put(self._plan.namespace, self._plan.name, "state", json.dumps(state))
            self._saved = state

    def _rebuild(self) -> None:
        """Ask the replicas that exist, if there are any, for up to five seconds."""
        import ray

        for replica in self._control.slots:
            self._send_pulse(replica)
        if self._pulses:
            ray.wait(list(self._pulses.values()), num_returns=len(self._pulses), timeout=5.0)
            self._collect()

    def _run(self) -> None:
        while True:
            try:
                if self._step():
                    return
            except Exception:  # the cluster may be going down; the next step tries again
                _LOG.exception("the control actor of %s goes on", self._plan.name)
            time.sleep(_PULSE)

    def _step(self) -> bool:
        """Send and collect pulses, and do what is due; True after the end."""
        import ray

        with self._lock:
            silent = self._control.silent_clients()
        gone: list[str] = []
        if silent and time.monotonic() - self._looked > _LOOK:
            self._looked, gone = time.monotonic(), gone_clients(silent)
        for replica in self._control.slots:
            if replica not in self._pulses:
                self._send_pulse(replica)
        self._collect()
        with self._lock:
            unheard = self._control.unheard()
        constructed = [replica for replica in unheard if is_constructed(self._handles.get(replica))]
        with self._lock:
            for replica in constructed:
                self._control.stopped(replica)
            todo = self._control.tick(gone)
            self._save()
        for what, replica in todo:
            if what == "end":
                self._end()
                return True
            handle = self._handles.pop(replica, None)
            self._pulses.pop(replica, None)
            _LOG.warning("the control actor of %s: %s replica %d", self._plan.name, what, replica)
            if handle is not None:
                ray.kill(handle, no_restart=what == "retire")
            if what == "retire":
                with self._lock:
                    self._control.retired(replica)
        return False

    def _send_pulse(self, replica: int) -> None:
        import ray

        slot = self._control.slots[replica]
        if replica not in self._handles:
            try:
                name = f"{self._plan.name}:{replica}"
                self._handles[replica] = ray.get_actor(name, namespace=self._plan.namespace)
            except ValueError:
                with self._lock:
                    self._control.freed(replica)
                return
            with self._lock:
                self._control.found(replica)
        news = {"clients": len(self._control.clients), "quarantined": list(self._control.quarantined)}
        if slot.state != FAILED or not slot.facts.get("failed"):
            self._pulses[replica] = self._handles[replica].pulse.remote(news)
            with self._lock:
                self._control.asked(replica)

    def _collect(self) -> None:
        import ray

        for replica, answer in list(self._pulses.items()):
            if not ray.wait([answer], timeout=0)[0]:
                continue
            del self._pulses[replica]
            try:
                facts = ray.get(answer)
            except Exception:  # it is dead, or about to restart
                self._handles.pop(replica, None)
                with self._lock:
                    self._control.lost(replica)
            else:
                with self._lock:
                    self._control.pulse(replica, facts)

    def _end(self) -> None:
        """End the replicas, the kept weights and this actor."""
        import ray

        _LOG.info("the service %s ends: %s", self._plan.name, self._control.ended)
        names = [f"{self._plan.name}:{replica}" for replica in self._control.slots]
        for name in (*names, f"{self._plan.name}:weights"):
            with contextlib.suppress(ValueError, ray.exceptions.RayError):
                ray.kill(ray.get_actor(name, namespace=self._plan.namespace), no_restart=True)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def control_of(plan: Plan, scaling: Scaling | None = None) -> Any:
    """The control actor of a service, created if there is none; atomic across processes."""
    import ray

    remote: Any = ray.remote(ControlActor)
    return remote.options(
        name=f"{plan.name}:control",
        namespace=plan.namespace,
        get_if_exists=True,
        lifetime="detached",
        num_cpus=0,
        max_restarts=-1,
        max_concurrency=16,
    ).remote(plan, scaling)


def find_control(namespace: str, name: str) -> Any | None:
    """The control actor if there is one."""
    import ray

    try:
        return ray.get_actor(f"{name}:control", namespace=namespace)
    except ValueError:
        return None


# ------------------------------------------------------------------ what outlives the actor: a few bytes in the GCS


def ended(namespace: str, name: str) -> int:
    """The last incarnation of a service that was shut down; 0 if none was."""
    return int(_get(namespace, name, "ended") or 0)


def mark_ended(namespace: str, name: str, incarnation: int) -> None:
    """Record that an incarnation was shut down, so that nobody makes it again."""
    if incarnation > ended(namespace, name):
        _put(namespace, name, "ended", str(incarnation))


def newest_incarnation(namespace: str, name: str) -> int:
    """That of the service which has the name now, or had it last; 0 if none had."""
    return int(_kept(namespace, name).get("incarnation", 0))


def _kept(namespace: str, name: str) -> dict[str, Any]:
    text = _get(namespace, name, "state")
    return json.loads(text) if text else {}


# Ray's own libraries (Serve, Tune) use this store; without it the table lives as long as the actor alone.
def _get(namespace: str, name: str, key: str) -> bytes | None:
    from ray.experimental import internal_kv

    found: bytes | None = internal_kv._internal_kv_get(f"{namespace}:{name}:{key}", namespace="torchrl_llm_kl")
    return found


def _put(namespace: str, name: str, key: str, value: str) -> None:
    from ray.experimental import internal_kv

    internal_kv._internal_kv_put(f"{namespace}:{name}:{key}", value, overwrite=True, namespace="torchrl_llm_kl")


# ------------------------------------------------------------------ what Ray knows of replicas and clients


def is_constructed(handle: Any) -> bool:
    """Whether an actor's constructor has ended and its process lives, though it may be stopped or unreachable."""
    from ray._private.state import actors

    return handle is not None and actors(handle._actor_id.hex()).get("State") == "ALIVE"


def whereabouts() -> dict[str, Any]:
    """Job and worker of this process, by which Ray knows whether it lives."""
    import ray

    context = ray.get_runtime_context()
    driver = ray._private.worker.global_worker.mode == ray.SCRIPT_MODE
    return {"job": context.get_job_id(), "worker": context.get_worker_id(), "driver": driver}


def gone_clients(clients: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Those whose job has ended, or whose worker process has; a process that is merely stopped is not gone."""
    from ray._private.state import jobs, workers

    dead = {job["JobID"] for job in jobs() if job["IsDead"]}
    alive: set[str] | None = None
    gone = []
    for name, where in clients.items():
        if where["job"] in dead:
            gone.append(name)
        elif not where["driver"]:
            alive = set(workers()) if alive is None else alive
            if where["worker"] not in alive:
                gone.append(name)
    return gone
