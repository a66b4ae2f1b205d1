"""Weight updates: pushed to every replica, and kept for replicas that restart or missed them."""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from torchrl_llm_kl.service._errors import ServiceTimeout, WeightVersionError
from torchrl_llm_kl.service._lifecycle import any_alive
from torchrl_llm_kl.service._replicas import Replicas
from torchrl_llm_kl.service._wire import state_dict_of

_LOOK = 15.0  # seconds between two checks of the keeper for replicas
_ALONE = 120.0  # seconds without any replica after which the keeper ends


def push_weights(replicas: Replicas, weights: Any, version: int, *, timeout: float) -> None:
    """Copy weights into every replica.

    One replica checks them, the keeper stores them for replicas that restart, then all replicas take them.

    Args:
        replicas: of the service.
        weights: as for :func:`state_dict_of`, or a Ray reference to such a mapping.
        version: a whole number, not below the last one.
        timeout: seconds for each of these steps.

    Raises:
        TypeError, KeyError, ValueError: if they do not fit the model; nothing is changed.
        WeightVersionError: if a later version was pushed before.
        ServiceTimeout: if a replica does not answer; it takes them when it is back.
    """
    import ray

    version = check_version(version)
    replicas.start()  # joins the cluster
    spec = replicas.spec
    if not isinstance(weights, ray.ObjectRef):
        weights = ray.put({name: _on_cpu(name, value) for name, value in state_dict_of(weights).items()})
    first = replicas.choose(range(spec.num_replicas))
    _raise(replicas.call(first, "check_weights", weights, timeout=timeout))
    keeper = keeper_of(spec.name, spec.replica_names, spec.namespace, spec.source)
    try:
        _raise(ray.get(keeper.put.remote(version, weights), timeout=timeout))
    except ray.exceptions.GetTimeoutError:
        raise ServiceTimeout(
            f"the weights of {spec.name!r} were not stored within {timeout:g} s: check that the object store has room."
        ) from None
    for replica in range(spec.num_replicas):
        _raise(replicas.call(replica, "update_weights", weights, version, timeout=timeout))
    replicas.newest = max(replicas.newest, version)


def check_version(version: Any) -> int:
    """``version`` as an int.

    Raises:
        TypeError: if it is not a whole number.
    """
    try:
        found = operator.index(version)
    except TypeError:
        found = None
    if found is None or isinstance(version, bool):
        raise TypeError(f"version must be a whole number, got {version!r}.")
    return found


def _on_cpu(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"weights travel as tensors, got {type(value).__name__} for {name!r}.")
    return value.detach().cpu()


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


class WeightKeeper:
    """An actor that keeps pushed weights in the object store, so that a restarted replica takes them again.

    Args:
        replicas: their names; the keeper ends after them.
        namespace: of the names.
        source: description of the model; replicas with another model receive no weights.
    """

    def __init__(self, replicas: Sequence[str], namespace: str, source: str) -> None:
        import ray

        self._version: int | None = None
        self._pushed: list[tuple[frozenset[str], Any]] = []  # names and reference of each push, oldest first
        self._lost = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        self._replicas, self._namespace, self._source = list(replicas), namespace, source
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def put(self, version: int, weights: Any) -> Exception | None:
        """Keep these weights, beside those of earlier pushes that they do not replace; an error for an old version."""
        import ray

        if self._version is not None and version < self._version:
            return WeightVersionError(
                f"version {version} of the weights came after version {self._version}: versions grow."
            )
        weights = state_dict_of(weights)
        names = frozenset(weights)
        if self._lost:
            self._pushed = []
        self._pushed = [push for push in self._pushed if not push[0] <= names] + [(names, ray.put(weights))]
        self._version, self._lost = version, False
        return None

    def get(self, source: str) -> tuple[int | None, list[Any], bool]:
        """Version, references in the order of their pushes, and whether the weights were lost.

        Args:
            source: description of the caller's model.
        """
        if source != self._source:
            return None, [], False
        return self._version, [reference for _, reference in self._pushed], self._lost

    def _watch(self) -> None:
        import ray

        seen = time.monotonic()
        while time.monotonic() - seen < _ALONE:
            time.sleep(_LOOK)
            if any_alive(self._replicas, self._namespace):
                seen = time.monotonic()
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def _keeper_name(service: str) -> str:
    return f"{service}:weights"


def keeper_of(service: str, replicas: Sequence[str], namespace: str, source: str) -> Any:
    """The keeper of a service, created if there is none."""
    import ray

    remote: Any = ray.remote(WeightKeeper)
    return remote.options(
        name=_keeper_name(service),
        namespace=namespace,
        get_if_exists=True,
        lifetime="detached",
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=-1,
    ).remote(replicas, namespace, source)


def _find_keeper(service: str, namespace: str) -> Any | None:
    import ray

    try:
        return ray.get_actor(_keeper_name(service), namespace=namespace)
    except ValueError:
        return None


def kept_weights(
    service: str, namespace: str, source: str, *, timeout: float = 300.0
) -> tuple[int, list[Mapping[str, Any]]] | None:
    """Version and weights of all pushes, to be applied in order; None if there were none.

    Raises:
        WeightVersionError: if the weights are lost.
    """
    import ray

    keeper = _find_keeper(service, namespace)
    if keeper is None:
        return None
    version, references, lost = ray.get(keeper.get.remote(source), timeout=timeout)
    if lost:
        raise WeightVersionError(
            "the weights that were pushed are lost, with the actor that kept them: push them again."
        )
    if version is None:
        return None
    try:
        return version, ray.get(references, timeout=timeout)
    except ray.exceptions.RayError as error:
        raise WeightVersionError(
            f"version {version} of the weights cannot be read again: push it again ({error})."
        ) from error


def end_keeper(service: str, namespace: str) -> None:
    """Drop the kept weights."""
    import ray

    keeper = _find_keeper(service, namespace)
    if keeper is not None:
        ray.kill(keeper, no_restart=True)
