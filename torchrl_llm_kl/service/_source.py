"""What a model was made from, as a text: equal for equal models, in every process."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from functools import partial
from types import CellType, CodeType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

__all__ = ["describe_source"]


def describe_source(model: Any, factory: Callable[[], Any] | None) -> str:
    """Name, code and arguments of the factory; or class of the model, and a digest of its weights."""
    if factory is not None:
        return f"factory {_callable(factory)}"
    digest = hashlib.blake2b(digest_size=6)
    for name, value in (model.state_dict() if isinstance(model, nn.Module) else {}).items():
        digest.update(name.encode())
        if isinstance(value, torch.Tensor):
            digest.update(_bytes(value))
    return f"{type(model).__name__} {digest.hexdigest()}"


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
    digest = hashlib.blake2b(_code(code).encode() + "".join(map(_value, extra)).encode(), digest_size=6)
    return f"{name} {digest.hexdigest()}"


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _object(value: Any) -> str:
    """Class and state of something that may hold anything."""
    try:
        return f"{type(value).__qualname__} {hashlib.blake2b(pickle.dumps(value), digest_size=6).hexdigest()}"
    except Exception:
        return f"{type(value).__qualname__} {_value(getattr(value, '__dict__', None))}"


def _code(code: CodeType) -> str:
    """What a function does; not where it stands."""
    constants = [_code(value) if isinstance(value, CodeType) else _value(value) for value in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def _value(value: Any) -> str:
    if isinstance(value, nn.Module):
        return describe_source(value, None)
    if isinstance(value, torch.Tensor):
        return hashlib.blake2b(_bytes(value), digest_size=6).hexdigest()
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape} {hashlib.blake2b(value.tobytes(), digest_size=6).hexdigest()}"
    if isinstance(value, dict):
        return "{" + ", ".join(sorted(f"{_value(key)}: {_value(item)}" for key, item in value.items())) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(_value, value))) + "}"
    if callable(value):
        return _callable(value)
    text = repr(value)
    return _object(value) if " at 0x" in text else text  # an address is another in each process
