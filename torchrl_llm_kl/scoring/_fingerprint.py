"""The identity of a model: a digest of its configuration and all its weights."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from types import CodeType
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchrl_llm_kl._numerics import check_not_a_name
from torchrl_llm_kl.scoring._asked import asked, call_of, has
from torchrl_llm_kl.scoring._model import adapter_state
from torchrl_llm_kl.scoring._wrapper import is_wrapper, unwrap
from torchrl_llm_kl.scoring._wrapping import Ranks, unwrapped

_CHUNK = 16 * 2**20  # bytes hashed at a time
# Attributes of modules that do not change scores, or differ between equal models.
_IGNORED = {"training", "gradient_checkpointing", "name_or_path"}
_LIBRARIES = ("torch", "transformers", "peft")


def fingerprint_of(model: object) -> str:
    """The digest of a model's configuration and weights: 32 hexadecimal digits.

    Equal for equal models in any process and on any device, whatever path they were loaded from. It covers the configuration;
    the class and plain attributes of each module; name, dtype, shape and all bytes of each parameter and buffer; and which
    PEFT adapters are active, with their factors. The rotary frequencies of a transformers model count by its configuration
    alone. About 1 GB/s for each CPU core, up to 8.

    Args:
        model: a module, or a TorchRL wrapper around one.

    Raises:
        TypeError: if the weights are not in this process.
        ValueError: if they are sharded over ranks.

    Example:
        >>> layer = torch.nn.Linear(2, 2)
        >>> before = fingerprint_of(layer)
        >>> _ = torch.nn.init.zeros_(layer.bias)
        >>> len(before), fingerprint_of(layer) == before
        (32, False)
    """
    module = module_of(model)
    if Ranks([model, module]).groups:
        raise ValueError(f"{type(module).__name__} is sharded over ranks: take the fingerprint of the model before.")
    tensors = dict(_tensors(module))
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        distinct = {_memory_place(tensor): tensor for tensor in tensors.values()}  # tied weights are read once
        digests = dict(zip(distinct, pool.map(_digest_of_tensor, distinct.values()), strict=True))
    whole = blake2b(structure(module).encode(), digest_size=16)
    for name, tensor in sorted(tensors.items()):
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode() + digests[_memory_place(tensor)])
    return whole.hexdigest()


def module_of(model: object) -> nn.Module:
    """The module that a model is, or wraps; a TypeError if it is in another process."""
    check_not_a_name(model=model)
    module = unwrapped(unwrap(model) if is_wrapper(model) else model)
    if not isinstance(module, nn.Module):
        raise TypeError(f"{type(model).__name__} has no weights in this process: state what they are, as fingerprint=.")
    return module


# ---------------------------------------------------------------------- tensors


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by name; a tensor of several parts, such as a quantised one, by its parts."""
    named = dict(nn.Module.named_parameters(module, remove_duplicate=False))
    for prefix, part in module.named_modules(remove_duplicate=False):
        if not (_of_library(part) and any(name.endswith("inv_freq") for name in part._buffers)):
            named |= {f"{prefix}.{name}": buffer for name, buffer in part._buffers.items() if buffer is not None}
    for name, tensor in named.items():
        yield from _parts(name, tensor.detach())


def _parts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if not has(tensor, "__tensor_flatten__"):
        yield name, tensor
        return
    inner, about = cast(Any, tensor).__tensor_flatten__()
    for part in inner:
        yield from _parts(f"{name}.{part} {about}", getattr(tensor, part))


def _memory_place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device


def _digest_of_tensor(tensor: Tensor) -> bytes:
    digest, flat = blake2b(digest_size=16), tensor.detach().reshape(-1)
    for chunk in flat.split(max(1, _CHUNK // max(1, flat.element_size()))):
        digest.update(chunk.contiguous().cpu().view(torch.uint8).numpy())
    return digest.digest()


# ---------------------------------------------------------------------- everything else


def structure(model: nn.Module) -> str:
    """What decides a model's scores besides its tensors, as text: configuration, classes, plain attributes, adapters."""
    parts = [_config(model)]
    for name, module in model.named_modules():
        kind = type(module)
        plain = {}
        if not kind.__module__.startswith("transformers."):  # theirs follow from the configuration
            plain = {
                key: value
                for key, value in vars(module).items()
                if key[0] != "_" and key not in _IGNORED and isinstance(value, (bool, int, float, str))
            }
        parts.append(f"{name} {kind.__module__}.{kind.__qualname__} {sorted(plain.items())}")
    return "\n".join([*parts, repr(adapter_state(model))])


def _config(model: nn.Module) -> str:
    config = asked(model, "config", object)
    settings = config if isinstance(config, dict) else call_of(config, "to_dict", {})
    return json.dumps(_lasting(settings), sort_keys=True, default=lambda value: type(value).__qualname__)


def _lasting(value: object) -> object:
    """Without the entries that say where a model came from and how it is run."""
    if not isinstance(value, dict):
        return value
    drop = ("architectures", "transformers_version", "dtype", "torch_dtype", "use_cache")
    return {str(key): _lasting(item) for key, item in value.items() if str(key)[0] != "_" and key not in drop}


def code_of(model: nn.Module) -> str:
    """The versions of the libraries whose modules a model consists of, and the code of all other forwards, as text."""
    code = set()
    for kind in {type(module) for module in model.modules()}:
        library = kind.__module__.split(".")[0]
        if library in _LIBRARIES:
            version = asked(sys.modules.get(library), "__version__", str)
            code |= set() if library == "torch" else {f"{library} {version}"}
        else:
            own = asked(kind.forward, "__code__", CodeType)
            code.add(f"{kind.__qualname__} {'' if own is None else _code(own)}")
    return " ".join(sorted(code))


def _code(code: CodeType) -> str:
    constants = [_code(value) if isinstance(value, CodeType) else repr(value) for value in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def _of_library(module: nn.Module) -> bool:
    return type(module).__module__.split(".")[0] in _LIBRARIES
