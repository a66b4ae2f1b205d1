"""New weights for every replica."""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor

from torchrl_llm_kl.service._errors import ServiceTimeout
from torchrl_llm_kl.service._keeper import keeper_of
from torchrl_llm_kl.service._replicas import Replicas
from torchrl_llm_kl.service._state_dict import state_dict_of

__all__ = ["check_version", "push_weights"]


def push_weights(replicas: Replicas, weights: Any, version: int, *, timeout: float) -> None:
    """Copy weights into every replica.

    They are checked on one of them first, then put where a replica that restarts finds them; then all replicas take them.

    Args:
        replicas: of the service.
        weights: as for :func:`state_dict_of`, or a Ray reference to such a mapping.
        version: a number, not below the last one.
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
        weights = ray.put({name: _portable(name, value) for name, value in state_dict_of(weights).items()})
    first = replicas.choose(range(spec.num_replicas))
    _raise(replicas.call(first, "check_weights", weights, timeout=timeout))
    keeper = keeper_of(spec.name, spec.replica_names, spec.namespace, spec.source)
    try:
        _raise(ray.get(keeper.put.remote(version, weights), timeout=timeout))
    except ray.exceptions.GetTimeoutError:
        raise ServiceTimeout(
            f"the weights of {spec.name!r} were not put away within {timeout:g} s: is there room?"
        ) from None
    for replica in range(spec.num_replicas):
        _raise(replicas.call(replica, "update_weights", weights, version, timeout=timeout))
    replicas.newest = max(replicas.newest, version)


def check_version(version: Any) -> int:
    """A version as a plain number.

    Raises:
        TypeError: if it is no whole number.
    """
    try:
        found = operator.index(version)
    except TypeError:
        found = None
    if found is None or isinstance(version, bool):
        raise TypeError(f"version must be a whole number, got {version!r}")
    return found


def _portable(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"weights travel as tensors, got {type(value).__name__} for {name!r}")
    return value.detach().cpu()


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error
