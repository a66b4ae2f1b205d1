"""What holds a transform: an env, and the collector that runs it."""

from __future__ import annotations

from typing import Any

from torchrl.envs import EnvBase, Transform

__all__ = ["collector_policy", "in_env"]


def in_env(transform: Transform) -> bool:
    """Whether an env holds the transform, however deep: there conversations go on."""
    return isinstance(_container(transform), EnvBase)


def _container(transform: Transform) -> Any:
    try:
        return transform.container
    except ValueError:  # inside a Compose that is in no env
        return None


def collector_policy(transform: Transform) -> Any:
    """The policy of the collector whose env holds ``transform``.

    Raises:
        ValueError: if there is no env or no collector, saying what to do instead.
    """
    remedy = (
        "'from_collector' works in an env that a collector runs: append the transform to the env and pass the env to an "
        "LLMCollector. Anywhere else pass the model itself, for example `policy.get_new_version(generate=False)`."
    )
    container: Any = _container(transform)
    if container is None:
        raise ValueError(f"The container is not set. Please set the container before calling this method. {remedy}")
    while container is not None:
        collector = getattr(container, "collector", None)
        if collector is not None:
            return collector.policy
        outer = getattr(container, "_container", None)
        container = outer() if callable(outer) else outer
    raise ValueError(f"The collector is not set. Please set the collector before calling this method. {remedy}")
