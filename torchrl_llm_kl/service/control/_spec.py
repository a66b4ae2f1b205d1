"""The spec of a service: how to create or find its replicas, and how to compare two clients' models."""

from __future__ import annotations

import enum
import hashlib
import inspect
import logging
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import PurePath
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

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
    reads: dict[str, str] = field(default_factory=dict)  # what the factory's code refers to, for comparison
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
            **{f"{name} (read by the factory)": value for name, value in self.reads.items()},
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


# ------------------------------------------------------------------ what the code of a factory refers to

_PLAIN = (type(None), bool, int, float, complex, str, bytes, PurePath, enum.Enum, torch.dtype, torch.device)
_SHOWN = 80  # characters of a value


def describe_reads(factory: Callable[[], Any] | None) -> tuple[dict[str, str], list[str]]:
    """The globals that a factory's code names, and what cannot be compared.

    Functions and classes of the factory's own module are followed; those of other modules count by name and code, modules
    by name and version.

    Returns:
        A text for each global under its name, ``module.NAME``; and the names of globals of other kinds.
    """
    found: dict[str, str] = {}
    opaque: list[str] = []
    functions = list(_functions(factory))
    home = {function.__module__ for function in functions}
    seen: set[int] = set()
    while functions:
        function = functions.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        for name in sorted(_names(function.__code__)):
            if name not in function.__globals__:
                continue  # a builtin or an attribute
            value, key = function.__globals__[name], f"{function.__module__}.{name}"
            text = _reading(value)
            if text is None:
                opaque.append(key)
            else:
                found[key] = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... {_digest(text.encode())}"
            functions += [inner for inner in _functions(value) if inner.__module__ in home]
    return found, sorted(set(opaque))


def _functions(value: Any) -> Iterator[FunctionType]:
    """The Python functions that a call of ``value`` may run first."""
    value = inspect.unwrap(value) if callable(value) else value
    if isinstance(value, partial):
        yield from _functions(value.func)
        for argument in (*value.args, *value.keywords.values()):
            yield from _functions(argument)
    elif isinstance(value, FunctionType):
        yield value
        for cell in value.__closure__ or ():
            content = _content(cell)
            if content is not value and isinstance(content, (FunctionType, partial)):
                yield from _functions(content)
    elif hasattr(value, "__func__"):
        yield value.__func__
        yield from _functions(value.__self__ if isinstance(value.__self__, type) else type(value.__self__))
    elif isinstance(value, type):
        yield from (member for member in vars(value).values() if isinstance(member, FunctionType))
    elif callable(value) and not isinstance(value, ModuleType):
        yield from _functions(type(value))


def _names(code: CodeType) -> set[str]:
    inner = [_names(value) for value in code.co_consts if isinstance(value, CodeType)]
    return set(code.co_names).union(*inner)


def _reading(value: Any) -> str | None:
    """A text that is equal for equal values in every process; None for a kind of value that has none."""
    if isinstance(value, ModuleType):
        return f"module {value.__name__} {getattr(value, '__version__', '')}".rstrip()
    if isinstance(value, type):
        methods = "".join(_code(f.__code__) for f in vars(value).values() if isinstance(f, FunctionType))
        return f"class {value.__module__}.{value.__qualname__} {_digest(methods.encode())}"
    if isinstance(value, FunctionType):
        defaults = [*(value.__defaults__ or ()), *sorted((value.__kwdefaults__ or {}).items())]
        text = _code(value.__code__) + "".join(_value(item) for item in defaults if _is_data(item))
        return f"{value.__module__}.{value.__qualname__} {_digest(text.encode())}"
    if isinstance(value, partial):
        return _callable(value)
    if _is_data(value):
        return _value(value)
    if isinstance(value, logging.Logger):
        return f"logger {value.name}"
    if callable(value) and hasattr(value, "__qualname__"):  # a builtin
        return f"{getattr(value, '__module__', '')}.{value.__qualname__}"
    return None


def _is_data(value: Any) -> bool:
    if isinstance(value, (*_PLAIN, np.ndarray, np.generic, torch.Tensor)):
        return True
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_data, value))
    return isinstance(value, Mapping) and all(_is_data(k) and _is_data(v) for k, v in value.items())
