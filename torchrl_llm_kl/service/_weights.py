"""Pushed weights, kept for replicas that restart or missed them."""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_llm_kl.service._errors import WeightVersionError
from torchrl_llm_kl.service._lifecycle import ServiceSpec, any_alive
from torchrl_llm_kl.service._wire import state_dict_of

_LOOK = 15.0  # seconds between two checks of the keeper for replicas
_ALONE = 120.0  # seconds without any replica until the keeper exits


class WeightKeeper:
    """An actor that keeps pushed weights in the object store, so that a restarted replica can load them.

    It ends after the replicas. Replicas whose model has another ``source`` receive no weights.
    """

    def __init__(self, replicas: Sequence[str], namespace: str, source: str) -> None:
        import ray

        self._version: int | None = None
        self._pushed: list[tuple[frozenset[str], Any]] = []  # names and reference of each push, oldest first
        self._lost = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        self._replicas, self._namespace, self._source = list(replicas), namespace, source
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def put(self, version: int, weights: Any) -> Exception | None:
        """Store weights along with those of earlier pushes that they do not replace; an error for an old version."""
        import ray

        if self._version is not None and version < self._version:
            return WeightVersionError(
                f"version {version} of the weights was pushed after version {self._version}: versions must increase."
            )
        weights = state_dict_of(weights)
        names = frozenset(weights)
        earlier = [] if self._lost else [push for push in self._pushed if not push[0] <= names]
        self._pushed = [*earlier, (names, ray.put(weights))]
        self._version, self._lost = version, False
        return None

    def get(self, source: str) -> tuple[int | None, list[Any], bool]:
        """Version, references in the order of their pushes, and whether the weights were lost."""
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


def keeper_of(spec: ServiceSpec) -> Any:
    """The keeper of a service, created if there is none."""
    import ray

    remote: Any = ray.remote(WeightKeeper)
    return remote.options(
        name=f"{spec.name}:weights",
        namespace=spec.namespace,
        get_if_exists=True,
        lifetime="detached",
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=-1,
    ).remote(spec.replica_names, spec.namespace, spec.source)


def _find_keeper(spec: ServiceSpec) -> Any | None:
    import ray

    try:
        return ray.get_actor(f"{spec.name}:weights", namespace=spec.namespace)
    except ValueError:
        return None


def kept_weights(spec: ServiceSpec, *, timeout: float = 300.0) -> tuple[int, list[Mapping[str, Any]]] | None:
    """Version and weights of all pushes, to be applied in order; None if there were none, an error if they are lost."""
    import ray

    keeper = _find_keeper(spec)
    if keeper is None:
        return None
    version, references, lost = ray.get(keeper.get.remote(spec.source), timeout=timeout)
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


def end_keeper(spec: ServiceSpec) -> None:
    """Drop the kept weights."""
    import ray

    keeper = _find_keeper(spec)
    if keeper is not None:
        ray.kill(keeper, no_restart=True)


def check_version(version: Any) -> int:
    """``version`` as an int; a TypeError if it is not a whole number."""
    try:
        if not isinstance(version, bool):
            return operator.index(version)
    except TypeError:
        pass
    raise TypeError(f"version must be a whole number, got {version!r}.")
