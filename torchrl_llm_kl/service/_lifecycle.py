"""The spec of a service: how to create or find its replicas, and how to compare two clients' models."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import CellType, CodeType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

NAMESPACE = "torchrl_llm_kl"
#: A replica exits after this many seconds without a heartbeat from any client.
LEASE = 30.0


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
    make_model: Callable[[], Any] | None  # in the actor; None in a process that received no model given by value
    source: str  # description of the model, for comparison
    settings: dict[str, Any]  # tokens_per_batch, memory, max_tokens, max_wait, max_queue
    options: dict[str, Any] = field(default_factory=dict)  # arguments of ray.remote
    num_replicas: int = 1
    namespace: str = NAMESPACE  # of the names
    detached: bool = False  # whether the replicas outlive their clients
    address: str | None = None  # of the Ray cluster, for processes that have not joined one

    def config(self, replica: int) -> dict[str, Any]:
        """The configuration that all clients of a name must share."""
        plain = {key: value for key, value in self.options.items() if isinstance(value, (int, float, str, dict))}
        return {
            "name": self.replica_name(replica),
            "model": self.source,
            "num_replicas": self.num_replicas,
            "detached": self.detached,
            **self.settings,
            **plain,
        }

    def replica_name(self, replica: int) -> str:
        return f"{self.name}:{replica}"

    @property
    def replica_names(self) -> list[str]:
        return [self.replica_name(i) for i in range(self.num_replicas)]

    def for_others(self) -> ServiceSpec:
        """The spec without a model given by value, which the actors already hold."""
        return replace(self, make_model=None) if isinstance(self.make_model, HeldModel) else self


def any_alive(replicas: Sequence[str], namespace: str) -> bool:
    """Whether an actor with one of these names exists."""
    import ray

    names = {(entry["namespace"], entry["name"]) for entry in ray.util.list_named_actors(all_namespaces=True)}
    return any((namespace, name) in names for name in replicas)


# ------------------------------------------------------------------ the source of a model, for comparison


def describe_source(model: Any, factory: Callable[[], Any] | None) -> str:
    """Name, code and arguments of the factory, or class and weights of the model: equal texts for equal models."""
    if factory is not None:
        return f"factory {_callable(factory)}"
    digest = hashlib.blake2b(digest_size=6)
    for name, value in (model.state_dict() if isinstance(model, nn.Module) else {}).items():
        digest.update(name.encode())
        if isinstance(value, torch.Tensor):
            digest.update(_bytes(value))
    return f"{type(model).__name__} {digest.hexdigest()}"


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=6).hexdigest()


def _bytes(value: torch.Tensor) -> bytes:
    flat = value.detach().cpu().contiguous().flatten()
    return str((value.dtype, tuple(value.shape))).encode() + flat.view(torch.uint8).numpy().tobytes()


def _callable(function: Any) -> str:
    if isinstance(function, partial):
        args = [_value(arg) for arg in function.args]
        args += [f"{name}={_value(arg)}" for name, arg in sorted(function.keywords.items())]
        return f"{_callable(function.func)}({', '.join(args)})"
    owner = getattr(function, "__self__", None)
    if owner is not None and not isinstance(owner, (type, ModuleType)):
        what = _callable(function.__func__) if hasattr(function, "__func__") else repr(function.__name__)
        return f"{what} of {_object(owner)}"
    name = f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__qualname__)}"
    code = getattr(function, "__code__", None)
    if code is None:
        return name if isinstance(function, type) else f"{name} {_value(getattr(function, '__dict__', None))}"
    inner = [value for value in map(_content, function.__closure__ or ()) if value is not function]
    extra = [*(function.__defaults__ or ()), *sorted((function.__kwdefaults__ or {}).items()), *inner]
    return f"{name} {_digest(_code(code).encode() + ''.join(map(_value, extra)).encode())}"


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _object(value: Any) -> str:
    """Class and state of any object."""
    try:
        return f"{type(value).__qualname__} {_digest(pickle.dumps(value))}"
    except Exception:
        return f"{type(value).__qualname__} {_value(getattr(value, '__dict__', None))}"


def _code(code: CodeType) -> str:
    """A function's bytecode, names and constants, without file and lines."""
    constants = [_code(value) if isinstance(value, CodeType) else _value(value) for value in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def _value(value: Any) -> str:
    if isinstance(value, nn.Module):
        return describe_source(value, None)
    if isinstance(value, torch.Tensor):
        return _digest(_bytes(value))
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape} {_digest(value.tobytes())}"
    if isinstance(value, dict):
        return "{" + ", ".join(sorted(f"{_value(key)}: {_value(item)}" for key, item in value.items())) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(_value, value))) + "}"
    if callable(value):
        return _callable(value)
    text = repr(value)
    return _object(value) if " at 0x" in text else text  # addresses differ between processes
