"""A model that many processes share."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Literal

from torchrl_llm_kl.scoring import DEFAULT_MEMORY
from torchrl_llm_kl.service._client import RemoteModel
from torchrl_llm_kl.service._keeper import find_keeper
from torchrl_llm_kl.service._lifecycle import NAMESPACE, HeldModel, ServiceSpec
from torchrl_llm_kl.service._source import describe_source
from torchrl_llm_kl.service._weights import push_weights

__all__ = ["ScoringService"]


class ScoringService:
    """One model, or a few copies of it, behind Ray actors; scored for any number of processes.

    What travels is token ids, masks and log-probs. Requests that wait together are scored in one batch. Replicas restart when
    they die, and calls are tried again until ``timeout``.

    Args:
        model: the model, sent to the actors by value; or None with a factory, which makes it there. A model by value can be
            started again by this process alone.

    Keyword Args:
        factory: returns the model: better for large ones.
        name: of the service. Another process that gives the same name (and the same configuration) shares it; by default a name
            of its own.
        num_replicas: copies of the model. Answers to one prompt go to the same one, which remembers conversations.
        num_cpus: of each replica.
        num_gpus: of each replica.
        resources: as for ``ray.remote``.
        scheduling_strategy: as for ``ray.remote``.
        runtime_env: as for ``ray.remote``.
        max_restarts: of each replica; -1 for as often as needed.
        lifetime: ``"detached"`` to outlive all clients, until :meth:`shutdown`. By default replicas end with their last client.
        tokens_per_batch: of one forward; see :class:`~torchrl_llm_kl.LogProbScorer`.
        memory: bytes of keys and values that each replica remembers for conversations that go on, for each temperature,
            dtype and choice of adapters that is asked for.
        max_tokens: of one batch of requests; a call with more goes in several requests.
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
        lifetime: Literal["detached"] | None = None,
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
        _check_arguments(
            name=name,
            namespace=namespace,
            whole={"num_replicas": num_replicas, "max_tokens": max_tokens, "max_queue": max_queue},
            seconds={"max_wait": max_wait, "timeout": timeout},
        )
        if lifetime not in (None, "detached"):
            raise ValueError(f"lifetime must be 'detached' or None, got {lifetime!r}")
        if tokens_per_batch is not None and tokens_per_batch < 1:
            raise ValueError(f"tokens_per_batch must be at least 1, got {tokens_per_batch}")
        if memory < 0:
            raise ValueError(f"memory must be a number of bytes, got {memory}")
        options: dict[str, Any] = {"num_cpus": num_cpus, "num_gpus": num_gpus, "max_restarts": max_restarts}
        given = {"resources": resources, "scheduling_strategy": scheduling_strategy, "runtime_env": runtime_env}
        options |= {key: value for key, value in given.items() if value is not None}
        spec = ServiceSpec(
            name or f"scorer-{uuid.uuid4().hex[:8]}",
            factory or HeldModel(model),
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
            lifetime == "detached",
        )
        self.model = RemoteModel(spec, timeout=timeout)
        self.model.replicas.start()
        for replica in range(num_replicas):
            self.model.call(replica, "describe")

    @property
    def name(self) -> str:
        """What other processes find it by."""
        return self.model.spec.name

    @property
    def version(self) -> int:
        """Of the weights that were pushed last; 0 if none were."""
        return max(stats["version"] for stats in self.stats())

    def stats(self) -> list[dict[str, Any]]:
        """Counters of each replica."""
        return [self.model.call(replica, "stats") for replica in range(self.model.spec.num_replicas)]

    def update_weights(self, weights: Any, version: int) -> None:
        """Copy weights into every replica, in place; they are known by ``version`` from then on.

        Replicas that restart take them again.

        Args:
            weights: a ``state_dict``, a module, a TensorDict of parameters, or a Ray reference to one of them (which is sent
                once, however many replicas there are). Some weights or all.
            version: a whole number, not below the last one.

        Raises:
            KeyError, TypeError, ValueError: if they do not fit the model or are not finite; nothing is changed.
            WeightVersionError: if a later version was pushed before.
            ServiceTimeout: if a replica does not answer; it takes them when it is back.
        """
        push_weights(self.model.replicas, weights, version, timeout=self.model.timeout)

    def close(self) -> None:
        """This object no longer uses the service; it ends with its last client."""
        self.model.close()

    def shutdown(self) -> None:
        """End the service for everybody: calls that wait, and later ones, raise :class:`ServiceClosedError`."""
        import ray

        spec = self.model.spec
        for name in spec.replica_names:
            try:
                handle = ray.get_actor(name, namespace=spec.namespace)
            except ValueError:
                continue
            with contextlib.suppress(ray.exceptions.RayError):  # an actor that ends gives no answer
                ray.get(handle.close.remote(), timeout=10)
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(handle, no_restart=True)
        keeper = find_keeper(spec.name, spec.namespace)
        if keeper is not None:
            ray.kill(keeper, no_restart=True)
        self.model.close()

    def __enter__(self) -> ScoringService:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _check_arguments(*, name: str | None, namespace: str, whole: Mapping[str, Any], seconds: Mapping[str, Any]) -> None:
    """Here rather than in the actor, where the error would come late and wrapped."""
    for what, text in (("name", name), ("namespace", namespace)):
        if text is not None and (not isinstance(text, str) or not text.strip() or any(c in text for c in ":\n")):
            raise ValueError(f"{what} must be a text without ':' and line breaks, got {text!r}")
    if namespace is None:
        raise ValueError("namespace must be a text: other processes find the service by it")
    for what, value in whole.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{what} must be a whole number of at least 1, got {value!r}")
    for what, value in seconds.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e9:
            raise ValueError(f"{what} must be a number of seconds, got {value!r}")
