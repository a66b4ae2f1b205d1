"""Named actors of a service: found, created and asked about their past. Imports no torch."""

from __future__ import annotations

import warnings
from typing import Any

from torchrl_llm_kl.service._spec import ServiceSpec


def actor_of(spec: ServiceSpec, suffix: str) -> Any | None:
    """The actor ``NAME:suffix`` of a service if there is one."""
    import ray

    try:
        return ray.get_actor(f"{spec.name}:{suffix}", namespace=spec.namespace)
    except ValueError:
        return None


def detached(kind: type, spec: ServiceSpec, suffix: str, *args: Any, **options: Any) -> Any:
    """The actor ``NAME:suffix``, created by the first process that asks; it outlives that process."""
    import ray

    remote: Any = ray.remote(kind)
    named = {
        "name": f"{spec.name}:{suffix}",
        "namespace": spec.namespace,
        "get_if_exists": True,
        "lifetime": "detached",
    }
    return remote.options(**named, **options).remote(*args)


def was_restarted() -> bool:
    """Whether this actor had a process before this one."""
    import ray

    with warnings.catch_warnings():  # Ray's own use of a deprecated name
        warnings.simplefilter("ignore")
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)
