""":class:`ScoringService`: a model behind an application of Ray Serve."""

from __future__ import annotations

import contextlib
import hashlib
import io
import pickle
import time
import uuid
from collections.abc import Callable
from functools import partial
from operator import index
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from torchrl_llm_kl._numerics import check_choice, check_not_a_name, check_range
from torchrl_llm_kl.scoring import DEFAULT_MEMORY, fingerprint_of
from torchrl_llm_kl.service._errors import ServiceClosedError, ServiceError, ServiceTimeout
from torchrl_llm_kl.service._messages import PushedVersion, chunks_of, state_dict_of, tensor_bytes
from torchrl_llm_kl.service._remote import Deadline, RemoteModel, import_ray
from torchrl_llm_kl.service._spec import DEFAULTS, ServeOptions, ServiceSpec, Settings

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from torchrl_llm_kl.service._keeper import State
    from torchrl_llm_kl.service._replica import ReplicaState

#: The most bytes of a pickled factory that is an argument of an actor. Ray drops larger arguments after the first start.
_SMALL = 2**16
_END = 60.0  # seconds for a service to end


class ScoringService(contextlib.AbstractContextManager["ScoringService", None]):
    """One model, or a few replicas of it, as an application of Ray Serve that scores for any number of processes.

    Only token ids, masks and log-probs are sent. Requests that wait together are scored in one batch. Serve replaces replicas
    that die, and calls are retried until ``timeout``.

    Args:
        model: the model, sent by value, or None with a factory. Without both, the service ``name`` must exist already: a
            service of another driver, or of ``serve deploy``.

    Keyword Args:
        factory: returns the model, in the replica. It is the better way for large models.
        name: of the application. Drivers that pass the same name and configuration share it. Unique by default.
        num_replicas: copies of the model. None with ``autoscaling_config``.
        tokens_per_batch: tokens of one forward, see :class:`~torchrl_llm_kl.LogProbScorer`.
        memory: the most bytes of keys and values that each replica caches for continued conversations.
        max_tokens: the most tokens in a batch of requests.
        max_wait: the longest time that a request waits for others to share its batch, in seconds.
        keep_versions: the number of pushed versions of the weights that each replica keeps, the newest included. A request may
            then name the version for each token (:class:`~torchrl_llm_kl.PolicyVersions`).
        timeout: seconds per call of a client, retries included.
        options: ``num_cpus`` (1), ``num_gpus`` (0), ``resources`` and ``runtime_env`` are options of each replica's actor.
            ``max_ongoing_requests`` (256), ``max_queued_requests``, ``autoscaling_config``, ``health_check_period_s`` (2) and
            others are arguments of ``serve.deployment``. A replica whose batch takes longer than three times
            ``health_check_timeout_s`` (100) is replaced. With ``lifetime="detached"`` the service outlives all drivers, until
            :meth:`shutdown`. By default it ends with the last driver that constructed it.

    Raises:
        ServiceConfigError: if the name is in use with another configuration.
        ServiceClosedError: if there is no service of this name, and neither a model nor a factory.
        ServiceTimeout: if no replica started. The message says which resource is missing.
        Exception: the error of the factory.

    Example:
        >>> service = ScoringService(factory=load_reference, name="reference", num_gpus=1)  # doctest: +SKIP
        >>> env.append_transform(RetrieveKL("from_collector", service.model))  # doctest: +SKIP
    """

    def __init__(
        self,
        model: object = None,
        *,
        factory: Callable[[], object] | None = None,
        name: str | None = None,
        num_replicas: int | None = 1,
        tokens_per_batch: int | None = None,
        memory: int = DEFAULT_MEMORY,
        max_tokens: int = 65536,
        max_wait: float = 0.003,
        keep_versions: int = 0,
        timeout: float = 120.0,
        **options: Unpack[ServeOptions],
    ) -> None:
        check_not_a_name(model=model)
        if (model is not None and factory is not None) or (model is None and factory is None and name is None):
            raise ValueError(
                "pass the model, or factory=, a function that returns it, or only name= of a running service."
            )
        # Checked here, before another process can see the name.
        check_choice((None, "detached"), lifetime=options.get("lifetime"))
        check_range(1, num_replicas=num_replicas, tokens_per_batch=tokens_per_batch, max_tokens=max_tokens)
        check_range(0, memory=memory, max_wait=max_wait, keep_versions=keep_versions)
        if model is None and factory is None:
            self.model = RemoteModel(str(name), timeout=timeout)
            self.model.connection.connect()
            with contextlib.suppress(ServiceError):  # a replica that Serve's own commands deployed may still start
                self.model.connection.service = self._state().id
            return
        packed = import_ray().cloudpickle.dumps(factory or (lambda: model))
        is_small = factory is not None and len(packed) <= _SMALL
        lifetime = options.pop("lifetime", None)
        given = cast(ServeOptions, DEFAULTS | {key: value for key, value in options.items() if value is not None})
        spec = ServiceSpec(
            f"scorer-{uuid.uuid4().hex[:8]}" if name is None else name,
            describe_source(model, factory),
            Settings(tokens_per_batch, memory, max_tokens, max_wait, keep_versions),
            given,
            None if "autoscaling_config" in given and num_replicas == 1 else num_replicas,  # Serve refuses both
            detached=lifetime == "detached",
            id=uuid.uuid4().hex,
            factory=packed if is_small else None,
        )
        self._start(spec, None if is_small else packed, timeout)

    def _start(self, spec: ServiceSpec, packed: bytes | None, timeout: float) -> None:
        """Joins the service of this name, or deploys it. The keeper decides which driver is the first."""
        deadline, ray = Deadline(timeout, f"the start of the service {spec.name!r}"), import_ray()
        if not ray.is_initialized():
            ray.init(log_to_driver=False)
        self.model = RemoteModel(spec.name, timeout=timeout)
        is_new = False
        try:
            state = self._join(spec, packed, deadline)
            self.model.connection.service, is_new = state.id, state.id == spec.id
            scaling = spec.options.get("autoscaling_config") or {}
            first = scaling.get("initial_replicas") or scaling.get("min_replicas", 1)  # 0: the first request starts one
            needed = min(first, 1) if scaling or not is_new else spec.num_replicas or 1
            self._wait_for_replicas(spec, deadline, needed)
        except BaseException:
            if is_new:
                self.shutdown()
            else:
                self.close()
            raise

    def _join(self, spec: ServiceSpec, packed: bytes | None, deadline: Deadline) -> State:
        """Returns the state of the service after its keeper has deployed it."""
        import ray

        from torchrl_llm_kl.service._keeper import keeper_of
        from torchrl_llm_kl.service._replica import deploy

        while True:
            keeper = keeper_of(spec.name, spec, create=True)
            # Hold it before joining: the only other driver may end between the two.
            self.model.connection.hold(keeper)
            try:
                _answer(keeper.join.remote(spec, packed, deploy), deadline.left)
                state: State = _answer(keeper.state.remote(), deadline.left)
                if not state.ended:
                    return state
            except ray.exceptions.RayActorError as error:
                if deadline.left <= 0:
                    raise deadline.over(error) from error
            time.sleep(0.1)  # an earlier service of this name still ends

    def _wait_for_replicas(self, spec: ServiceSpec, deadline: Deadline, needed: float) -> None:
        """Waits until so many replicas run. Raises the error of the factory, or one that says which resource is missing."""
        import ray
        from ray import serve

        while True:
            failure = self._state().failure
            application = serve.status().applications.get(spec.name)
            if application is None:
                raise ServiceClosedError(f"the service {spec.name!r} was shut down while it started.")
            replicas = [each.replica_states for each in application.deployments.values()]
            if sum(count for states in replicas for state, count in states.items() if state == "RUNNING") >= needed:
                return
            if failure is not None:
                raise failure
            if application.status == "DEPLOY_FAILED":
                raise ServiceError(f"the service {spec.name!r} did not start: {application.message}")
            if deadline.left <= 0:
                wanted = {name: spec.options.get(name) for name in ("num_cpus", "num_gpus", "resources")}
                messages = [each.message for each in application.deployments.values()]
                raise deadline.over(
                    f"each replica needs {wanted}, the cluster has {ray.cluster_resources()}, of which "
                    f"{ray.available_resources()} is free. {' '.join(messages)}"
                )
            time.sleep(0.1)

    @property
    def name(self) -> str:
        """Name by which other processes find the service."""
        return self.model.name

    @property
    def version(self) -> int:
        """Version of the last pushed weights, 0 before the first push."""
        return self._state().version

    def _state(self) -> State:
        return self._ask("state")

    def _ask(self, method: str, *args: object, **kwargs: object) -> Any:
        """Calls the keeper. Raises an answer that is an error."""
        return _answer(getattr(self.model.connection.keeper(), method).remote(*args, **kwargs), self.model.timeout)

    def replicas(self, *, timeout: float = 10.0) -> list[ReplicaState]:
        """Returns the replicas that answer in time, with their processes and versions."""
        states = self.model.connection.broadcast("state", timeout=timeout)
        return [state for state in states if not isinstance(state, Exception)]

    def update_weights(self, weights: object, version: int | None = None, *, wait: float = 30.0) -> PushedVersion:
        """Copies weights into every replica, in place. Replicas that start later load them too.

        One replica checks that the weights fit. Then they become the latest ones, and each replica copies them between two
        batches: all of them or none.

        Args:
            weights: a ``state_dict``, a module, a TensorDict of parameters, or a Ray reference to one of them. They must
                include all tensors of earlier pushes, since a replica that starts later loads only the last push.
            version: an int greater than the last version. By default the next one, which no other push gets.

        Keyword Args:
            wait: seconds to wait for the replicas. A late replica loads the weights within a few seconds, and in any case
                before it answers a client that has seen this version.

        Returns:
            The version. Its attribute ``missed`` says which replicas did not take the weights in time, and why.

        Raises:
            KeyError, TypeError, ValueError: if they do not fit the model or are not finite. Nothing is changed then.
            WeightVersionError: if this version or a later one was pushed before, or earlier pushes held other tensors too.
            ServiceTimeout: if no replica checks them within ``timeout``, or they are not stored by then. Push them again.
        """
        ray = import_ray()
        check_range(0, wait=wait)  # Serve would refuse it after the push
        version = None if version is None else index(version)
        connection, token = self.model.connection, uuid.uuid4().hex
        given = state_dict_of(_answer(weights, self.model.timeout) if isinstance(weights, ray.ObjectRef) else weights)
        if not given:
            raise ValueError("there are no weights in the update: pass at least one.")
        if connection.service and self._state().id != connection.service:
            raise connection.gone()
        parts = 0
        try:
            for chunk in chunks_of(given.items()):
                self._ask("stage", token, chunk)
                parts += 1
            tensors, whole = self.model.call("inspect_push", token)
            number = self._ask("commit", token, version, connection.newest, tensors, whole=whole, parts=parts)
            pushed = PushedVersion(number)
        except BaseException:
            with contextlib.suppress(Exception):
                self._ask("drop", token)
            raise
        connection.saw(pushed)
        answers = connection.broadcast("take_weights", int(pushed), timeout=wait)
        pushed.missed = tuple(str(answer) for answer in answers if isinstance(answer, Exception))
        return pushed

    def close(self) -> None:
        """Stops using the service through this object. The service ends with its last driver."""
        self.model.close()

    def shutdown(self) -> None:
        """Ends the service for all clients. Running requests are answered, later calls raise :class:`ServiceClosedError`.

        A new :class:`ScoringService` may take the name.
        """
        ray = import_ray()
        with contextlib.suppress(ServiceClosedError, ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            if self._state().id == self.model.connection.service:
                end = self.model.connection.keeper().end.options(max_task_retries=0)  # Ray would report each retry
                ray.get(end.remote("it was shut down"), timeout=_END)
        self.model.connection.close(f"the service {self.name!r} was shut down.")

    def __exit__(self, *exc: object) -> None:
        self.close()


def _answer(reference: Any, timeout: float) -> Any:
    """Returns the value of a reference. Raises a value that is an error."""
    import ray

    try:
        answer = ray.get(reference, timeout=timeout)
    except ray.exceptions.GetTimeoutError:
        raise ServiceTimeout(
            f"no answer within {timeout:g} s. Check the cluster, and the free memory of its object store."
        ) from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def describe_source(model: object, factory: Callable[[], object] | None) -> str:
    """Describes a factory by its name and arguments, or a model by its class and weights.

    Equal models have equal descriptions. So do factories that differ only in their code, or in globals that they read.
    """
    return f"model {_described(model)}" if factory is None else f"factory {_described(factory)}"


def _described(value: object) -> str:
    if isinstance(value, nn.Module):
        return f"{type(value).__name__} {fingerprint_of(value)}"
    if isinstance(value, partial):
        given = [*map(_described, value.args), *(f"{key}={_described(x)}" for key, x in sorted(value.keywords.items()))]
        return f"{_described(value.func)}({', '.join(given)})"
    if isinstance(value, (type, FunctionType, BuiltinFunctionType)):
        return f"{value.__module__}.{value.__qualname__}"
    if value is None or isinstance(value, (str, int, float, PurePath, torch.dtype, torch.device)):
        return repr(value)
    name, content = type(value).__qualname__, io.BytesIO()
    with contextlib.suppress(Exception):  # the repr of another object may leave out its values, or hold addresses
        _Values(content).dump(value)
        return f"{name} {hashlib.blake2b(content.getvalue(), digest_size=6).hexdigest()}"
    return name


class _Values(pickle.Pickler):
    """Writes the values of tensors. Their own pickles hold addresses, which differ between processes."""

    def reducer_override(self, value: object) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        return str, (f"{value.dtype} {tuple(value.shape)} {tensor_bytes(value).tobytes().hex()}",)
