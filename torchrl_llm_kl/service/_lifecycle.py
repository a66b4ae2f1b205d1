"""The life of the named replicas: created by the first client, compared by later ones, ended with the last lease."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import pickle
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import CellType, CodeType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from torchrl_llm_kl.service._errors import ReplicaGone, ServiceConfigError, ServiceError, ServiceTimeout

NAMESPACE = "torchrl_llm_kl"
#: Seconds without a sign of life from any client after which a replica ends.
LEASE = 30.0

# ------------------------------------------------------------------ create or find


@dataclass(frozen=True, eq=False)
class HeldModel:
    """A factory that returns a given model."""

    model: Any

    def __call__(self) -> Any:
        """The model."""
        return self.model


@dataclass(frozen=True, eq=False)
class ServiceSpec:
    """Everything that it takes to create a replica, or to find it.

    Args:
        name: of the service; replicas are ``NAME:0``, ``NAME:1``, ...
        make_model: returns the model, in the actor; None in a process that received this without a model given by value.
        source: description of the model, for comparison.
        settings: ``tokens_per_batch``, ``memory``, ``max_tokens``, ``max_wait``, ``max_queue``.
        options: arguments of ``ray.remote``: ``num_cpus``, ``num_gpus``, ``resources``, ``scheduling_strategy``,
            ``runtime_env``, ``max_restarts``.
        num_replicas: number of replicas.
        namespace: of the names.
        detached: whether the replicas outlive their clients.
        address: of the Ray cluster, for processes that have not joined one.
    """

    name: str
    make_model: Callable[[], Any] | None
    source: str
    settings: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    num_replicas: int = 1
    namespace: str = NAMESPACE
    detached: bool = False
    address: str | None = None

    def config(self, replica: int) -> dict[str, Any]:
        """What two clients of one name must agree on."""
        return {
            "name": self.replica_name(replica),
            "model": self.source,
            "num_replicas": self.num_replicas,
            "detached": self.detached,
            **self.settings,
            **{key: value for key, value in self.options.items() if isinstance(value, (int, float, str, dict))},
        }

    def replica_name(self, replica: int) -> str:
        """Name of one replica."""
        return f"{self.name}:{replica}"

    @property
    def replica_names(self) -> list[str]:
        """Names of all replicas."""
        return [self.replica_name(i) for i in range(self.num_replicas)]

    def for_others(self) -> ServiceSpec:
        """What another process needs: all but a model given by value, which the actors already hold."""
        return replace(self, make_model=None) if isinstance(self.make_model, HeldModel) else self

    def here(self) -> ServiceSpec:
        """This spec with the address of the cluster of this process, which joins ``address`` if it is part of none.

        Raises:
            ImportError: if Ray is not installed.
        """
        try:
            import ray
        except ImportError as error:
            raise ImportError("a service needs Ray: pip install 'torchrl-llm-kl[ray]'.") from error

        if not ray.is_initialized():
            ray.init(self.address, log_to_driver=False)
        address = ray.get_runtime_context().gcs_address
        return self if address == self.address else replace(self, address=address)


def launch(spec: ServiceSpec, replica: int) -> tuple[Any, Any]:
    """Handle of a replica, created if it does not exist, and a reference to its description.

    Any number of processes may call this at once: Ray creates one actor per name.

    Raises:
        ServiceError: if it does not exist and this process has no model to create it.
    """
    import ray

    from torchrl_llm_kl.service._actor import MAX_CONCURRENCY, ScoringActor

    name = spec.replica_name(replica)
    if spec.make_model is None:
        try:
            handle = ray.get_actor(name, namespace=spec.namespace)
        except ValueError:
            raise ServiceError(
                f"replica {name} is gone, and its model was given by value in another process. With factory= every client "
                "can start it again."
            ) from None
        return handle, handle.describe.remote()

    remote: Any = ray.remote(ScoringActor)
    handle = remote.options(
        name=name,
        namespace=spec.namespace,
        get_if_exists=True,
        max_concurrency=MAX_CONCURRENCY,
        lifetime="detached",  # its creator may exit before its other clients: leases decide when it ends
        **spec.options,
    ).remote(spec, replica)
    return handle, handle.describe.remote()


def welcome(spec: ServiceSpec, replica: int, handle: Any, description: Any, *, timeout: float) -> None:
    """Wait until a replica is ready, and check that it has the configuration of ``spec``.

    Raises:
        ServiceConfigError: if it has another configuration.
        ServiceTimeout: if it did not start in time.
        Exception: the error of making the model.
    """
    import ray

    try:
        failure, found = ray.get(description, timeout=max(timeout, 0.001))
    except ray.exceptions.GetTimeoutError:
        raise _not_started(spec, replica, handle, timeout) from None
    wanted = spec.config(replica)
    different = [
        f"{key}: it has {found.get(key)!r}, requested {wanted.get(key)!r}"
        for key in sorted({*wanted, *found})
        if wanted.get(key) != found.get(key)
    ]
    if failure is not None:
        ray.kill(handle, no_restart=True)  # it is of no use, and its name should be free
        raise failure if not different else ReplicaGone(f"{wanted['name']} of another configuration failed: {failure}")
    if different:
        raise ServiceConfigError(
            f"the name {wanted['name']!r} is in use with another configuration: {'; '.join(different)}. Choose another name, "
            "or shut that service down first."
        )


def _not_started(spec: ServiceSpec, replica: int, handle: Any, timeout: float) -> ServiceTimeout:
    import ray

    asked = {"CPU": spec.options.get("num_cpus", 0), "GPU": spec.options.get("num_gpus", 0)}
    asked |= dict(spec.options.get("resources") or {})
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    text = f"replica {spec.replica_name(replica)} did not start within {timeout:.3g} s"
    if not any(all(node.get(name, 0) >= amount for name, amount in asked.items()) for node in nodes):
        ray.kill(handle, no_restart=True)  # it would wait for ever, and keep the name
        return ServiceTimeout(f"{text}: no node of the cluster has {asked}; they have {nodes}.")
    return ServiceTimeout(
        f"{text}. It needs {asked}, the cluster has {ray.available_resources()} free. If the model takes longer to load, "
        "raise timeout=."
    )


def any_alive(replicas: Sequence[str], namespace: str) -> bool:
    """Whether an actor of one of these names exists."""
    import ray

    names = {(entry["namespace"], entry["name"]) for entry in ray.util.list_named_actors(all_namespaces=True)}
    return any((namespace, name) in names for name in replicas)


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
        # Finalizers may run anywhere, also while this thread holds the lock: only the queue tolerates that.
        self._released: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def hold(self, replica: str, handle: Any, *, first: bool) -> None:
        """An object of this process uses a replica, for the first time or after the replica was created anew."""
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

    def release(self, replica: str) -> None:
        """One object less uses a replica; the last one ends the lease."""
        self._released.put(replica)

    def _release(self, replica: str, *, all_holders: bool = False) -> None:
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
        """Renew leases, and exchange the marks of lives that the replicas and this process know."""
        import ray

        end = time.monotonic() + LEASE / 4
        answers = {}
        with contextlib.suppress(Exception):
            if ray.is_initialized():
                for replica, handle in handles.items():
                    known = sorted(self._lives.get(replica, ()))
                    answers[replica] = handle.hold.remote(client_name(), known)
        for replica, answer in answers.items():
            with contextlib.suppress(Exception):  # dead or busy: the next request will find out
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
                self._renew(handles)
                next_beat = time.monotonic() + LEASE / 4


# ------------------------------------------------------------------ the source of a model, for comparison


def describe_source(model: Any, factory: Callable[[], Any] | None) -> str:
    """Name, code and arguments of the factory, or class of the model and a digest of its weights.

    Equal models have equal descriptions in every process.
    """
    if factory is not None:
        return f"factory {_callable(factory)}"
    digest = hashlib.blake2b(digest_size=6)
    for name, value in (model.state_dict() if isinstance(model, nn.Module) else {}).items():
        digest.update(name.encode())
        if isinstance(value, torch.Tensor):
            digest.update(_bytes(value))
    return f"{type(model).__name__} {digest.hexdigest()}"


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=6).hexdigest()


def _bytes(value: torch.Tensor) -> bytes:
    flat = value.detach().cpu().contiguous().flatten()
    return str((value.dtype, tuple(value.shape))).encode() + flat.view(torch.uint8).numpy().tobytes()


def _callable(function: Any) -> str:
    if isinstance(function, partial):
        args = [_value(arg) for arg in function.args]
        args += [f"{name}={_value(arg)}" for name, arg in sorted(function.keywords.items())]
        return f"{_callable(function.func)}({', '.join(args)})"
    owner = getattr(function, "__self__", None)
    if owner is not None and not isinstance(owner, (type, ModuleType)):
        what = _callable(function.__func__) if hasattr(function, "__func__") else repr(function.__name__)
        return f"{what} of {_object(owner)}"
    name = f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__qualname__)}"
    code = getattr(function, "__code__", None)
    if code is None:
        return name if isinstance(function, type) else f"{name} {_value(getattr(function, '__dict__', None))}"
    inner = [value for value in map(_content, function.__closure__ or ()) if value is not function]
    extra = [*(function.__defaults__ or ()), *sorted((function.__kwdefaults__ or {}).items()), *inner]
    return f"{name} {_digest(_code(code).encode() + ''.join(map(_value, extra)).encode())}"


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _object(value: Any) -> str:
    """Class and state of any object."""
    try:
        return f"{type(value).__qualname__} {_digest(pickle.dumps(value))}"
    except Exception:
        return f"{type(value).__qualname__} {_value(getattr(value, '__dict__', None))}"


def _code(code: CodeType) -> str:
    """What a function does, without its file and lines."""
    constants = [_code(value) if isinstance(value, CodeType) else _value(value) for value in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def _value(value: Any) -> str:
    if isinstance(value, nn.Module):
        return describe_source(value, None)
    if isinstance(value, torch.Tensor):
        return _digest(_bytes(value))
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape} {_digest(value.tobytes())}"
    if isinstance(value, dict):
        return "{" + ", ".join(sorted(f"{_value(key)}: {_value(item)}" for key, item in value.items())) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(_value, value))) + "}"
    if callable(value):
        return _callable(value)
    text = repr(value)
    return _object(value) if " at 0x" in text else text  # addresses differ between processes
