"""Attention within a pack: each piece attends to the pieces before it in its sequences and to itself, to no other.

transformers' models look up their attention by a name in their configuration. While a pack is scored, that name is the
one registered here; and again while checkpointed layers of the pack are recomputed in the backward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrl_llm_kl._numerics import widen
from torchrl_llm_kl.scoring._model import body_and_head, locked, send

varlen_attn: Any
try:  # torch 2.10 and later
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None

#: Keys and values of some tokens, one pair for each attention call of a forward: ``[1, heads, tokens, size]``.
KeysValues = list[tuple[Tensor, Tensor]]

NAME = "torchrl_llm_kl_pack"
# The attributes that hold a module's checkpoint function: in transformers, and in torch's CheckpointWrapper.
_CHECKPOINTS = ("_gradient_checkpointing_func", "checkpoint_fn")
# Queries at a time where keys come from other packs or a window limits them: bounds the size of the mask.
_ROWS = 512

_ACTIVE = threading.local()


@dataclass(frozen=True, eq=False)
class PackPiece:
    """One piece of a pack."""

    first: int  # its first place in the pack
    last: int  # the place after its last one
    past: int  # the piece before it, -1 if that is not in the pack
    outside: list[KeysValues]  # of all tokens before it, in order, if the piece before it is not in the pack
    kept: KeysValues | None = None  # an empty list that the forward fills; None if no later pack needs them


@dataclass(eq=False)
class PackLayout:
    """The pieces of a pack, and the state of its forward."""

    pieces: list[PackPiece]  # in the order of the pack, without gaps
    calls: int = 0  # attention calls so far
    has_window: bool = False  # whether any layer passed a sliding window
    shared: dict[Any, Any] = field(default_factory=dict)  # tensors for all attention calls of the forward
    attend: Callable[..., Tensor] | None = None  # replaces the attention of this file
    saving: tuple[bool, Any] = (False, None)  # of :func:`_saving`, where the forward or its checkpoint began

    def again(self, call: int) -> PackLayout:
        """The layout for a recomputation that begins with an attention call of the forward."""
        pieces = [replace(piece, kept=None) for piece in self.pieces]
        return PackLayout(pieces, call, shared=self.shared, attend=self.attend)

    def check_saving(self) -> None:
        """Raise a :class:`CheckpointError` inside a checkpoint whose recomputation would not find this layout."""
        if _saving() != self.saving:
            raise CheckpointError(
                "Layers run in a checkpoint that is reentrant or not transformers' or torch's checkpoint_wrapper: use one of "
                "these, with use_reentrant=False."
            )


class CheckpointError(Exception):
    """Layers of a pack would be recomputed in the backward without the layout of the pack."""


def _saving() -> tuple[bool, Any]:
    """Whether a graph is recorded here, and the innermost checkpoint that drops the tensors it saves.

    A reentrant checkpoint records no graph; any other replaces saved tensors through a hook.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    pack = None if hooks is None else hooks[0]
    return torch.is_grad_enabled(), pack if getattr(pack, "__module__", "") == "torch.utils.checkpoint" else None


@contextmanager
def pack_attention(model: nn.Module, layout: PackLayout) -> Iterator[None]:
    """Context: attention within a pack, in this thread; restores the model's attributes afterwards, also after an error.

    Raises a NotImplementedError if the body's attention cannot be replaced, or is more than a causal mask and a window.
    """
    body = body_and_head(model)[0]
    found = {id(config): config for m in body.modules() if (config := getattr(m, "config", None)) is not None}
    configs = [config for config in found.values() if hasattr(config, "_attn_implementation_internal")]
    if not configs or not getattr(body, "_supports_flash_attn", False):
        # Models that support flash attention describe their mask by arguments: causal, window, soft-cap, sinks.
        raise NotImplementedError(f"{type(body).__name__} has an attention that cannot be exchanged.")
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attention)
    names = [(config, "_attn_implementation_internal", config._attn_implementation_internal) for config in configs]
    checkpoints = [(m, name, m.__dict__[name]) for m in body.modules() for name in _CHECKPOINTS if name in m.__dict__]
    layout.saving = _saving()
    try:
        for config, name, _ in names:
            setattr(config, name, NAME)
        for module, name, function in checkpoints:
            setattr(module, name, partial(_checkpoint, function, model, layout))
        _ACTIVE.layout = layout
        yield
    finally:
        _ACTIVE.layout = None
        for owner, name, value in (*names, *checkpoints):
            setattr(owner, name, value)


