"""The fingerprint of a model: equal for equal configuration and weights, in every process and on every device."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

_CHUNK = 2**26  # bytes that are copied to the CPU and hashed at once
_VOLATILE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "_attn_implementation_autoset")


def fingerprint_of(model: Any) -> str:
    """Hash of a model's configuration and of all its weights.

    For a TorchRL wrapper that of its model. Weights count with name, dtype, shape and bytes; their device does not. The
    configuration counts without the place it was loaded from.

    Args:
        model: a module, or a TorchRL wrapper around one.

    Returns:
        32 hexadecimal digits.

    Raises:
        TypeError: if there is no module whose weights could be read.

    Example:
        >>> one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        >>> fingerprint_of(one) == fingerprint_of(other)
        False
        >>> _ = other.load_state_dict(one.state_dict())
        >>> fingerprint_of(one) == fingerprint_of(other)
        True
    """
    inner = getattr(model, "model", None)
    module = inner if hasattr(model, "input_mode") and isinstance(inner, nn.Module) else model
    if not isinstance(module, nn.Module):
        raise TypeError(f"a fingerprint needs a module whose weights are in this process, got {type(model).__name__}.")
    weights = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    digest = hashlib.blake2b(_config(module), digest_size=16)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashlib releases the GIL
        for name, part in zip(weights, pool.map(_digest, weights.values()), strict=True):
            digest.update(name.encode() + b"\0" + part)
    return digest.hexdigest()


def _config(module: nn.Module) -> bytes:
    config: Any = getattr(module, "config", None)
    if not hasattr(config, "to_dict"):
        return type(module).__qualname__.encode()
    values = {key: value for key, value in config.to_dict().items() if key not in _VOLATILE}
    return json.dumps(values, sort_keys=True, default=str).encode()


def _digest(value: Tensor) -> bytes:
    found = hashlib.blake2b(f"{value.dtype} {tuple(value.shape)}".encode(), digest_size=16)
    for chunk in _chunks(value):
        found.update(chunk)
    return found.digest()


def _chunks(value: Tensor) -> Iterator[memoryview]:
    value = value.detach()
    full_tensor = getattr(value, "full_tensor", None)  # of a sharded one
    flat = (full_tensor() if full_tensor is not None else value).contiguous().flatten()
    step = max(_CHUNK // max(flat.element_size(), 1), 1)
    for part in flat.split(step):
        if part.numel():
            yield memoryview(part.cpu().view(torch.uint8).numpy())
