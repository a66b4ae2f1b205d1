"""The response tokens of a batch, and numbers for each of them, on the way to padded tensors and back."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_llm_kl.advantages._entries import require
from torchrl_llm_kl.ragged import Ragged, read_ragged, same_rows, write_ragged
from torchrl_llm_kl.rollouts import TokenisingOptions
from torchrl_llm_kl.transforms._errors import MissingEntryError, entries
from torchrl_llm_kl.transforms._interface import ModelInterface
from torchrl_llm_kl.transforms._located import locate
from torchrl_llm_kl.transforms._reward import token_reward

__all__ = ["ResponseTokens"]


class ResponseTokens:
    """Which tokens count, in the layout of the data.

    Args:
        like: any number for each token; its layout is that of what is written.
        mask: response tokens; bool ``[N]``.
    """

    def __init__(self, like: Ragged, mask: Tensor) -> None:
        self.like = like
        self.mask = mask

    @classmethod
    def of(cls, td: TensorDictBase, mask_key: NestedKey | None) -> ResponseTokens:
        """By the mask under ``mask_key``; by default what losses and critics count: the response of each step.

        Raises:
            KeyError: if the data has no tokens and no mask.
            ValueError: if it does not say which tokens are the response's, or no token is.
        """
        if mask_key is not None:
            like = read_ragged(td, mask_key)
            if like is None:
                raise MissingEntryError(f"the mask is missing: expected {mask_key!r}, found: {entries(td)}")
            mask = _single(like.values, "the mask").bool()
        else:
            located = locate(td, ModelInterface(), assistant_only=True, scope="turn", options=TokenisingOptions())
            like, mask = located.tokens, located.mask
        if not bool(mask.any()):
            raise ValueError(
                f"no token counts: {mask_key or 'the mask of the response'} is False everywhere. Give keys={{'mask': ...}}"
            )
        return cls(like, mask)

    def read(self, td: TensorDictBase, key: NestedKey, what: str, advice: str) -> Tensor:
        """One number for each token; ``[N]``.

        Raises:
            KeyError: if the entry is missing.
            ValueError: if its lengths are not those of the tokens, or a number that counts is NaN or infinite.
        """
        return self._checked(self._aligned(require(td, key, what, advice), td.batch_size, what), what)

    def read_reward(self, td: TensorDictBase, key: NestedKey, what: str, advice: str) -> Tensor:
        """The same, of a reward for each token, or an outcome, which sits on the last response token."""
        value = require(td, key, what, advice)
        return self._checked(token_reward(value, self.like, self.mask, "last").values.squeeze(-1), what)

    def _aligned(self, value: Any, batch_size: torch.Size, what: str) -> Tensor:
        holder = _as_ragged(value, batch_size, what)
        found, expected = holder.container.row_sizes, self.like.container.row_sizes
        if not same_rows(holder.container, self.like.container):
            row = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), 0)
            raise ValueError(
                f"{what} must have one number for each token: row {row} has {found[row]}, and {expected[row]} tokens"
            )
        return _single(Ragged.from_slots(holder.slots(), self.like.container, self.like.keep).values, what)

    def _checked(self, values: Tensor, what: str) -> Tensor:
        bad = ~values.isfinite() & self.mask
        if bool(bad.any()):
            at = int(bad.nonzero()[0])
            row, position = int(self.like.sequence_ids[at]), int(self.like.positions[at])
            raise ValueError(
                f"{what} is {float(values[at])} at row {row}, position {position}: expected a finite number"
            )
        return values

    def padded(self, values: Tensor) -> Tensor:
        """``[N]`` to ``[S, T]``."""
        return self.like.like(values).to_padded()

    def flat(self, padded: Tensor) -> Tensor:
        """``[S, T]`` to ``[N]``."""
        return padded[self.like.padding_mask()]

    def mean(self, values: Tensor) -> Tensor:
        """Over the response tokens of each row; ``[S]``."""
        counted = torch.where(self.mask, values.to(torch.promote_types(values.dtype, torch.float32)), 0)
        return self.like.like(counted).sum() / self.like.like(self.mask).sum().clamp(min=1)

    def spread(self, per_row: Tensor) -> Tensor:
        """A number of each row on each of its response tokens, 0 elsewhere; ``[N]``."""
        return torch.where(self.mask, per_row[self.like.sequence_ids], 0)

    def write(self, td: TensorDictBase, key: NestedKey, values: Tensor) -> TensorDictBase:
        """Store ``[N]`` as ``[*B, T, 1]`` in the layout of the tokens."""
        return write_ragged(td, key, self.like.like(values.unsqueeze(-1)).slots(), self.like.container)


def _single(values: Tensor, what: str) -> Tensor:
    if values.numel() != values.shape[0]:
        raise ValueError(
            f"{what} must have one number for each token, found numbers of shape {tuple(values.shape[1:])}"
        )
    return values.reshape(-1)


def _as_ragged(value: Any, batch_size: torch.Size, what: str) -> Ragged:
    if isinstance(value, list):
        return Ragged.from_list(value, batch_size)
    if not isinstance(value, Tensor):
        raise TypeError(f"{what} must be a tensor, found {type(value).__name__}")
    if value.is_nested:
        return Ragged.from_nested(value)
    if value.ndim <= len(batch_size):
        raise ValueError(
            f"{what} must have a number for each token of the batch {tuple(batch_size)}, found shape {tuple(value.shape)}"
        )
    return Ragged.from_padded(value, batch_dims=len(batch_size))
