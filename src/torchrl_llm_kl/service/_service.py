"""A model that many processes share."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from torchrl_llm_kl.scoring import DEFAULT_MEMORY
from torchrl_llm_kl.service._client import RemoteModel
from torchrl_llm_kl.service._lifecycle import NAMESPACE, ServiceSpec, describe_source

__all__ = ["ScoringService"]


class ScoringService:
    """One model, or a few copies of it, behind Ray actors; scored for any number of processes.

    What travels is token ids, masks and log-probs. Requests that wait together are scored in one batch. Replicas restart when
    they die, and calls are tried again until ``timeout``.

    Args:
        model: the model, sent to the actors by value; or None with a factory, which makes it there.

    Keyword Args:
        factory: returns the model: better for large ones.
        name: of the service. Another process that gives the same name (and the same configuration) shares it; by default a name
            of its own.
        num_replicas: copies of the model. Sequences that begin alike go to the same one, which remembers them.
        num_cpus: of each replica.
        num_gpus: of each replica.
        resources: as for ``ray.remote``.
        scheduling_strategy: as for ``ray.remote``.
        runtime_env: as for ``ray.remote``.
        max_restarts: of each replica; -1 for as often as needed.
        detached: outlive all clients, until :meth:`shutdown`. By default replicas end with their last client.
        tokens_per_batch: of one forward; see :class:`~torchrl_llm_kl.LogProbScorer`.
        memory: bytes of keys and values that each replica remembers for conversations that go on.
        max_tokens: of one batch of requests.
        max_wait: seconds that a request waits for company.
        max_queue: requests that may wait at one replica.
        timeout: seconds for one call of a client, retries included.
        namespace: of the names.

    Raises:
        ServiceConfigError: if the name is in use with another configuration.
        Exception: whatever making the model raised.

    Example:
        >>> service = ScoringService(factory=load_reference, name="reference", num_gpus=1)  # doctest: +SKIP
        >>> env.append_transform(RetrieveKL("from_collector", service.model))  # doctest: +SKIP
    """

    def __init__(
        self,
        model: Any = None,
        *,
        factory: Callable[[], Any] | None = None,
        name: str | None = None,
        num_replicas: int = 1,
        num_cpus: float = 1,
        num_gpus: float = 0,
        resources: Mapping[str, float] | None = None,
        scheduling_strategy: Any = None,
        runtime_env: Mapping[str, Any] | None = None,
        max_restarts: int = -1,
        detached: bool = False,
        tokens_per_batch: int | None = None,
        memory: int = DEFAULT_MEMORY,
        max_tokens: int = 65536,
        max_wait: float = 0.003,
        max_queue: int = 256,
        timeout: float = 120.0,
        namespace: str = NAMESPACE,
    ) -> None:
        if (model is None) == (factory is None):
            raise ValueError("pass the model, or factory=, a function that makes it: exactly one of them")
        if num_replicas < 1:
            raise ValueError(f"num_replicas must be at least 1, got {num_replicas}")
        options: dict[str, Any] = {"num_cpus": num_cpus, "num_gpus": num_gpus, "max_restarts": max_restarts}
        given = {"resources": resources, "scheduling_strategy": scheduling_strategy, "runtime_env": runtime_env}
        options |= {key: value for key, value in given.items() if value is not None}
        spec = ServiceSpec(
            name or f"scorer-{uuid.uuid4().hex[:8]}",
            factory or _Held(model),
            describe_source(model, factory),
            {
                "tokens_per_batch": tokens_per_batch,
                "memory": memory,
                "max_tokens": max_tokens,
                "max_wait": max_wait,
                "max_queue": max_queue,
            },
            options,
            num_replicas,
            namespace,
            detached,
        )
        self.model = RemoteModel(spec, timeout=timeout)
        for replica in range(num_replicas):
            self.model.call(replica, "health")

    @property
    def name(self) -> str:
        """What other processes find it by."""
        return self.model.spec.name

    def stats(self) -> list[dict[str, Any]]:
        """Counters of each replica."""
        return [self.model.call(replica, "stats") for replica in range(self.model.spec.num_replicas)]

    def update_weights(self, weights: Any, version: int) -> None:
        """Copy weights into every replica, in place; they are known by ``version`` from then on.

        Args:
            weights: a ``state_dict`` of tensors, or a Ray reference to one, which is sent once however many replicas there are.
            version: a number.

        Raises:
            KeyError, TypeError, ValueError: as :meth:`ScoringCore.update_weights`; the replicas before keep the new weights.
        """
        import ray

        reference = (
            weights
            if isinstance(weights, ray.ObjectRef)
            else ray.put({k: v.detach().cpu() for k, v in weights.items()})
        )
        for replica in range(self.model.spec.num_replicas):
            state, value = self.model.call(replica, "update_weights", reference, version)
            if state == "error":
                raise value

    def close(self) -> None:
        """This process no longer uses the service; it ends with its last client."""
        self.model.close()

    def shutdown(self) -> None:
        """End the service for everybody."""
        import ray

        for replica in range(self.model.spec.num_replicas):
            try:
                handle = ray.get_actor(self.model.spec.replica_name(replica), namespace=self.model.spec.namespace)
            except ValueError:
                continue
            with contextlib.suppress(ray.exceptions.RayError):  # it may be down just now
                ray.get(handle.close.remote(), timeout=5)
            ray.kill(handle, no_restart=True)
        self.model.close()

    def __enter__(self) -> ScoringService:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Held:
    """A factory of a model that travels by value."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self) -> Any:
        return self._model
