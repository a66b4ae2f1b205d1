"""Attention inside a pack: each piece attends to the pieces it follows and to itself, and to no other.

Transformers' models look up how to attend by a name in their configuration. While a pack is scored that name is ours.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["KeysValues", "PackLayout", "PackPiece", "attend", "pack_attention"]

NAME = "torchrl_llm_kl_pack"
# Queries at a time where keys come from elsewhere or are limited by a window: bounds the mask.
_ROWS = 512

# Keys and values of some tokens, one pair for each time the model attends: [1, heads, tokens, size].
KeysValues = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class PackPiece:
    """One piece of a pack.

    Args:
        first: its first place in the pack.
        last: the place after its last one.
        past: the piece of the same pack that it follows, -1 if there is none.
        outside: keys and values of all tokens before it, in order, if it follows a piece that is in no earlier place
            of the pack.
        keep: whether its keys and values are wanted afterwards.
    """

    first: int
    last: int
    past: int
    outside: list[KeysValues]
    keep: bool


@dataclass(eq=False)
class PackLayout:
    """The pieces of a pack, and what a forward finds out about them.

    Args:
        pieces: in the order of the pack, without gaps.
        kept: keys and values of each piece to keep, after the forward.
        calls: how often the model has attended in this forward.
    """

    pieces: list[PackPiece]
    kept: dict[int, KeysValues] = field(default_factory=dict)
    calls: int = 0
    masks: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kept = {i: [] for i, piece in enumerate(self.pieces) if piece.keep}
        self.followed = {piece.past for piece in self.pieces}


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
    options: dict[str, Any] = {"scale": scaling, "dropout_p": dropout}
    keys: dict[int, Tensor] = {}
    values: dict[int, Tensor] = {}
    out = []
    for i, piece in enumerate(layout.pieces):
        k, v = key[:, :, piece.first : piece.last], value[:, :, piece.first : piece.last]
        if i in layout.kept:
            # A copy, so that the rest of the pack is freed; with gradient the graph holds it anyway.
            layout.kept[i].append((k, v) if k.requires_grad else (k.clone(), v.clone()))
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
    return torch.cat(out, 2).transpose(1, 2), None


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
    if at not in layout.masks:
        rows, offset, width, window = shape
        distance = (
            torch.arange(rows, device=query.device).unsqueeze(-1) + offset - torch.arange(width, device=query.device)
        )
        hidden = distance < 0
        if window is not None:
            hidden |= distance >= window
        layout.masks[at] = torch.zeros(rows, width, device=query.device, dtype=query.dtype).masked_fill_(
            hidden, -torch.inf
        )
    return layout.masks[at]


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
