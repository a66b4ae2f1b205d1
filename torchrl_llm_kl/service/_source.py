"""The source of a model as a text, to compare two clients' models."""

from __future__ import annotations

import contextlib
import hashlib
import pickle
from collections.abc import Callable
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import nn

from torchrl_llm_kl.scoring import fingerprint_of


def describe_source(model: Any, factory: Callable[[], Any] | None) -> str:
    """Name and arguments of the factory, or class and weights of the model: equal texts for equal models.

    Factories that differ in their code, or in globals that they read, alone are taken for one.
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
        return (
            f"{array.dtype} {tuple(array.shape)} {_short_digest(array.flatten().view(torch.uint8).numpy().tobytes())}"
        )
    text, name = repr(value), type(value).__qualname__
    if " at 0x" not in text and not isinstance(value, (list, tuple, dict, set, frozenset)):
        return text
    with contextlib.suppress(Exception):  # addresses differ between processes, and a container may hold long arrays
        return f"{name} {_short_digest(pickle.dumps(value))}"
    return name


def _short_digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=6).hexdigest()
