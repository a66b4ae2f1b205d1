"""Rewards per token, and the denominators of a whole batch, stored with each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_llm_kl._numerics import send, wide_dtype
from torchrl_llm_kl.ragged import Ragged, read_column, read_node
from torchrl_llm_kl.rollouts._entries import row_numbers
from torchrl_llm_kl.rollouts._keys import sub_key

# ------------------------------------------------------------------ rewards

#: Where an outcome reward goes: on the last response token, or on every token.
RewardPlacement = Literal["last", "broadcast"]


def token_reward(reward: object, like: Ragged, mask: Tensor | None, placement: RewardPlacement) -> Ragged:
    """The reward of each token: an outcome is placed, a reward per token is unchanged.

    Args:
        reward: None (0), an outcome per sequence (``[*B]``, ``[*B, 1]``, ``[*B, 1, 1]``), or a reward per token
            (``[*B, T, 1]``, dense or nested, or a list of rows).
        like: the sequences, with any value per token.
        mask: the response tokens, ``[N]``, None for all; on the CPU for no synchronisation with an accelerator.
        placement: ``"last"``: an outcome goes to the last response token of its sequence (the last token of a sequence that
            has none), so that token rewards sum to it; ``"broadcast"``: to every token, as torchrl does.

    Returns:
        ``[N, 1]``, float32 or wider.

    Raises:
        ValueError: if the reward fits neither the sequences nor the tokens.

    Example:
        >>> like = Ragged.from_list([torch.zeros(2), torch.zeros(3)])
        >>> token_reward(torch.tensor([1.0, -1.0]), like, None, "last").values.squeeze(-1).tolist()
        [0.0, 1.0, 0.0, 0.0, -1.0]
    """
    if reward is None:
        return like.like(like.values.new_zeros(like.values.shape[0], 1))
    sizes = like.container.row_sizes
    flat, counts = row_numbers(reward, len(sizes), "the reward")
    flat = flat.to(like.values.device, wide_dtype(flat.dtype))
    if counts == [1] * len(sizes):
        values = _place(flat, like, mask, placement)
    elif counts == sizes:
        values = like.at_slots(flat)
    elif like.keep is not None and counts == like.sizes:  # rows without the padding of the tokens
        values = flat
    else:
        shape = tuple(reward.shape) if isinstance(reward, Tensor) and not reward.is_nested else counts
        raise ValueError(
            f"The rewards have shape {shape} but the kl has {sizes} tokens per sequence: expected one number per sequence, or "
            "[*B, T, 1]."
        )
    return like.like(values.unsqueeze(-1))


def _place(outcome: Tensor, like: Ragged, mask: Tensor | None, placement: RewardPlacement) -> Tensor:
    if placement == "broadcast":
        return outcome[like.sequence_ids]
    host = like.outline
    for row in [row for row, size in enumerate(host.sizes) if size == 0]:
        value = float(outcome[row])
        if value:
            raise ValueError(f"sequence {row} has no token for its reward of {value:g}: drop empty sequences first.")
    last = host.offsets[1:] - 1
    if mask is not None:  # the last response token, if there is one
        places = torch.where(mask.cpu(), host.positions, -1)
        places = torch.full_like(last, -1).scatter_reduce(0, host.sequence_ids, places, "amax")
        last = torch.where(places < 0, last, host.offsets[:-1] + places)
    placed = outcome.new_zeros(like.values.shape[0])
    # An empty sequence adds its outcome, 0, to a token of another sequence.
    return placed.index_add_(0, send(last.clamp(min=0), outcome.device), outcome) if placed.numel() else placed


# ------------------------------------------------------------------ denominators


_BATCH = "batch"


def write_denominators(
    td: TensorDictBase, key: NestedKey, counts: Mapping[tuple[str, str], Tensor], batch_id: Tensor
) -> None:
    """Store the counts of a whole batch (0-dim, by name of the term and aggregation mode) with each of its rows.

    Every part of the batch then has them, under ``key`` as ``<name>/<mode>``, and beside them ``batch``: a number that no other
    batch has, by which rows that were counted apart are told from one another even if their counts are equal.
    """
    for entry, value in [*((f"{name}/{mode}", x) for (name, mode), x in counts.items()), (_BATCH, batch_id)]:
        td.set(sub_key(key, entry), value.expand(td.batch_size).clone())


def read_denominators(td: TensorDictBase, key: NestedKey, terms: Sequence[tuple[str, str]]) -> dict[str, Tensor] | None:
    """Read the counts that :func:`write_denominators` stored for ``terms`` (name, aggregation mode) from any rows of the batch.

    Returns:
        By name of the term, or None if nothing is stored. On a device, where a check on the host would wait for it, NaN if the
        rows come from batches that were counted apart.

    Raises:
        ValueError: if the rows come from batches that were counted apart, or were counted for another loss.
    """
    node = read_node(td, key) if isinstance(key, str) else td.get(key, None)
    stored = set() if node is None else set(node.keys())
    if not stored:
        return None
    for name, mode in terms:
        if f"{name}/{mode}" not in stored:
            raise ValueError(
                f"the batch was counted for {', '.join(sorted(stored - {_BATCH}))}, not for {name}/{mode}."
            )
    columns = {name: _numbers(td, sub_key(key, f"{name}/{mode}")) for name, mode in terms}
    ids = _numbers(td, sub_key(key, _BATCH))
    apart = (ids != ids[:1]).any()
    if ids.device.type != "cpu":
        return {name: torch.where(apart, torch.nan, values[0]) for name, values in columns.items()}
    if bool(apart):
        counts = "; ".join(f"{values.unique().tolist()} of {name}" for name, values in columns.items())
        raise ValueError(
            f"rows of {len(ids.unique())} batches that were counted apart ({counts}): concatenate them, then count."
        )
    return {name: values[0] for name, values in columns.items()}


def _numbers(td: TensorDictBase, key: NestedKey) -> Tensor:
    column = read_column(td, key)
    assert column is not None
    return torch.stack(column).flatten() if isinstance(column, list) else column.flatten()
