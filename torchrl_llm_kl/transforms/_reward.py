"""Where the outcome reward sits among the tokens, and the KL penalty beside it."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from torchrl_llm_kl.ragged import Ragged

__all__ = ["RewardPlacement", "check_reward_placement", "penalised_reward", "token_reward"]

RewardPlacement = Literal["last", "broadcast"]


def check_reward_placement(value: str) -> RewardPlacement:
    """Return ``value`` if it is a placement, else raise."""
    if value not in get_args(RewardPlacement):
        raise ValueError(f"reward_placement must be one of {get_args(RewardPlacement)}, got {value!r}")
    return value  # type: ignore[return-value]


def penalised_reward(
    reward: Any | None, kl: Ragged, mask: Tensor | None, coeff: nn.Module, placement: RewardPlacement
) -> Ragged:
    """``reward - coeff * KL`` for each token; ``[N, 1]``. See :func:`token_reward` for the reward."""
    placed = token_reward(reward, kl, mask, placement)
    weight = coeff().to(kl.values.device)
    return kl.like(torch.addcmul(placed.values, weight, kl.values.unsqueeze(-1), value=-1))


def token_reward(reward: Any | None, like: Ragged, mask: Tensor | None, placement: RewardPlacement) -> Ragged:
    """Give each token its reward: an outcome is placed, a reward that is per token already stays where it is.

    Args:
        reward: None (no reward: 0), an outcome for each sequence (``[*B]``, ``[*B, 1]``, ``[*B, 1, 1]``), or a reward for
            each token (``[*B, T, 1]``, dense or nested, or a list of rows).
        like: the sequences, with one value for each token.
        mask: the assistant's tokens; ``[N]``, None for all.
        placement: ``"last"``: an outcome sits on the last assistant token of its sequence (on the last token of a
            sequence that has none), so that the tokens of a sequence sum to it; ``"broadcast"``: on every token, as
            torchrl does.

    Returns:
        The reward of each token; ``[N, 1]``, float32 or wider.

    Raises:
        ValueError: if the reward fits neither the sequences nor the tokens.
    """
    if reward is None:
        return like.like(like.values.new_zeros(like.values.shape[0], 1))
    flat, counts = _flatten(reward, like)
    sizes = like.container.row_sizes
    flat = flat.to(device=like.values.device, dtype=torch.promote_types(flat.dtype, torch.float32))
    if counts == [1] * len(sizes):
        values = _place(flat, like, mask, placement)
    elif counts == sizes:
        values = flat if like.keep is None else flat[like.keep]
    else:
        found = tuple(reward.shape) if isinstance(reward, Tensor) and not reward.is_nested else counts
        raise ValueError(
            f"The rewards have shape {found} but the kl has {sizes} tokens per sequence. The rewards should have "
            f"one number for each sequence, or one more dimension than the KL: [*B, T, 1], one number for each token."
        )
    return like.like(values.unsqueeze(-1))


def _flatten(reward: Any, like: Ragged) -> tuple[Tensor, list[int]]:
    """All numbers of a reward, and how many each sequence has."""
    if isinstance(reward, list):
        try:
            flat = torch.cat(reward)
        except RuntimeError:  # scalars
            flat = torch.cat([row.reshape(-1) for row in reward])
        return flat.reshape(-1), [row.numel() for row in reward]
    if not isinstance(reward, Tensor):
        raise TypeError(f"expected the reward to be a tensor, found {type(reward).__name__}")
    if reward.is_nested:
        data = Ragged.from_nested(reward)
        slots = data.slots()
        features = slots.shape[1:].numel()
        return slots.reshape(-1), [size * features for size in data.container.row_sizes]
    sequences = like.num_sequences
    per_sequence = reward.numel() // max(sequences, 1)
    if reward.numel() != per_sequence * sequences:
        raise ValueError(
            f"The rewards have shape {tuple(reward.shape)}: expected one or more for each of {sequences} sequences"
        )
    return reward.reshape(-1), [per_sequence] * sequences


def _place(outcome: Tensor, like: Ragged, mask: Tensor | None, placement: RewardPlacement) -> Tensor:
    if placement == "broadcast":
        return outcome[like.sequence_ids]
    empty = (like.lengths == 0) & (outcome != 0)
    if bool(empty.any()):
        row = int(empty.nonzero()[0])
        raise ValueError(
            f"sequence {row} has no token to carry its reward of {float(outcome[row]):g}: drop empty sequences first"
        )
    last = like.offsets[1:] - 1
    if mask is not None:
        last = _last_true(like, mask, last)
    used = like.lengths > 0
    return outcome.new_zeros(like.values.shape[0]).index_put((last[used],), outcome[used])


def _last_true(like: Ragged, mask: Tensor, otherwise: Tensor) -> Tensor:
    """The last element of each sequence where the mask is True, ``otherwise`` where it is nowhere; ``[S]``."""
    count = torch.nn.functional.pad(mask.cumsum(0), (1, 0))[like.offsets]  # of True before each end
    found = count[1:] > count[:-1]
    where = mask.nonzero().squeeze(-1)
    return otherwise.index_put((found,), where[count[1:][found] - 1])
