"""Attention inside a pack: each piece attends to the pieces it follows and to itself, and to no other.

Transformers' models look up how to attend by a name in their configuration. While a pack is scored that name is ours.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrl_llm_kl.scoring._attention_ragged import attend_ragged, can_be_ragged
from torchrl_llm_kl.scoring._pack_layout import PackLayout

__all__ = ["attend", "pack_attention"]

NAME = "torchrl_llm_kl_pack"
# Queries at a time where keys come from elsewhere or are limited by a window: bounds the mask.
_ROWS = 512

_ACTIVE = threading.local()


@contextmanager
def pack_attention(body: nn.Module) -> Iterator[None]:
    """Let ``body`` attend within packs inside, and as its configuration says afterwards, also after an error.

    Raises:
        NotImplementedError: if how the body attends cannot be exchanged, or means more than a causal mask and a window.
    """
    configs = _configs(body)
    if not configs or not getattr(body, "_supports_flash_attn", False):
        # What a model can do with flash attention is what arguments tell about its mask: causal, window, soft-cap, sinks.
        raise NotImplementedError(f"{type(body).__name__} has an attention of its own kind")
    _register()
    before = [config._attn_implementation_internal for config in configs]
    try:
        for config in configs:
            config._attn_implementation_internal = NAME
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation_internal = name


@contextmanager
def attend(layout: PackLayout) -> Iterator[None]:
    """The layout of the forward inside, in this thread."""
    _ACTIVE.layout = layout
    try:
        yield
    finally:
        _ACTIVE.layout = None


def _configs(body: nn.Module) -> list[Any]:
    found = {id(config): config for m in body.modules() if (config := getattr(m, "config", None)) is not None}
    return [config for config in found.values() if hasattr(config, "_attn_implementation_internal")]


def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attention)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: ``[1, heads, N, size]`` to ``[1, N, heads, size]``."""
    layout: PackLayout | None = getattr(_ACTIVE, "layout", None)
    if layout is None:
        raise RuntimeError(
            f"{type(module).__name__} was called while a LogProbScorer was scoring its model in another thread: let the two "
            "take turns, or give the scorer a copy of the model"
        )
    if attention_mask is not None or not getattr(module, "is_causal", True):
        raise NotImplementedError(f"{type(module).__name__} has an attention mask of its own")
    call, layout.calls = layout.calls, layout.calls + 1
    layout.has_window |= sliding_window is not None
    for i, kept in layout.kept.items():
        k, v = (t[:, :, layout.pieces[i].first : layout.pieces[i].last] for t in (key, value))
        # A copy, so that the rest of the pack is freed; with gradient the graph holds it anyway.
        kept.append((k, v) if k.requires_grad else (k.clone(), v.clone()))
    if softcap is None and s_aux is None and dropout == 0.0 and can_be_ragged(query):
        return attend_ragged(layout, call, query, key, value, scaling, sliding_window), None
    options: dict[str, Any] = {"scale": scaling, "dropout_p": dropout}
    keys: dict[int, Tensor] = {}
    values: dict[int, Tensor] = {}
    out = []
    for i, piece in enumerate(layout.pieces):
        k, v = key[:, :, piece.first : piece.last], value[:, :, piece.first : piece.last]
        if piece.past >= 0:
            k, v = torch.cat([keys[piece.past], k], 2), torch.cat([values[piece.past], v], 2)
        elif piece.outside:
            past = [cache[call] for cache in piece.outside]
            k, v = torch.cat([*(p[0] for p in past), k], 2), torch.cat([*(p[1] for p in past), v], 2)
        if i in layout.followed:
            keys[i], values[i] = k, v
        q = query[:, :, piece.first : piece.last]
        for rows, cols, mask in _blocks(layout, q, k, sliding_window):
            block = q[:, :, rows], k[:, :, cols], v[:, :, cols]
            if softcap is None and s_aux is None:
                causal = mask is None
                out.append(
                    F.scaled_dot_product_attention(
                        *block, attn_mask=mask, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1], **options
                    )
                )
            else:
                out.append(_plain(*block, mask, softcap=softcap, sinks=s_aux, **options))
    return torch.cat(out, 2).transpose(1, 2).contiguous(), None


def _blocks(
    layout: PackLayout, query: Tensor, key: Tensor, window: int | None
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Queries, the keys that they see, and which of these: None if each sees those up to its own place."""
    length, width = query.shape[2], key.shape[2]
    past = width - length
    if past == 0 and (window is None or length <= window):
        yield slice(0, length), slice(0, width), None
        return
    for first in range(0, length, _ROWS):
        last = min(first + _ROWS, length)
        start = 0 if window is None else max(0, past + first - window + 1)
        mask = _mask(layout, query, (last - first, past + first - start, past + last - start, window))
        yield slice(first, last), slice(start, past + last), mask


def _mask(layout: PackLayout, query: Tensor, shape: tuple[int, int, int, int | None]) -> Tensor:
    """0 at keys that a query sees, ``-inf`` at others; ``[rows, width]``. The same for every layer."""
    at = (*shape, query.device, query.dtype)
    if at not in layout.cache:
        rows, offset, width, window = shape
        distance = (
            torch.arange(rows, device=query.device).unsqueeze(-1) + offset - torch.arange(width, device=query.device)
        )
        hidden = distance < 0
        if window is not None:
            hidden |= distance >= window
        layout.cache[at] = torch.zeros(rows, width, device=query.device, dtype=query.dtype).masked_fill_(
            hidden, -torch.inf
        )
    return layout.cache[at]


def _plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scale: float | None,
    dropout_p: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention with soft-capped scores or sinks, which torch's own does not know."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        mask = torch.full(scores.shape[-2:], -torch.inf, device=scores.device, dtype=scores.dtype).triu_(1)
    scores = scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1).to(scores.dtype)], -1)
    weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    return F.dropout(weights, dropout_p) @ value
