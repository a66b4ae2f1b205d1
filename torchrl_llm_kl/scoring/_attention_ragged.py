"""Attention inside a pack on a GPU: one flash-attention call for all pieces, whatever their lengths and pasts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchrl_llm_kl.scoring._device import send
from torchrl_llm_kl.scoring._pack_layout import KeysValues, PackLayout

__all__ = ["attend_ragged", "can_be_ragged"]

varlen_attn: Any
try:  # torch 2.10 and later
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None


def can_be_ragged(query: Tensor) -> bool:
    """Whether the kernel takes this: half precision, heads of at most 256, Ampere or later."""
    return (
        varlen_attn is not None
        and query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] <= 256
        and query.shape[-1] % 8 == 0
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


@dataclass(frozen=True, eq=False)
class _Rows:
    """Which keys each piece sees, the same in every layer.

    Args:
        outside: the caches that come before the pack's own keys, each once.
        index: of those and the pack's own, laid end to end: the keys of piece after piece.
        query_ends: where the queries of each piece end, from 0 on; int32.
        key_ends: where its keys do.
        most_queries: of a piece.
        most_keys: of a piece.
    """

    outside: list[KeysValues]
    index: Tensor
    query_ends: Tensor
    key_ends: Tensor
    most_queries: int
    most_keys: int


def attend_ragged(
    layout: PackLayout, call: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
) -> Tensor:
    """``[1, heads, N, size]`` to ``[1, N, heads, size]``."""
    if "rows" not in layout.cache:
        layout.cache["rows"] = _rows(layout, query.device)
    rows: _Rows = layout.cache["rows"]
    past = [cache[call] for cache in rows.outside]
    keys = torch.cat([*(k for k, _ in past), key], 2)[0].transpose(0, 1)[rows.index]
    values = torch.cat([*(v for _, v in past), value], 2)[0].transpose(0, 1)[rows.index]
    out: Tensor = varlen_attn(
        query[0].transpose(0, 1),
        keys,
        values,
        rows.query_ends,
        rows.key_ends,
        rows.most_queries,
        rows.most_keys,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.unsqueeze(0)


def _rows(layout: PackLayout, device: torch.device) -> _Rows:
    outside: dict[int, tuple[int, KeysValues]] = {}  # where each cache begins in the row of all keys
    width = 0
    for piece in layout.pieces:
        for cache in piece.outside:
            if id(cache) not in outside:
                outside[id(cache)] = (width, cache)
                width += cache[0][0].shape[2]
    seen: list[list[Tensor]] = []
    for piece in layout.pieces:
        before = seen[piece.past] if piece.past >= 0 else [_span(*outside[id(cache)]) for cache in piece.outside]
        seen.append([*before, torch.arange(width + piece.first, width + piece.last)])
    lengths = [piece.last - piece.first for piece in layout.pieces]
    key_lengths = [sum(len(part) for part in parts) for parts in seen]
    return _Rows(
        [cache for _, cache in outside.values()],
        send(torch.cat([part for parts in seen for part in parts]), device),
        send(_ends(lengths), device),
        send(_ends(key_lengths), device),
        max(lengths),
        max(key_lengths),
    )


def _span(start: int, cache: KeysValues) -> Tensor:
    return torch.arange(start, start + cache[0][0].shape[2])


def _ends(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()
