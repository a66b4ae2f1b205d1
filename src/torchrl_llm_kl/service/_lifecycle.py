"""Named replicas: made by whoever comes first, compared by whoever comes later, ended with the last client."""

from __future__ import annotations

import atexit
import hashlib
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from torchrl_llm_kl.service._errors import ServiceConfigError, ServiceTimeout

__all__ = ["NAMESPACE", "Leases", "ServiceSpec", "connect"]

NAMESPACE = "torchrl_llm_kl"
LEASE = 30.0


@dataclass(frozen=True, eq=False)
class ServiceSpec:
    """Everything that is needed to make a replica, or to find it.

    Args:
        name: of the service; replicas are ``NAME:0``, ``NAME:1``, ...
        make_model: returns the model, in the actor.
        source: what the model is, for comparison.
        settings: arguments of :class:`ScoringActor`.
        options: arguments of ``ray.remote``: ``num_cpus``, ``num_gpus``, ``resources``, ``scheduling_strategy``,
            ``runtime_env``, ``max_restarts``.
        num_replicas: how many.
        namespace: of the names.
        detached: whether the replicas outlive their clients.
    """

    name: str
    make_model: Callable[[], Any]
    source: str
    settings: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    num_replicas: int = 1
    namespace: str = NAMESPACE
    detached: bool = False

    def config(self, replica: int) -> dict[str, Any]:
        """What two services of one name must agree on."""
        return {
            "name": self.replica_name(replica),
            "model": self.source,
            "num_replicas": self.num_replicas,
            "detached": self.detached,
            **self.settings,
            **{key: value for key, value in self.options.items() if isinstance(value, (int, float, str))},
        }

    def replica_name(self, replica: int) -> str:
        """``NAME:i``."""
        return f"{self.name}:{replica}"


def describe_source(model: Any, factory: Callable[[], Any] | None) -> str:
    """A text that is equal for equal models: the factory's name and arguments, or the class and a digest of the weights."""
    if factory is not None:
        if isinstance(factory, partial):
            args = [describe_source(None, arg) if callable(arg) else repr(arg) for arg in factory.args]
            return f"{describe_source(None, factory.func)} with {args} {factory.keywords}"
        return (
            f"factory {getattr(factory, '__module__', '?')}.{getattr(factory, '__qualname__', type(factory).__name__)}"
        )
    digest = hashlib.sha256()
    parameters = model.state_dict() if isinstance(model, nn.Module) else {}
    for name, value in parameters.items():
        digest.update(
            f"{name}{tuple(value.shape)}{float(value.double().sum()) if value.is_floating_point() else ''}".encode()
        )
    return f"{type(model).__name__} {digest.hexdigest()[:12]}"


def connect(spec: ServiceSpec, replica: int, *, timeout: float) -> Any:
    """A handle to a replica, which is made if there is none. Safe from any number of processes at once.

    Raises:
        ServiceConfigError: if there is one with another configuration.
        ServiceTimeout: if it did not start in time.
        Exception: whatever making the model raised.
    """
    import ray

    from torchrl_llm_kl.service._actor import ScoringActor

    options = {"max_restarts": -1, "max_concurrency": 1000, **spec.options}
    remote: Any = ray.remote(ScoringActor)
    handle = remote.options(
        name=spec.replica_name(replica),
        namespace=spec.namespace,
        get_if_exists=True,
        lifetime="detached",  # its creator may go before its other clients: leases say when it ends
        **options,
    ).remote(spec.make_model, spec.config(replica), lease=None if spec.detached else LEASE, **spec.settings)
    try:
        state, found = ray.get(handle.describe.remote(), timeout=timeout)
    except ray.exceptions.GetTimeoutError:
        raise ServiceTimeout(
            f"replica {spec.replica_name(replica)} did not start within {timeout:g} s: are there {options} free in the cluster "
            f"({ray.available_resources()})?"
        ) from None
    if state == "failed":
        ray.kill(handle, no_restart=True)
        raise found
    _compare(spec.config(replica), found)
    return handle


def _compare(wanted: dict[str, Any], found: dict[str, Any]) -> None:
    different = [
        f"{key}: it has {found.get(key)!r}, asked for {wanted.get(key)!r}"
        for key in sorted({*wanted, *found})
        if wanted.get(key) != found.get(key)
    ]
    if different:
        raise ServiceConfigError(
            f"the name {wanted['name']!r} is in use with another configuration: {'; '.join(different)}. Choose another name, "
            "or close that service first"
        )


class Leases:
    """Tells the replicas that this process uses that it is still there; one thread for all of them."""

    _lock = threading.Lock()
    _held: dict[str, Any] = {}  # noqa: RUF012 -- one table for the process
    _thread: threading.Thread | None = None
    client = f"{uuid.uuid4().hex[:12]}"

    @classmethod
    def hold(cls, key: str, handle: Any) -> None:
        """From now on."""
        with cls._lock:
            cls._held[key] = handle
            if cls._thread is None:
                cls._thread = threading.Thread(target=cls._beat, name="leases", daemon=True)
                cls._thread.start()
                atexit.register(cls.release_all)
        handle.hold.remote(cls.client)

    @classmethod
    def release(cls, key: str) -> None:
        """No longer."""
        with cls._lock:
            handle = cls._held.pop(key, None)
        if handle is not None:
            _quietly(partial(handle.release.remote, cls.client))

    @classmethod
    def release_all(cls) -> None:
        """At the end of the process."""
        for key in list(cls._held):
            cls.release(key)

    @classmethod
    def _beat(cls) -> None:
        pause = threading.Event()
        while not pause.wait(LEASE / 4):
            with cls._lock:
                handles = list(cls._held.values())
            for handle in handles:
                _quietly(partial(handle.hold.remote, cls.client))


def _quietly(call: Callable[[], Any]) -> None:
    import ray

    if ray.is_initialized():
        try:
            call()
        except Exception:  # the replica is gone, which is what a lease is for
            return