def _checkpoint(
    function: Callable[..., Any],
    model: nn.Module,
    layout: PackLayout,
    run: Callable[..., Any],
    *args: Any,
    **options: Any,
) -> Any:
    """``function(run, ...)``, a checkpoint; its recomputation attends as ``run`` does in the forward."""
    call = -1  # the attention call with which `run` begins; -1 until the forward

    def bound(*inputs: Any, **named: Any) -> Any:
        nonlocal call
        if call >= 0:
            with locked(model), pack_attention(model, layout.again(call)):
                return run(*inputs, **named)
        call, before = layout.calls, layout.saving
        if before[0] == torch.is_grad_enabled():  # not reentrant
            layout.saving = _saving()
        try:
            return run(*inputs, **named)
        finally:
            layout.saving = before

    layout.check_saving()
    return function(bound, *args, **options)


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
    """The function that transformers calls: ``[1, heads, N, size]`` to ``[1, N, heads, size]``."""
    layout: PackLayout | None = getattr(_ACTIVE, "layout", None)
    if layout is None:
        raise RuntimeError(
            f"{type(module).__name__} was called while a LogProbScorer was scoring its model in another thread: run one "
            "after the other, or give the scorer a copy of the model."
        )
    if attention_mask is not None or not getattr(module, "is_causal", True):
        raise NotImplementedError(f"{type(module).__name__} has its own attention mask.")
    layout.check_saving()
    call, layout.calls = layout.calls, layout.calls + 1
    layout.has_window |= sliding_window is not None
    for piece in layout.pieces:
        if piece.kept is not None:
            k, v = key[:, :, piece.first : piece.last], value[:, :, piece.first : piece.last]
            # Copy, so that the rest of the pack is freed; with gradient the graph holds it anyway.
            piece.kept.append((k, v) if k.requires_grad else (k.clone(), v.clone()))
    if layout.attend is not None:
        return layout.attend(layout, call, query, key, value, scaling, dropout, sliding_window, softcap, s_aux), None
    if softcap is None and s_aux is None and dropout == 0.0 and takes_varlen(query):
        return _attend_varlen(layout, call, query, key, value, scaling, sliding_window), None
    followed = {piece.past for piece in layout.pieces}
    seen: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values up to the end of each piece that others follow
    out = []
    for i, piece in enumerate(layout.pieces):
        k, v = key[:, :, piece.first : piece.last], value[:, :, piece.first : piece.last]
        past = [seen[piece.past]] if piece.past >= 0 else [kept[call] for kept in piece.outside]
        if past:
            k, v = torch.cat([*(p[0] for p in past), k], 2), torch.cat([*(p[1] for p in past), v], 2)
        if i in followed:
            seen[i] = k, v
        q = query[:, :, piece.first : piece.last]
        for rows, cols, mask in _blocks(layout, q, k, sliding_window):
            block = q[:, :, rows], k[:, :, cols], v[:, :, cols]
            if softcap is None and s_aux is None:
                options: dict[str, Any] = {"scale": scaling, "enable_gqa": query.shape[1] != key.shape[1]}
                out.append(F.scaled_dot_product_attention(*block, mask, dropout, is_causal=mask is None, **options))
            else:
                out.append(plain_attention(*block, mask, scaling, dropout, softcap, s_aux))
    return torch.cat(out, 2).transpose(1, 2).contiguous(), None


