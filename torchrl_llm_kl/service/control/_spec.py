"""The spec of a service: how to create or find its replicas, and how to compare two clients' models."""

from __future__ import annotations

import contextlib
import hashlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import nn

from torchrl_llm_kl.scoring import fingerprint_of
from torchrl_llm_kl.service.control._table import LEASE, NAMESPACE, Plan

_SILENCE = 60.0  # seconds: a replica's event loop answers while its model works


@dataclass(frozen=True, eq=False)
class HeldModel:
    """A factory that returns a given model."""

    model: Any

    def __call__(self) -> Any:
        return self.model


@dataclass(frozen=True, eq=False)
class ServiceSpec:
    """Everything needed to create or find a replica."""

    name: str  # of the service; replicas are NAME:0, NAME:1, ...
    make_model: Callable[[], Any] | None  # in the actor; None where the control actor keeps a model given by value
    source: str  # description of the model, for comparison
    settings: dict[str, Any]  # tokens_per_batch, memory, max_tokens, max_wait, max_queue, hang_after
    options: dict[str, Any] = field(default_factory=dict)  # arguments of ray.remote
    num_replicas: int = 1  # at most
    namespace: str = NAMESPACE  # of the names
    detached: bool = False  # whether the replicas outlive their clients
    address: str | None = None  # of the Ray cluster, for processes that have not joined one
    min_replicas: int | None = None  # at least; None for num_replicas
    lease: float = LEASE  # seconds without a heartbeat after which a client counts as gone
    expect: str | None = None  # fingerprint of the weights
    incarnation: int = 0  # that this client joined; 0 for none yet

    def config(self, replica: int) -> dict[str, Any]:
        """The configuration that all clients of a name must share."""
        plain = {key: value for key, value in self.options.items() if isinstance(value, (int, float, str, dict))}
        return {
            "name": self.replica_name(replica),
            "model": self.source,
            "num_replicas": self.num_replicas,
            "min_replicas": self.plan.least,
            "detached": self.detached,
            **self.settings,
            **plain,
        }

    @property
    def plan(self) -> Plan:
        """The arguments of the control actor."""
        least = self.num_replicas if self.min_replicas is None else self.min_replicas
        hang_after = min(float(self.settings.get("hang_after", _SILENCE)), _SILENCE)
        return Plan(self.name, self.namespace, self.num_replicas, least, self.detached, self.lease, hang_after)

    def replica_name(self, replica: int) -> str:
        return f"{self.name}:{replica}"

    @property
    def replica_names(self) -> list[str]:
        return [self.replica_name(i) for i in range(self.num_replicas)]

    def for_others(self) -> ServiceSpec:
        """The spec without a model given by value, which the control actor keeps."""
        return replace(self, make_model=None) if isinstance(self.make_model, HeldModel) else self


def any_alive(replicas: Sequence[str], namespace: str) -> bool:
    """Whether an actor with one of these names exists."""
    import ray

    names = {(entry["namespace"], entry["name"]) for entry in ray.util.list_named_actors(all_namespaces=True)}
    return any((namespace, name) in names for name in replicas)


# ------------------------------------------------------------------ the source of a model, for comparison


def describe_source(model: Any, factory: Callable[[], Any] | None) -> str:
    """Name and arguments of the factory, or class and weights of the model: equal texts for equal models.

    Factories that differ in their code, or in globals that they read, alone are taken for one: ``expect=`` compares weights.
    """
    return f"model {_described(model)}" if factory is None else f"factory {_described(factory)}"


def _described(value: Any) -> str:
    if isinstance(value, nn.Module):
        with contextlib.suppress(TypeError, ValueError):  # weights elsewhere, or not loaded
            return f"{type(value).__name__} {fingerprint_of(value)}"
        return type(value).__name__
    if isinstance(value, partial):
        given = [*map(_described, value.args), *(f"{key}={_described(x)}" for key, x in sorted(value.keywords.items()))]
        return f"{_described(value.func)}({', '.join(given)})"
    if hasattr(value, "__func__"):
        return f"{_described(value.__func__)} of {_described(value.__self__)}"
    if isinstance(value, (type, FunctionType, BuiltinFunctionType)):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, (torch.Tensor, np.ndarray)):
        array = torch.as_tensor(value).detach().cpu().contiguous()
        return f"{array.dtype} {tuple(array.shape)} {_digest(array.flatten().view(torch.uint8).numpy().tobytes())}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{_described(key)}: {_described(item)}" for key, item in value.items())) + "}"
    if isinstance(value, (list, tuple, set, frozenset)):
        parts = list(map(_described, value))
        return f"[{', '.join(sorted(parts) if isinstance(value, (set, frozenset)) else parts)}]"
    text = repr(value)
    if " at 0x" not in text:
        return text
    try:  # addresses differ between processes
        return f"{type(value).__qualname__} {_digest(pickle.dumps(value))}"
    except Exception:
        return f"{type(value).__qualname__} {_described(vars(value) if hasattr(value, '__dict__') else None)}"


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=6).hexdigest()
