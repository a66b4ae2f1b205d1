""":class:`ScoringService`: a model behind Ray actors."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torchrl_llm_kl._numerics import check_choice, check_not_a_name, check_range
from torchrl_llm_kl._registry import install_hint
from torchrl_llm_kl._typing import Json
from torchrl_llm_kl.scoring import DEFAULT_MEMORY
from torchrl_llm_kl.service._source import describe_source
from torchrl_llm_kl.service._spec import HANG_AFTER, NAMESPACE, ActorOptions, ServiceSpec
from torchrl_llm_kl.service._weights import check_version
from torchrl_llm_kl.service.client._push import PushedVersion, push_weights
from torchrl_llm_kl.service.client._remote import RemoteModel

if TYPE_CHECKING:
    from typing_extensions import Unpack

#: Bytes of a pickled factory that is an argument of the actors; Ray drops larger arguments after the first start.
_SMALL = 2**16


class ScoringService:
    """One model, or a few replicas of it, behind Ray actors that score for any number of processes.

    Only token ids, masks and log-probs are sent. Requests that wait together are scored in one batch. Replicas that
    die are restarted, and calls are retried until ``timeout``.

    Args:
        model: the model, sent by value; or None with a factory. The controller keeps one copy in Ray's object store, from
            which replicas restart.

    Keyword Args:
        factory: returns the model, in the actor: better for large models.
        name: of the service; processes that pass the same name (and configuration) share it. Unique by default.
        num_replicas: copies of the model. Responses to one prompt go to the same replica, which caches conversations.
        tokens_per_batch: per forward; see :class:`~torchrl_llm_kl.LogProbScorer`.
        memory: bytes of keys and values that each replica caches for continued conversations, in all.
        max_tokens: per batch of requests. Larger requests are scored in pieces, which share batches with other callers.
        max_wait: the longest time that a request waits for others to share its batch, in seconds.
        max_queue: the most requests that may wait at one replica.
        timeout: seconds per call of a client, retries included.
        hang_after: seconds without progress (a forward, a copied weight) after which a replica that scores counts as hung: it
            is started again, and its requests go to others. Loading the model does not count. A replica that answers nothing
            is replaced after the same time, 3 seconds at least and a minute at most.
        actor_options: of ``ray.remote``: ``num_cpus`` (1), ``num_gpus`` (0), ``resources``, ``scheduling_strategy``,
            ``runtime_env`` and ``max_restarts`` (-1: no limit) of each replica; ``namespace`` of the actors; and ``lifetime``,
            ``"detached"`` to outlive all clients, until :meth:`shutdown`: by default replicas end with their last client.

    Raises:
        ServiceConfigError: if the name is in use with another configuration.
        ServiceTimeout: if no replica started; says which resource is missing.
        Exception: the error of the factory.

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
        tokens_per_batch: int | None = None,
        memory: int = DEFAULT_MEMORY,
        max_tokens: int = 65536,
        max_wait: float = 0.003,
        max_queue: int = 256,
        timeout: float = 120.0,
        hang_after: float = HANG_AFTER,
        **actor_options: Unpack[ActorOptions],
    ) -> None:
        check_not_a_name(model=model)
        # Check arguments here rather than in the actor, whose errors arrive late and wrapped.
        if (model is None) == (factory is None):
            raise ValueError("pass the model, or factory=, a function that returns it: exactly one of them.")
        options: Json = {"num_cpus": 1, "num_gpus": 0, "max_restarts": -1}
        options |= {key: value for key, value in actor_options.items() if value is not None}
        lifetime, namespace = options.pop("lifetime", None), options.pop("namespace", NAMESPACE)
        if unknown := options.keys() - ActorOptions.__annotations__:
            raise TypeError(f"ScoringService has no argument {min(unknown)!r}.")
        for what, text in {"name": "default" if name is None else name, "namespace": namespace}.items():
            if not isinstance(text, str) or not text.strip() or any(c in text for c in ":\n"):
                raise ValueError(f"{what} must be a string without ':' and line breaks, and not empty, got {text!r}.")
        for what, whole in {"num_replicas": num_replicas, "max_tokens": max_tokens, "max_queue": max_queue}.items():
            if isinstance(whole, bool) or not isinstance(whole, int) or whole < 1:
                raise ValueError(f"{what} must be a whole number of at least 1, got {whole!r}.")
        for what, seconds in {"max_wait": max_wait, "timeout": timeout, "hang_after": hang_after}.items():
            if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < 1e9:
                raise ValueError(f"{what} must be a number of seconds, got {seconds!r}.")
        check_choice((None, "detached"), lifetime=lifetime)
        check_range(1, tokens_per_batch=tokens_per_batch)
        check_range(0, memory=memory)
        check_range(above=0, hang_after=hang_after, timeout=timeout)
        settings: Json = {"tokens_per_batch": tokens_per_batch, "memory": memory, "hang_after": hang_after}
        settings |= {"max_tokens": max_tokens, "max_wait": max_wait, "max_queue": max_queue}
        name = name or f"scorer-{uuid.uuid4().hex[:8]}"
        packed = None if factory is None else _pickled(factory)
        handed_in = packed is None or len(packed) > _SMALL
        spec = ServiceSpec(
            name,
            describe_source(model, factory),
            settings,
            None if handed_in else packed,
            namespace,
            options,
            num_replicas,
            detached=lifetime == "detached",
        )
        self.model = RemoteModel(spec, make=(factory or partial(_given, model)) if handed_in else None, timeout=timeout)
        try:
            self.model.connection.open(timeout=timeout)
        except BaseException:
            self.model.close()
            raise

    @property
    def name(self) -> str:
        """Name by which other processes find the service."""
        return self.model.spec.name

    @property
    def version(self) -> int:
        """Version of the last pushed weights; 0 if none were pushed."""
        return max((stats["version"] for stats in self.stats() if "version" in stats), default=0)

    @property
    def fingerprint(self) -> str | None:
        """Of the factory's model, see :func:`~torchrl_llm_kl.scoring.fingerprint_of`; None for an engine without weights."""
        found: str | None = self.model.connection.table(timeout=self.model.timeout)["fingerprint"]
        return found

    def stats(self) -> list[Json]:
        """Counters of each replica; for one that does not answer its name and the ``"error"``."""
        name, everyone = self.model.spec.replica_name, range(self.model.spec.num_replicas)
        found = self.model.connection.gather("stats", replicas=everyone, timeout=self.model.timeout)
        return [
            {"name": name(replica), "error": f"{type(stats).__name__}: {stats}"}
            if isinstance(stats, Exception)
            else stats
            for replica, stats in sorted(found.items())
        ]

    def update_weights(self, weights: Any, version: int | None = None, *, wait: float = 30.0) -> PushedVersion:
        """Copy weights into every replica, in place. Restarted replicas load them again.

        All replicas fetch and check the weights at once, while they score. Then they are stored, which makes them the latest
        ones, and each replica copies them between two batches: all of them or none.

        Args:
            weights: a ``state_dict``, a module, a TensorDict of parameters, or a Ray reference to one of them; with all
                tensors of earlier pushes, since a replica that restarts loads only the last one.
            version: a whole number greater than the last one; by default the next one, which no other push gets.

        Keyword Args:
            wait: seconds to wait for other replicas once one has answered: more than they need to fetch the weights. The rest
                load them when they are back, before they answer a client that has seen this version.

        Returns:
            The version, an ``int`` whose attribute ``missed`` names the replicas that did not take the weights in time.

        Raises:
            KeyError, TypeError, ValueError: if they do not fit the model or are not finite; nothing is changed.
            WeightVersionError: if this version or a later one was pushed before, or earlier pushes held other tensors too.
            ServiceTimeout: if no replica takes them within ``timeout``, or they are not stored by then: push them again.
        """
        if isinstance(wait, bool) or not isinstance(wait, (int, float)) or not 0 <= wait < 1e9:
            raise ValueError(f"wait must be a number of seconds, got {wait!r}.")
        version = None if version is None else check_version(version)
        return push_weights(self.model.connection, weights, version, timeout=self.model.timeout, wait=wait)

    def close(self) -> None:
        """Stop using the service through this object; the service ends with its last client."""
        self.model.close()

    def shutdown(self) -> None:
        """End the service for all clients: waiting and later calls raise :class:`ServiceClosedError`.

        Clients cannot bring it back. A new :class:`ScoringService` may take the name.
        """
        self.model.connection.end()

    def __enter__(self) -> ScoringService:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _given(model: Any) -> Any:
    return model


def _pickled(factory: Callable[[], Any]) -> bytes:
    try:
        import ray
    except ImportError as error:
        raise ImportError(f"a service needs Ray: {install_hint('ray')}.") from error
    packed: bytes = ray.cloudpickle.dumps(factory)
    return packed