def _blocks(
    layout: PackLayout, query: Tensor, key: Tensor, window: int | None
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Blocks of queries, the keys that they may see, and the mask; None for a causal mask on equal lengths."""
    length, width = query.shape[2], key.shape[2]
    past = width - length
    if past == 0 and (window is None or length <= window):
        yield slice(0, length), slice(0, width), None
        return
    for first in range(0, length, _ROWS):
        last = min(first + _ROWS, length)
        start = 0 if window is None else max(0, past + first - window + 1)
        at = (last - first, past + first - start, past + last - start, window, query.device, query.dtype)
        if at not in layout.shared:
            layout.shared[at] = block_mask(*at)
        yield slice(first, last), slice(start, past + last), layout.shared[at]


def block_mask(
    rows: int, past: int, width: int, window: int | None, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """0 at keys that a query sees, ``-inf`` at others; ``[rows, width]``."""
    distance = torch.arange(rows, device=device).unsqueeze(-1) + past - torch.arange(width, device=device)
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    return torch.zeros(rows, width, device=device, dtype=dtype).masked_fill_(hidden, -torch.inf)


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    dropout: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention with soft-capped scores or sinks, which torch's own does not support."""
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
    weights = widen(scores)[0].softmax(-1).to(value.dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    return F.dropout(weights, dropout) @ value


# ---------------------------------------------------------------------- one flash-attention call for all pieces


def takes_varlen(query: Tensor) -> bool:
    """Whether the GPU kernel supports these queries: half precision, heads of at most 256, Ampere or later."""
    return (
        varlen_attn is not None
        and query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] <= 256
        and query.shape[-1] % 8 == 0
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def _attend_varlen(
    layout: PackLayout, call: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
) -> Tensor:
    """``[1, heads, N, size]`` to ``[1, N, heads, size]``."""
    if "varlen" not in layout.shared:
        layout.shared["varlen"] = _varlen_index(layout, query.device)
    outside, index, spans = layout.shared["varlen"]
    past = [kept[call] for kept in outside]
    keys = torch.cat([*(k for k, _ in past), key], 2)[0].transpose(0, 1)[index]
    values = torch.cat([*(v for _, v in past), value], 2)[0].transpose(0, 1)[index]
    out: Tensor = varlen_attn(
        query[0].transpose(0, 1),
        keys,
        values,
        *spans,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.unsqueeze(0)


def _varlen_index(
    layout: PackLayout, device: torch.device
) -> tuple[list[KeysValues], Tensor, tuple[Tensor, Tensor, int, int]]:
    """The keys of each piece, for every layer.

    Returns the keys and values from outside the pack, each once; the index that arranges these and the pack's own piece by
    piece; and the kernel's spans: cumulative query and key counts of the pieces (int32, from 0), and the most queries and
    keys of a piece.
    """
    outside, keys = key_index(layout)
    lengths = [piece.last - piece.first for piece in layout.pieces]
    key_lengths = [len(each) for each in keys]
    ends = [send(torch.tensor([0, *some]).cumsum(0).int(), device) for some in (lengths, key_lengths)]
    return outside, send(torch.cat(keys), device), (ends[0], ends[1], max(lengths), max(key_lengths))


def key_index(layout: PackLayout) -> tuple[list[KeysValues], list[Tensor]]:
    """The keys and values from outside the pack, each once; and where each piece's keys are in these and the pack's own."""
    outside = {id(kept): kept for piece in layout.pieces for kept in piece.outside}
    span: dict[int, Tensor] = {}  # the places of each in the row of all keys
    width = 0
    for name, kept in outside.items():
        span[name] = torch.arange(width, width + kept[0][0].shape[2])
        width += len(span[name])
    seen: list[list[Tensor]] = []
    for piece in layout.pieces:
        before = seen[piece.past] if piece.past >= 0 else [span[id(kept)] for kept in piece.outside]
        seen.append([*before, torch.arange(width + piece.first, width + piece.last)])
    return list(outside.values()), [torch.cat(parts) for parts in seen]
