"""Pushed weights: cut into chunks for the object store, staged, checked by one replica, committed, taken by all."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_llm_kl.service._errors import WeightVersionError

#: Bytes of an object that holds weights; a larger weight is a separate object.
CHUNK = 256 * 2**20
#: The last version that a message can hold.
MAX_VERSION = 2**63 - 1

#: Type, shape and bytes of weights by name. Ray maps the bytes into memory where a copy would double them.
Chunk = dict[str, tuple[str, tuple[int, ...], np.ndarray]]


class PushedVersion(int):
    """The version of pushed weights: an ``int`` that :meth:`ScoringService.update_weights` returns.

    Attributes:
        missed: reasons of replicas that did not take the weights in time. They load them before they answer a client that has
            seen this version, and after a few seconds at the latest.

    Example:
        >>> version = service.update_weights(policy)  # doctest: +SKIP
        >>> version, version.missed  # doctest: +SKIP
        (7, ())
    """

    missed: tuple[str, ...] = ()


def chunks_of(weights: Iterable[tuple[str, Tensor]], *, size: int = CHUNK) -> Iterator[Chunk]:
    """Weights by name in chunks of at most ``size`` bytes; a larger weight is a separate chunk."""
    chunk: Chunk = {}
    held = 0
    for name, value in weights:
        if value.layout != torch.strided:
            raise TypeError(f"weights must be dense tensors, got {value.layout} for {name!r}.")
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        if chunk and held + data.nbytes > size:
            yield chunk
            chunk, held = {}, 0
        chunk[name] = (str(value.dtype).removeprefix("torch."), tuple(value.shape), data)
        held += data.nbytes
    if chunk:
        yield chunk


def tensors_of(chunk: Chunk) -> dict[str, Tensor]:
    """The weights of a chunk, on its memory: not to be written to."""
    tensors = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        for name, (dtype, shape, data) in chunk.items():
            flat = torch.from_numpy(data) if data.nbytes else torch.zeros(0, dtype=torch.uint8)
            tensors[name] = flat.view(getattr(torch, dtype)).reshape(shape)
    return tensors


def check_version(version: Any) -> int:
    """``version`` as an int; a TypeError if it is not a whole number, a WeightVersionError if no request can name it."""
    try:
        whole = operator.index(version)
    except TypeError:
        raise TypeError(f"version must be a whole number, got {version!r}.") from None
    if isinstance(version, bool):
        raise TypeError(f"version must be a whole number, got {version!r}.")
    if not 0 <= whole <= MAX_VERSION:
        raise WeightVersionError(f"version of the weights must be from 0 to {MAX_VERSION} (2^63 - 1), got {whole}.")
    return whole
