"""What replicas that restart need to know: the weights that were pushed last."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_llm_kl.service._errors import WeightVersionError
from torchrl_llm_kl.service._state_dict import state_dict_of

__all__ = ["WeightKeeper", "end_keeper", "find_keeper", "keeper_of", "kept_weights"]

_LOOK = 15.0  # seconds between two looks at who is left
_ALONE = 120.0  # seconds without any replica after which the keeper ends


class WeightKeeper:
    """Keeps the weights in the object store, so that a replica that dies comes back with them. Made with the first update.

    Args:
        replicas: their names; the keeper ends after them.
        namespace: of the names.
        source: what the model is; weights of another one are not handed out.
    """

    def __init__(self, replicas: Sequence[str], namespace: str, source: str) -> None:
        import ray

        self._version: int | None = None
        self._pushed: list[tuple[frozenset[str], Any]] = []  # names and reference; the oldest first
        self._lost = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        self._replicas, self._namespace, self._source = list(replicas), namespace, source
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def put(self, version: int, weights: Any) -> Exception | None:
        """Keep these from now on, whoever pushed them; an error if a later version is kept.

        What an earlier push held beside them stays.
        """
        import ray

        if self._version is not None and version < self._version:
            return WeightVersionError(
                f"version {version} of the weights came after version {self._version}: versions grow"
            )
        weights = state_dict_of(weights)
        names = frozenset(weights)
        if self._lost:
            self._pushed = []
        self._pushed = [push for push in self._pushed if not push[0] <= names] + [(names, ray.put(weights))]
        self._version, self._lost = version, False
        return None

    def get(self, source: str) -> tuple[int | None, list[Any], bool]:
        """Version, references in the order of their pushes, and whether they were lost.

        Args:
            source: what the model is that asks.
        """
        if source != self._source:
            return None, [], False
        return self._version, [reference for _, reference in self._pushed], self._lost

    def _watch(self) -> None:
        import ray

        seen = time.monotonic()
        while time.monotonic() - seen < _ALONE:
            time.sleep(_LOOK)
            names = {(entry["namespace"], entry["name"]) for entry in ray.util.list_named_actors(all_namespaces=True)}
            if any((self._namespace, name) in names for name in self._replicas):
                seen = time.monotonic()
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def _name(service: str) -> str:
    return f"{service}:weights"


def keeper_of(service: str, replicas: Sequence[str], namespace: str, source: str) -> Any:
    """The keeper of a service, made if there is none."""
    import ray

    remote: Any = ray.remote(WeightKeeper)
    return remote.options(
        name=_name(service),
        namespace=namespace,
        get_if_exists=True,
        lifetime="detached",
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=-1,
    ).remote(replicas, namespace, source)


def find_keeper(service: str, namespace: str) -> Any | None:
    """The keeper, if weights were ever pushed."""
    import ray

    try:
        return ray.get_actor(_name(service), namespace=namespace)
    except ValueError:
        return None


def kept_weights(
    service: str, namespace: str, source: str, *, timeout: float = 300.0
) -> tuple[int, list[Mapping[str, Any]]] | None:
    """Version and weights that were pushed last, to be applied in order; None if there never were any.

    Raises:
        WeightVersionError: if there were, and they are gone.
    """
    import ray

    keeper = find_keeper(service, namespace)
    if keeper is None:
        return None
    version, references, lost = ray.get(keeper.get.remote(source), timeout=timeout)
    if lost:
        raise WeightVersionError(
            "the weights that were pushed are lost, with the actor that kept them: push them again"
        )
    if version is None:
        return None
    try:
        return version, ray.get(references, timeout=timeout)
    except ray.exceptions.RayError as error:
        raise WeightVersionError(
            f"version {version} of the weights cannot be read again: push it again ({error})"
        ) from error


def end_keeper(service: str, namespace: str) -> None:
    """Forget the weights."""
    import ray

    keeper = find_keeper(service, namespace)
    if keeper is not None:
        ray.kill(keeper, no_restart=True)
