"""The spec of a service, in values that need no torch, and how two clients' specs are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

from torchrl_llm_kl._typing import Json
from torchrl_llm_kl.service._errors import ServiceConfigError

NAMESPACE = "torchrl_llm_kl"
#: Seconds without progress of the model, or without an answer of the process, after which a replica is started again.
HANG_AFTER = 300.0
#: Concurrent calls of a replica. The limit for requests is lower, so that updates of weights always get through.
MAX_CONCURRENCY = 1000
#: Processes that may die while they score a request alone before it is refused.
MAX_TRIALS = 3


class ActorOptions(TypedDict, total=False):
    """Options of Ray's actors that a service takes."""

    num_cpus: float
    num_gpus: float
    resources: Mapping[str, float] | None
    scheduling_strategy: Any
    runtime_env: Mapping[str, Any] | None
    max_restarts: int
    lifetime: Literal["detached"] | None
    namespace: str


@dataclass(frozen=True, eq=False)
class ServiceSpec:
    """Everything needed to create a service, or to find it.

    Attributes:
        name, namespace: of the service; its actors are ``NAME:0``, ``NAME:1``, ..., ``NAME:control`` and ``NAME:weights``.
        source: description of the model, for comparison.
        factory: returns the model in a replica, pickled; None for one that a client hands in: a model given by value, or a
            large factory, since Ray drops large arguments of an actor after its first start.
        settings: of a replica: ``tokens_per_batch``, ``memory``, ``max_tokens``, ``max_wait``, ``max_queue``, ``hang_after``.
        options: arguments of ``ray.remote`` for a replica.
        num_replicas: number of replicas.
        detached: whether the service outlives its clients.
        id: of the service that has the name; a later one has another. Empty before it is known.
        address: of the Ray cluster, for processes that have not joined one.
    """

    name: str
    source: str
    settings: Json
    factory: bytes | None = None
    namespace: str = NAMESPACE
    options: Json = field(default_factory=dict)
    num_replicas: int = 1
    detached: bool = False
    id: str = ""
    address: str | None = None

    @property
    def config(self) -> Json:
        """What all clients of a name must share."""
        plain = {key: value for key, value in self.options.items() if isinstance(value, (int, float, str, dict))}
        own = {"model": self.source, "num_replicas": self.num_replicas, "detached": self.detached}
        return {**own, **self.settings, **plain}

    def replica_name(self, replica: int) -> str:
        """The name of an actor."""
        return f"{self.name}:{replica}"

    def check_config(self, wanted: Mapping[str, Any]) -> None:
        """A :class:`ServiceConfigError` with the differences if a client wants another configuration."""
        found = self.config
        differences = [
            f"{key}: it has {found.get(key)!r}, requested {wanted.get(key)!r}"
            for key in sorted({*wanted, *found})
            if wanted.get(key) != found.get(key)
        ]
        if differences:
            raise ServiceConfigError(
                f"the name {self.name!r} is in use with another configuration: {'; '.join(differences)}. Choose another name, "
                "or shut that service down first."
            )
