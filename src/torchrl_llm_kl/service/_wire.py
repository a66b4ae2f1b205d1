"""What travels: token ids, masks, what is wanted of them, and the numbers that come back. Bytes and plain values only."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["Packed", "Reply", "Request", "Settings"]

#: A request or a reply on its way: a flat tuple of bytes, numbers, strings and None.
Packed = tuple[Any, ...]


@dataclass(frozen=True)
class Settings:
    """How a model is scored; requests that agree on it share a batch.

    Args:
        temperature: divides the logits.
        adapters: False for the base model of a PEFT one.
        dtype: of the body, by autocast: ``"bfloat16"``; None for the model's own.
        entropy: whether entropies are wanted too.
        remember: whether the sequences go on later, so that their keys and values are worth keeping.
    """

    temperature: float = 1.0
    adapters: bool = True
    dtype: str | None = None
    entropy: bool = False
    remember: bool = False

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """The dtype itself.

        Raises:
            ValueError: if torch has no floating-point type of that name.
        """
        if self.dtype is None:
            return None
        found = getattr(torch, self.dtype, None)
        if not isinstance(found, torch.dtype) or not found.is_floating_point:
            raise ValueError(f"dtype must be the name of a floating-point type such as 'bfloat16', got {self.dtype!r}")
        return found


@dataclass(frozen=True, eq=False)
class Request:
    """Sequences to score, laid end to end.

    Args:
        tokens: int32 or int64 ``[N]``.
        lengths: int64 ``[S]``.
        mask: the bits of a boolean ``[N]``, packed; None for all but first tokens.
        settings: how.
        version: of the weights; None for whichever the replica holds.
        caller: who asks, for fairness.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    mask: np.ndarray | None
    settings: Settings
    version: int | None = None
    caller: str = ""

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
        """From flat tokens ``[N]``, lengths ``[S]`` and a mask ``[N]``.

        Raises:
            TypeError: if the tokens are no whole numbers, or the mask is not boolean.
        """
        values = tokens.detach().cpu()
        if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
            raise TypeError(f"token ids must be whole numbers (int64), got {values.dtype}")
        if mask is not None and mask.dtype != torch.bool:
            raise TypeError(f"the mask must be boolean, got {mask.dtype}")
        narrow = values.numel() == 0 or (int(values.max()) < 2**31 and int(values.min()) >= -(2**31))
        return cls(
            (values.int() if narrow else values.long()).numpy(),
            lengths.cpu().numpy(),
            None if mask is None else np.packbits(mask.detach().cpu().numpy()),
            settings,
            version,
            caller,
        )

    @property
    def num_tokens(self) -> int:
        """``N``."""
        return int(self.tokens.shape[0])

    def rows(self) -> list[Tensor]:
        """Token ids of each sequence."""
        tokens = torch.from_numpy(self.tokens.astype(np.int64))
        return list(tokens.split(self.lengths.tolist()))

    def flat_mask(self) -> Tensor:
        """True at the tokens to score; ``[N]``."""
        if self.mask is not None:
            return torch.from_numpy(np.unpackbits(self.mask, count=self.num_tokens).astype(bool))
        starts = np.cumsum(self.lengths) - self.lengths
        mask = torch.ones(self.num_tokens, dtype=torch.bool)
        mask[torch.from_numpy(starts[self.lengths > 0])] = False
        return mask

    def pack(self) -> Packed:
        """What is sent."""
        return (
            self.tokens.tobytes(),
            self.tokens.dtype.itemsize,
            self.lengths.astype(np.int64).tobytes(),
            None if self.mask is None else self.mask.tobytes(),
            *astuple(self.settings),
            self.version,
            self.caller,
        )

    @classmethod
    def unpack(cls, packed: Packed) -> Request:
        """What was sent."""
        tokens, width, lengths, mask, *settings, version, caller = packed
        return cls(
            np.frombuffer(tokens, np.int32 if width == 4 else np.int64),
            np.frombuffer(lengths, np.int64),
            None if mask is None else np.frombuffer(mask, np.uint8),
            Settings(*settings),
            version,
            caller,
        )


@dataclass(frozen=True, eq=False)
class Reply:
    """Numbers at the tokens that the mask asked for.

    Args:
        log_prob: nats, float32 or float64 ``[K]``.
        entropy: nats, of the same type ``[K]``, if it was wanted.
        version: of the weights that gave them.
    """

    log_prob: np.ndarray
    entropy: np.ndarray | None
    version: int

    def pack(self) -> Packed:
        """What is sent."""
        entropy = None if self.entropy is None else self.entropy.tobytes()
        return self.log_prob.tobytes(), entropy, self.log_prob.dtype.itemsize, self.version

    @classmethod
    def unpack(cls, packed: Packed) -> Reply:
        """What was sent."""
        log_prob, entropy, width, version = packed
        kind = np.float32 if width == 4 else np.float64
        return cls(np.frombuffer(log_prob, kind), None if entropy is None else np.frombuffer(entropy, kind), version)
