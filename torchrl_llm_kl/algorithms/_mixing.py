"""Batches that mix rollouts and experts' answers."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.data import ReplayBuffer, ReplayBufferEnsemble

from torchrl_llm_kl.ragged import has_entry

_MASK = "loss_mask"
_COUNTS = ("denominators", "value_denominators")


def mix_buffers(
    rollouts: ReplayBuffer,
    experts: ReplayBuffer,
    *,
    batch_size: int,
    expert_data_ratio: float = 0.5,
    expert_mask_key: NestedKey = "expert_mask",
    tokens_key: NestedKey = ("tokens", "full"),
) -> ReplayBufferEnsemble:
    """A replay buffer whose batches hold rollouts and experts' answers in a fixed proportion.

    Experts' rows get 0 for each entry that only rollouts have (rewards, advantages, log-probs): nothing reads it, since
    objectives for mixed data tell the rows apart by ``expert_mask``. A ``loss_mask`` that some rows have is True for the
    others. Denominators that :meth:`AlgorithmParts.prepare` wrote belong to another batch and are dropped: a mixed batch has
    its own mean, or its own :meth:`AlgorithmParts.count`.

    Args:
        rollouts: what the policy sampled, prepared (:meth:`AlgorithmParts.prepare`).
        experts: answers of experts: tokens, and what tells prompt from response.

    Keyword Args:
        batch_size: rows of a batch.
        expert_data_ratio: the experts' share.
        expert_mask_key: where to write which rows are experts'; bool ``[B]``.
        tokens_key: where the tokens are.

    Returns:
        A :class:`~torchrl.data.ReplayBufferEnsemble`; for a share of ``m / n`` its ``sample()`` returns a lazy stack
        ``[n, batch_size / n]``: rollouts first, then ``m`` times experts. The losses of this package take it as it is.

    Raises:
        ValueError: if the batch does not divide in that proportion.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyStackStorage
        >>> def buffer(token):
        ...     tokens = TensorDict(full=torch.full((4, 3), token), batch_size=[4])
        ...     buffer = ReplayBuffer(storage=LazyStackStorage(4), batch_size=2)
        ...     buffer.extend(TensorDict(tokens=tokens, batch_size=[4]))
        ...     return buffer
        >>> mix_buffers(buffer(1), buffer(2), batch_size=4).sample()["expert_mask"].tolist()
        [[False, False], [True, True]]

    Source: Trinity-RFT 0.6.0, sample strategy ``mix``.
    """
    if not 0 < expert_data_ratio < 1:
        raise ValueError(f"expert_data_ratio must lie between 0 and 1, got {expert_data_ratio}.")
    share = Fraction(expert_data_ratio).limit_denominator(batch_size)
    if batch_size % share.denominator or abs(float(share) - expert_data_ratio) > 1e-6:
        raise ValueError(
            f"a batch of {batch_size} cannot hold exactly {expert_data_ratio:g} of experts: use a ratio n / {batch_size}."
        )
    flags = [False] * (share.denominator - share.numerator) + [True] * share.numerator
    return ReplayBufferEnsemble(
        *(experts if flag else rollouts for flag in flags),
        sample_from_all=True,
        batch_size=batch_size,
        collate_fn=_Mixed(flags, expert_mask_key, tokens_key),
    )


class _Mixed:
    """Collates the samples of the members into one lazy stack."""

    def __init__(self, flags: Sequence[bool], mask_key: NestedKey, tokens_key: NestedKey) -> None:
        self.flags, self.mask_key, self.tokens_key = list(flags), mask_key, tokens_key

    def __call__(self, samples: Sequence[TensorDictBase]) -> TensorDictBase:
        members = [[row.copy() for row in sample.reshape(-1).unbind(0)] for sample in samples]
        for row in (row for rows in members for row in rows):
            for key in _COUNTS:
                row.pop(key, None)
        example = members[self.flags.index(False)][0]
        masks = [row[_MASK] for rows in members for row in rows if has_entry(row, _MASK)]
        for flag, rows in zip(self.flags, members, strict=True):
            for row in rows:
                if flag:
                    self._complete(row, example)
                if masks:
                    self._fill_mask(row, masks[0])
                row.set(self.mask_key, torch.tensor(flag))
        return lazy_stack([lazy_stack(rows) for rows in members])

    def _complete(self, row: TensorDictBase, example: TensorDictBase) -> None:
        length, tokens = len(example[self.tokens_key]), len(row[self.tokens_key])
        known = set(row.keys(True, True))
        for key, value in example.items(True, True):
            if (
                key in known
                or not isinstance(value, Tensor)
                or _is_inside(key, "tokens", "masks", _MASK, self.mask_key)
            ):
                continue
            shape = [tokens if size == length and at == 0 else size for at, size in enumerate(value.shape)]
            row.set(key, torch.zeros(shape, dtype=value.dtype, device=value.device))

    def _fill_mask(self, row: TensorDictBase, example: Tensor) -> None:
        if not has_entry(row, _MASK):
            shape = example.shape if example.numel() == 1 else (len(row[self.tokens_key]), *example.shape[1:])
            row.set(_MASK, torch.ones(shape, dtype=torch.bool, device=example.device))


def _is_inside(key: Any, *roots: Any) -> bool:
    return key in roots or (isinstance(key, tuple) and key[0] in roots)
