"""The configuration of a service, without torch, and the comparison of two clients' configurations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal, TypedDict

from torchrl_llm_kl.service._errors import ServiceConfigError

#: Ray's namespace of the actors that keep the services' weights.
NAMESPACE = "torchrl_llm_kl"
#: The name of the deployment in each application.
DEPLOYMENT = "Replica"


class ServeOptions(TypedDict, total=False):
    """Options of each replica's actor, arguments of ``serve.deployment``, and the lifetime of the service."""

    num_cpus: float
    num_gpus: float
    resources: Mapping[str, float] | None
    runtime_env: Mapping[str, object] | None
    lifetime: Literal["detached"] | None
    max_ongoing_requests: int
    max_queued_requests: int
    autoscaling_config: Mapping[str, float] | None
    graceful_shutdown_timeout_s: float
    health_check_period_s: float
    health_check_timeout_s: float
    max_replicas_per_node: int | None
    placement_group_bundles: Sequence[Mapping[str, float]] | None
    placement_group_strategy: str | None
    request_router_config: Mapping[str, object] | None


#: The names of :class:`ServeOptions` that are options of an actor.
OF_ACTORS = ("num_cpus", "num_gpus", "resources", "runtime_env")
#: The defaults of a service where they differ from Serve's. Serve sends a replica five calls at a time, too few for a batch,
#: and checks its health every ten seconds.
DEFAULTS: ServeOptions = {
    "num_cpus": 1,
    "num_gpus": 0,
    "max_ongoing_requests": 256,
    "health_check_period_s": 2.0,
    "health_check_timeout_s": 100.0,  # three times this is the longest time of a batch
}


@dataclass(frozen=True)
class Settings:
    """How a replica scores."""

    tokens_per_batch: int | None = None
    memory: int = 256 * 2**20
    max_tokens: int = 65536
    max_wait: float = 0.003
    keep_versions: int = 0


@dataclass(frozen=True, eq=False)
class ServiceSpec:
    """Everything needed to create a service.

    Attributes:
        name: of the application.
        source: describes the model, for comparison.
        settings: of a replica.
        options: of Serve and of Ray.
        num_replicas: number of replicas; None if Serve scales them.
        detached: whether the service outlives the drivers that use it.
        id: identifies this service. A later service of the same name has another id.
        factory: a pickled function that returns the model in a replica. None if it is too large for an argument of an actor,
            as for a model given by value. The keeper holds a large one.
    """

    name: str
    source: str
    settings: Settings
    options: ServeOptions = field(default_factory=lambda: DEFAULTS)
    num_replicas: int | None = 1
    detached: bool = False
    id: str = ""
    factory: bytes | None = None

    @property
    def config(self) -> dict[str, object]:
        """The values that all drivers of one name must share."""
        plain = {key: value for key, value in self.options.items() if key not in ("runtime_env", "lifetime")}
        own = {"model": self.source, "num_replicas": self.num_replicas, "detached": self.detached}
        return {**own, **asdict(self.settings), **plain}

    def check_same(self, other: ServiceSpec) -> None:
        """Raises a :class:`ServiceConfigError` with the differences if a client asks for another configuration."""
        own, wanted = self.config, other.config
        differences = [
            f"{key}: it has {own.get(key)!r}, requested {wanted.get(key)!r}"
            for key in sorted(own | wanted)
            if wanted.get(key) != own.get(key)
        ]
        if differences:
            raise ServiceConfigError(
                f"the name {self.name!r} is in use with another configuration: {'; '.join(differences)}. Choose another name, "
                "or shut that service down first."
            )
