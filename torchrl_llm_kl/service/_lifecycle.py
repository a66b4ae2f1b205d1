"""Named replicas: made by whoever comes first, compared by whoever comes later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from torchrl_llm_kl.service._errors import ReplicaGone, ServiceConfigError, ServiceError, ServiceTimeout

__all__ = ["NAMESPACE", "HeldModel", "ServiceSpec", "launch", "welcome"]

NAMESPACE = "torchrl_llm_kl"


class HeldModel:
    """A factory of a model that travels by value.

    Args:
        model: the model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self) -> Any:
        """The model."""
        return self._model


@dataclass(frozen=True, eq=False)
class ServiceSpec:
    """Everything that is needed to make a replica, or to find it.

    Args:
        name: of the service; replicas are ``NAME:0``, ``NAME:1``, ...
        make_model: returns the model, in the actor; None in processes that a model given by value is not sent to.
        source: what the model is, for comparison.
        settings: arguments of :class:`ScoringActor`.
        options: arguments of ``ray.remote``: ``num_cpus``, ``num_gpus``, ``resources``, ``scheduling_strategy``,
            ``runtime_env``, ``max_restarts``.
        num_replicas: how many.
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
        """What two services of one name must agree on."""
        return {
            "name": self.replica_name(replica),
            "model": self.source,
            "num_replicas": self.num_replicas,
            "detached": self.detached,
            **self.settings,
            **{key: value for key, value in self.options.items() if isinstance(value, (int, float, str, dict))},
        }

    def replica_name(self, replica: int) -> str:
        """``NAME:i``."""
        return f"{self.name}:{replica}"

    @property
    def replica_names(self) -> list[str]:
        """Of all of them."""
        return [self.replica_name(i) for i in range(self.num_replicas)]

    def for_others(self) -> ServiceSpec:
        """What another process needs: not a model given by value, which is in the actors already."""
        return replace(self, make_model=None) if isinstance(self.make_model, HeldModel) else self

    def here(self) -> ServiceSpec:
        """The same, with the address of the cluster that this process is part of; joins one if it is part of none.

        Raises:
            ImportError: if Ray is not installed.
        """
        try:
            import ray
        except ImportError as error:
            raise ImportError("a service needs Ray: pip install 'torchrl-llm-kl[ray]'") from error

        if not ray.is_initialized():
            ray.init(self.address, log_to_driver=False)
        address = ray.get_runtime_context().gcs_address
        return self if address == self.address else replace(self, address=address)


def launch(spec: ServiceSpec, replica: int) -> tuple[Any, Any]:
    """A handle to a replica, which is made if there is none, and its description to come.

    Safe from any number of processes at once: Ray makes one actor of a name.

    Raises:
        ServiceError: if there is none, and this process has no model to make one.
    """
    import ray

    from torchrl_llm_kl.service._actor import MAX_CONCURRENCY, ScoringActor

    if spec.make_model is None:
        try:
            handle = ray.get_actor(spec.replica_name(replica), namespace=spec.namespace)
        except ValueError:
            raise ServiceError(
                f"replica {spec.replica_name(replica)} is gone, and its model was given by value in another process. With "
                "factory= every client can start it again"
            ) from None
        return handle, handle.describe.remote()

    remote: Any = ray.remote(ScoringActor)
    handle = remote.options(
        name=spec.replica_name(replica),
        namespace=spec.namespace,
        get_if_exists=True,
        max_concurrency=MAX_CONCURRENCY,
        lifetime="detached",  # its creator may go before its other clients: leases say when it ends
        **spec.options,
    ).remote(
        spec.make_model,
        spec.config(replica),
        service=spec.name,
        namespace=spec.namespace,
        replicas=spec.replica_names,
        leased=not spec.detached,
        **spec.settings,
    )
    return handle, handle.describe.remote()


def welcome(spec: ServiceSpec, replica: int, handle: Any, description: Any, *, timeout: float) -> None:
    """Wait until a replica is ready, and is the one that was asked for.

    Raises:
        ServiceConfigError: if there is one with another configuration.
        ServiceTimeout: if it did not start in time.
        Exception: whatever making the model raised.
    """
    import ray

    try:
        failure, found = ray.get(description, timeout=max(timeout, 0.001))
    except ray.exceptions.GetTimeoutError:
        _explain(spec, replica, handle, timeout)
    wanted = spec.config(replica)
    different = [
        f"{key}: it has {found.get(key)!r}, asked for {wanted.get(key)!r}"
        for key in sorted({*wanted, *found})
        if wanted.get(key) != found.get(key)
    ]
    if failure is not None:
        ray.kill(handle, no_restart=True)  # nobody can use it, and the name should be free
        raise failure if not different else ReplicaGone(f"{wanted['name']} of another configuration failed: {failure}")
    if different:
        raise ServiceConfigError(
            f"the name {wanted['name']!r} is in use with another configuration: {'; '.join(different)}. Choose another name, "
            "or shut that service down first"
        )


def _explain(spec: ServiceSpec, replica: int, handle: Any, timeout: float) -> NoReturn:
    """Why a replica did not start in time."""
    import ray

    asked = {"CPU": spec.options.get("num_cpus", 0), "GPU": spec.options.get("num_gpus", 0)}
    asked |= dict(spec.options.get("resources") or {})
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    text = f"replica {spec.replica_name(replica)} did not start within {timeout:.3g} s"
    if not any(all(node.get(name, 0) >= amount for name, amount in asked.items()) for node in nodes):
        ray.kill(handle, no_restart=True)  # it would wait for ever, and hold the name
        raise ServiceTimeout(f"{text}: no node of the cluster has {asked}; they have {nodes}")
    raise ServiceTimeout(
        f"{text}. It asks for {asked}, the cluster has {ray.available_resources()} free. If the model takes longer to load, "
        "raise timeout="
    )
