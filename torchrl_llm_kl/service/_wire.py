"""The messages between clients and replicas: requests and replies as plain bytes, weights as a mapping of tensors."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

# The settings but the last one, and version, caller and newest.
_FIELDS = 8


@dataclass(frozen=True)
class Settings:
    """How to score; requests with equal settings share a batch."""

    temperature: float = 1.0  # divides the logits
    adapters: bool | str = True  # False for the base model of a PEFT model; or one adapter's name
    dtype: str | None = None  # of the body, by autocast: "bfloat16"; None for the model's own
    entropy: bool = False  # whether to return entropies
    remember: bool = False  # whether to cache keys and values for requests that continue these sequences
    deterministic: bool = False  # whether scores must not depend on the other requests of a batch

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """``dtype`` as torch's object; a ValueError if torch has no floating-point type of that name."""
        if self.dtype is None:
            return None
        found = getattr(torch, self.dtype, None)
        if not isinstance(found, torch.dtype) or not found.is_floating_point:
            raise ValueError(f"dtype must be the name of a floating-point type such as 'bfloat16', got {self.dtype!r}.")
        return found


@dataclass(frozen=True, eq=False)
class Request:
    """Sequences to score, concatenated."""

    tokens: np.ndarray  # int32 or int64 [N]
    lengths: np.ndarray  # int64 [S]
    mask: np.ndarray | None  # packed bits of a boolean [N]; None for all but the first token of each sequence
    settings: Settings
    version: int | None = None  # required version of the weights; None for any
    caller: str = ""  # the sender; batches are fair between callers
    newest: int = 0  # latest version that the caller has seen: a replica with an older one missed an update or lost it
    deaths: int = 0  # replicas that died while they held it: it shares no batch with others

    @classmethod
    def of(
        cls,
        tokens: Tensor,
        lengths: Tensor,
        mask: Tensor | None,
        settings: Settings,
        *,
        version: int | None,
        caller: str,
    ) -> Request:
        """From flat integer tokens ``[N]``, lengths ``[S]`` and a boolean mask ``[N]``; a TypeError for other dtypes."""
        values = tokens.detach().cpu()
        if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
            raise TypeError(f"token ids must be whole numbers (int64), got {values.dtype}.")
        if mask is not None and mask.dtype != torch.bool:
            raise TypeError(f"the mask must be boolean, got {mask.dtype}.")
        narrow = values.numel() == 0 or (int(values.max()) < 2**31 and int(values.min()) >= -(2**31))
        ids = (values.int() if narrow else values.long()).numpy()
        bits = None if mask is None else np.packbits(mask.detach().cpu().numpy())
        return cls(ids, lengths.cpu().numpy(), bits, settings, version, caller)

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.shape[0])

    def rows(self) -> list[Tensor]:
        """Token ids of each sequence, int64."""
        return list(torch.from_numpy(self.tokens.astype(np.int64)).split(self.lengths.tolist()))

    def flat_mask(self) -> Tensor:
        """True at the tokens to score; ``[N]``."""
        if self.mask is not None:
            return torch.from_numpy(np.unpackbits(self.mask, count=self.num_tokens).astype(bool))
        starts = np.cumsum(self.lengths) - self.lengths
        mask = torch.ones(self.num_tokens, dtype=torch.bool)
        mask[torch.from_numpy(starts[self.lengths > 0])] = False
        return mask

    def digest(self) -> str:
        """Equal for requests of the same tokens, masks and settings."""
        found = hashlib.blake2b(json.dumps(astuple(self.settings)).encode(), digest_size=16)
        for array in (self.lengths.astype(np.int64), self.tokens.astype(np.int64), self.mask):
            found.update(b"" if array is None else array.tobytes())
        return found.hexdigest()

    def pack(self) -> bytes:
        masks = [] if self.mask is None else [self.mask]
        head = (
            self.tokens.dtype.itemsize,
            bool(masks),
            *astuple(self.settings)[:-1],
            self.version,
            self.caller,
            self.newest,
            # Only where set: releases without them read all other requests, and refuse these.
            *([self.settings.deterministic] if self.settings.deterministic or self.deaths else []),
            *([self.deaths] if self.deaths else []),
        )
        return _join(head, self.lengths.astype(np.int64), self.tokens, *masks)

    @classmethod
    def unpack(cls, packed: bytes) -> Request:
        (width, masked, *settings), parts = _split(packed)
        *plain, version, caller, newest = settings[:_FIELDS]
        flags = settings[_FIELDS:]  # those that are set: deterministic, deaths
        deterministic, deaths = flags[:1] == [True], flags[1] if len(flags) > 1 else 0
        scoring = replace(Settings(*plain), deterministic=deterministic)
        tokens = np.frombuffer(parts[1], np.int32 if width == 4 else np.int64)
        mask = np.frombuffer(parts[2], np.uint8) if masked else None
        return cls(
            tokens,
            np.frombuffer(parts[0], np.int64),
            mask,
            scoring,
            version,
            caller,
            newest,
            deaths,
        )


@dataclass(frozen=True, eq=False)
class Reply:
    """Scores at the ``K`` masked-in tokens of a request, in nats."""

    log_prob: np.ndarray  # float32 or float64 [K]
    entropy: np.ndarray | None  # same type, [K]; None if not requested
    version: int  # of the weights that they come from

    def pack(self) -> bytes:
        entropies = [] if self.entropy is None else [self.entropy]
        return _join((self.log_prob.dtype.itemsize, self.version), self.log_prob, *entropies)

    @classmethod
    def unpack(cls, packed: bytes) -> Reply:
        (width, version), parts = _split(packed)
        numbers = [np.frombuffer(part, np.float32 if width == 4 else np.float64) for part in parts]
        return cls(numbers[0], numbers[1] if len(numbers) > 1 else None, version)


def _join(head: tuple[object, ...], *arrays: np.ndarray) -> bytes:
    """A JSON head with the sizes of the arrays, then the arrays: Ray sends one object faster than several."""
    text = json.dumps([head, [array.nbytes for array in arrays]]).encode()
    return b"".join((struct.pack("<I", len(text)), text, *(array.tobytes() for array in arrays)))


def _split(packed: bytes) -> tuple[list[Any], list[memoryview]]:
    view = memoryview(packed)
    start = 4 + struct.unpack_from("<I", view)[0]
    head, sizes = json.loads(bytes(view[4:start]))
    parts = []
    for size in sizes:
        parts.append(view[start : start + size])
        start += size
    return head, parts


def state_dict_of(weights: Any) -> dict[str, Tensor]:
    """Tensors under their ``state_dict()`` names.

    ``weights`` is a module (for a TorchRL wrapper, its model is used), a TensorDict of parameters (nested, as in torchrl's
    collectors), or a mapping.
    """
    if isinstance(weights, nn.Module):
        inner = getattr(weights, "model", None)
        wrapped = hasattr(weights, "input_mode") and isinstance(inner, nn.Module)
        found = dict((inner if wrapped and inner is not None else weights).state_dict())
    elif isinstance(weights, TensorDictBase):
        found = {key: value.data for key, value in weights.flatten_keys(".").items()}
    elif isinstance(weights, Mapping):
        found = dict(weights)
    else:
        raise TypeError(
            f"weights must be a module, a TensorDict or a mapping of names to tensors, got {type(weights).__name__}."
        )
    for name, value in found.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"weights must be tensors, got {type(value).__name__} for {name!r}.")
    return found
