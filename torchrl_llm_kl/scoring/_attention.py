"""Attention within a pack: each piece attends to itself and to the earlier pieces of its sequences.

transformers looks up the attention function by a name in the configuration. While a pack is scored, and while its
checkpointed layers are recomputed in the backward, that name is the one registered here.

In a compiled body the attention of a layer is one operator. It looks up its pack when it runs, so one graph serves all
packs.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from torchrl_llm_kl._numerics import send, widen
from torchrl_llm_kl._private import (
    ATTENTION,
    CHECKPOINTS,
    FEWEST_PRODUCTS,
    FLASH,
    backward_keeps_graph,
    backward_task,
    compiled_call,
    default_dispatch,
    mark_dynamic,
    onednn_linear,
    tensor_leaves,
)
from torchrl_llm_kl._typing import asked
from torchrl_llm_kl.scoring._checkpoints import (
    ABSENT,
    ADVICE,
    CheckpointError,
    Followed,
    Swap,
    follow,
    saving,
    settings_of,
    swapped,
)
from torchrl_llm_kl.scoring._model import Inspection, body_and_head, configs_of, locked, modules_of

if TYPE_CHECKING:
    from torchrl_llm_kl.scoring._context import Exchange

#: Keys and values of some tokens, ``[1, heads, tokens, size]``, one pair for each attention call of a forward.
KeysValues = list[tuple[Tensor, Tensor]]

NAME = "torchrl_llm_kl_pack"
# Queries per attention call where a mask is needed. It bounds the size of the mask.
_ROWS = 512
# An accelerator attends to a whole pack in one call if the pack has at most this many pairs of a query and a key: a small
# mask costs less than several kernels per piece. The number is a guess.
_AT_ONCE = 2**22

# Pieces attend in one call of at most this many keys.
_TOGETHER = 2048

_ACTIVE = threading.local()


@dataclass(frozen=True, eq=False)
class PackPiece:
    """Consecutive tokens of a pack, where each follows the one before it in some sequence."""

    first: int  # place of its first token in the pack
    last: int  # place after its last token
    past: int  # index of the piece that it continues, -1 if that is not in this pack
    outside: list[KeysValues]  # keys and values of its prefix from earlier packs, in order


#: Gradients of keys and values from the backwards of later packs. A key is the id of the list and the attention call. A
#: value is the number of the backward and the two gradients.
Gradients = dict[tuple[int, int], tuple[int, Tensor, Tensor]]


class Recorded(NamedTuple):
    """An attention call in a compiled body, with its own autograd graph."""

    out: Tensor
    own: list[Tensor]  # query, key, value, and sinks if the layer has them
    past: list[Tensor]  # keys and values of :meth:`PackLayout.outside`, alternating


class Inputs(NamedTuple):
    """The arguments of an attention call. Query, key and value are ``[b, heads, n, size]``."""

    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None
    scale: float | None
    dropout: float
    window: int | None
    softcap: float | None

    @property
    def has_own_scores(self) -> bool:
        """Whether the scores are soft-capped or have sinks. torch's own attention supports neither."""
        return self.softcap is not None or self.sinks is not None


@dataclass(eq=False)
class PackLayout(Followed):
    """The pieces of a pack and the state of its forward."""

    pieces: list[PackPiece]  # in order, without gaps
    # The first token, the place after the last one, and the list to which the forward appends their keys and values.
    kept: list[tuple[int, int, KeysValues]] = field(default_factory=list)
    gradients: Gradients | None = None  # shared by all packs of a call, or None unless the body is compiled
    recorded: dict[int, Recorded] = field(default_factory=dict)  # by attention call, until its backward
    recomputes: bool = False  # True while a checkpoint recomputes the forward
    number: int = field(default_factory=itertools.count().__next__)
    calls: int = 0  # attention calls so far
    has_window: bool = False  # whether any layer passed a sliding window
    shared: dict[object, Any] = field(default_factory=dict)  # masks and indices for all attention calls
    attend: Callable[..., Tensor] | None = None  # replaces :func:`_attend`
    exchange: Exchange | None = None  # with the ranks that forward other packs at the same time
    attention: str = "blocks of a fixed size, for deterministic=True"  # how the last call attended, for an explanation
    saving: tuple[bool, object] = (False, None)

    @contextmanager
    def again(self, model: Inspection, call: int) -> Iterator[None]:
        """Context for a recomputation that starts at attention call ``call`` of the forward."""
        with locked(model.model), pack_attention(model, replace(self, kept=[], calls=call, recomputes=True)):
            yield

    def past(self, call: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values from earlier packs for an attention call."""
        return [kept[call] for kept in self.outside()]

    def outside(self) -> list[KeysValues]:
        """The lists of keys and values from earlier packs, each once."""
        return list({id(kept): kept for piece in self.pieces for kept in piece.outside}.values())

    @property
    def fits_one_call(self) -> bool:
        """Whether the pack has several parts and a mask of all pairs of a query and a key is small."""
        outside, queries = self.outside(), self.pieces[-1].last
        pairs = queries * (queries + sum(kept[0][0].shape[2] for kept in outside))
        return len(self.pieces) + len(outside) > 1 and pairs <= _AT_ONCE

    def mask(self, rows: int, past: int, width: int, window: int | None, like: Tensor) -> Tensor:
        """A mask ``[rows, width]``: 0 where a query sees a key, else ``-inf``. ``past`` keys precede the first query."""
        at = (rows, past, width, window, like.device, like.dtype)
        if at not in self.shared:
            hidden = torch.full((rows, width), -torch.inf, device=like.device, dtype=like.dtype)
            mask = hidden.triu(past + 1)
            self.shared[at] = mask if window is None else mask.add_(hidden.tril_(past - window))
        cached: Tensor = self.shared[at]
        return cached

    def begin(self, key: Tensor, value: Tensor, window: int | None) -> int:
        """Start an attention call: keep the keys and values that later packs need, and return the number of the call."""
        call, self.calls = self.calls, self.calls + 1
        self.has_window |= window is not None
        for first, last, kept in self.kept:
            k, v = key[:, :, first:last], value[:, :, first:last]
            # A copy lets the rest of the pack be freed. With gradient the graph holds all of it anyway.
            kept.append((k, v) if k.requires_grad else (k.clone(), v.clone()))
        return call


@contextmanager
def pack_attention(model: Inspection, layout: PackLayout) -> Iterator[None]:
    """Context in which the model attends within a pack, in this thread. The model's attributes are restored at the end.

    Raises:
        NotImplementedError: if the body's attention cannot be replaced, or uses more than a causal mask and a window.
    """
    body, configs = model.of(body_and_head)[0], model.of(_configs)
    if not configs or not asked(body, FLASH, bool):
        raise NotImplementedError(f"{type(body).__name__} has an attention function that cannot be replaced.")
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attention)
    swaps: list[Swap] = [(config, ATTENTION, getattr(config, ATTENTION), NAME) for config in configs]
    fast = not torch.is_grad_enabled() and layout.attend is None and layout.gradients is None
    if fast:  # A forward that is replaced costs more than a small product gains.
        size = FEWEST_PRODUCTS / layout.pieces[-1].last
        large = [x for x in model.of(_linears) if x.in_features * x.out_features >= size and x.weight.is_cpu]
        swaps += [(x, "forward", ABSENT, partial(_linear, x)) for x in large]
    for module, inside in _walk(body) if model.of(hooked) else ():
        if (call_attribute := compiled_call(module)) is not None and not inside:
            swaps.append((module, *call_attribute, partial(_call_compiled, call_attribute[1], layout)))
        for name in CHECKPOINTS:
            if name in module.__dict__:
                function = module.__dict__[name]
                in_graph = inside or (call_attribute is not None and not _checkpoints_outside(module))
                bound = (
                    _in_graph(function) if in_graph else partial(follow, function, layout, partial(layout.again, model))
                )
                swaps.append((module, name, function, bound))
    layout.saving = saving()
    with swapped(swaps):
        _ACTIVE.layout = layout
        try:
            yield
        finally:
            _ACTIVE.layout = None


def _configs(model: nn.Module) -> list[Any]:
    """The configurations inside the body that name an attention function."""
    return [config for config in configs_of(modules_of(body_and_head(model)[0])) if hasattr(config, ATTENTION)]


def _linears(model: nn.Module) -> list[nn.Linear]:
    """The body's plain linear layers."""
    modules = modules_of(body_and_head(model)[0])
    return [x for x in modules if type(x) is nn.Linear and "forward" not in x.__dict__]


def hooked(model: nn.Module) -> list[nn.Module]:
    """The modules of the body that are compiled or hold a checkpoint function."""
    modules = modules_of(body_and_head(model)[0])
    return [x for x in modules if compiled_call(x) or not x.__dict__.keys().isdisjoint(CHECKPOINTS)]


def _linear(module: nn.Linear, input: Tensor) -> Tensor:
    """The forward of a linear layer without gradient, with oneDNN's product where that is faster."""
    output = onednn_linear(input, module.weight, module.bias)
    return nn.Linear.forward(module, input) if output is None else output


def _checkpoints_outside(module: nn.Module) -> bool:
    """Whether a module checkpoints its ``__call__`` and not its forward, as layers of transformers before 5.23 do."""
    return type(module).__call__ is not nn.Module.__call__


def _walk(module: nn.Module, inside: bool = False) -> Iterator[tuple[nn.Module, bool]]:
    """Yield all modules, and for each whether it is inside a compiled one."""
    yield module, inside
    inside = inside or compiled_call(module) is not None
    for child in module.children():
        yield from _walk(child, inside)


# ---------------------------------------------------------------------- activation checkpointing in a graph


def _in_graph(function: Callable[..., object]) -> Callable[..., object]:
    """The checkpoint function of a layer inside a compiled module: everything but the attention is recomputed."""
    settings = settings_of(function)
    if settings is None or settings.keys() - {"use_reentrant", "preserve_rng_state"}:
        return _refuse
    return _saving_attention(settings.get("preserve_rng_state", True))


@cache  # the same function object each time, or every call would compile new graphs
def _saving_attention(preserve_rng_state: bool) -> Callable[..., object]:
    saved = partial(create_selective_checkpoint_contexts, [torch.ops.torchrl_llm_kl.pack_attention.default])
    return partial(checkpoint, preserve_rng_state=preserve_rng_state, use_reentrant=False, context_fn=saved)


def _refuse(*_: object, **__: object) -> object:
    raise CheckpointError


# ---------------------------------------------------------------------- attention


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
    **_: object,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls, from ``[1, heads, N, size]`` to ``[1, N, heads, size]``."""
    inputs = Inputs(query, key, value, s_aux, scaling, dropout, sliding_window, softcap)
    layout = None if torch.compiler.is_compiling() else _active(type(module).__name__)
    by_operator = layout is None or layout.gradients is not None
    own_mask = (None if attention_mask is None else attention_mask.shape) != ((1, 1, 1, 1) if by_operator else None)
    if own_mask or not asked(module, "is_causal", bool, True):
        raise NotImplementedError(f"{type(module).__name__} passes its own attention mask, which packs cannot apply.")
    if layout is None or layout.gradients is not None:
        assert attention_mask is not None
        return _attend_by_operator(inputs, attention_mask), None
    layout.check_saving()
    call = layout.begin(key, value, sliding_window)
    if layout.exchange is None:
        return _attend(layout, layout.past(call), inputs), None
    key, value, past = layout.exchange(call, key, value, layout.outside())
    return _attend(layout, past, inputs._replace(key=key, value=value)), None


def _active(who: str) -> PackLayout:
    """The layout of the pack that runs in this thread. ``who`` names the caller in the error."""
    layout = asked(_ACTIVE, "layout", PackLayout)
    if layout is not None:
        return layout
    if backward_task() >= 0:
        raise RuntimeError(f"{who} was recomputed without its pack: {ADVICE}, or pass share_prefixes=False.")
    raise RuntimeError(f"{who} ran while a LogProbScorer scored its model in another thread: run them in turn.")


def _attend(layout: PackLayout, past: list[tuple[Tensor, Tensor]], inputs: Inputs) -> Tensor:
    """Attend piece by piece, small ones of one length together, from ``[1, heads, N, size]`` to ``[1, N, heads, size]``.

    ``past`` holds the keys and values of ``layout.outside()`` in this attention call.
    """
    if layout.attend is not None:
        return layout.attend(layout, past, inputs)
    obstacle = _varlen_obstacle(inputs)
    if obstacle is None:
        layout.attention = "all pieces in one variable-length kernel"
        return _attend_varlen(layout, past, inputs)
    if inputs.query.device.type != "cpu" and layout.fits_one_call:
        layout.attention = "all pieces in one call with a mask, " + obstacle
        return _attend_at_once(layout, past, inputs)
    layout.attention = "piece by piece, " + obstacle
    if "batches" not in layout.shared:
        # Dropout draws its numbers piece by piece, as in compiled layers.
        layout.shared["batches"] = _batches(layout, inputs.query.device, together=not inputs.dropout)
    batches, order = layout.shared["batches"]
    before = {id(kept): pair for kept, pair in zip(layout.outside(), past, strict=True)} if past else {}
    seen: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values up to the end of each piece that others continue
    out = []
    for batch in batches:
        q, k, v = (batch.rows(x) for x in inputs[:3])
        piece, length = layout.pieces[batch.pieces[0]], q.shape[2]
        pairs = [seen[piece.past]] if piece.past >= 0 else [before[id(kept)] for kept in piece.outside]
        if pairs:
            pairs = [(a.expand(len(q), -1, -1, -1), b.expand(len(q), -1, -1, -1)) for a, b in pairs]
            k, v = (torch.cat(parts, 2) for parts in zip(*pairs, (k, v), strict=True))
        for row, i in batch.followed:
            seen[i] = k[row : row + 1], v[row : row + 1]
        if not pairs and (inputs.window is None or length <= inputs.window):
            attended = attend_block(Inputs(q, k, v, *inputs[3:]), None)
        else:
            blocks = _blocks(layout, Inputs(q, k, v, *inputs[3:]))
            attended = torch.cat([attend_block(block, mask) for block, mask in blocks], 2)
        out.append(attended.transpose(1, 2).flatten(0, 1))
    joined = out[0] if len(out) == 1 else torch.cat(out)
    return (joined if order is None else joined[order]).unsqueeze(0).contiguous()


class Batch(NamedTuple):
    """Pieces of one length that continue the same prefix and attend in one call."""

    pieces: list[int]
    places: slice | Tensor  # the places of their tokens in the pack, row after row
    followed: list[tuple[int, int]]  # row and index of each piece that others continue

    def rows(self, values: Tensor) -> Tensor:
        """The rows of the pieces, from ``[1, heads, N, size]`` to ``[b, heads, n, size]``."""
        chosen = values[:, :, self.places] if isinstance(self.places, slice) else values.index_select(2, self.places)
        return chosen.view(chosen.shape[1], len(self.pieces), -1, chosen.shape[3]).transpose(0, 1)


def _batches(layout: PackLayout, device: torch.device, *, together: bool = True) -> tuple[list[Batch], Tensor | None]:
    """The batches of a pack, parents before children, and the place of each token among all their rows.

    The places are None if they are in the order of the pack. Pieces of other lengths would need padding, which rounds
    otherwise than a plain forward. Without ``together`` each piece is a batch.
    """
    pieces, groups, past = layout.pieces, dict[object, list[int]](), list[int]()  # past: keys before each piece
    lengths = [piece.last - piece.first for piece in pieces]
    for i, piece in enumerate(pieces):
        outside = sum(kept[0][0].shape[2] for kept in piece.outside)
        past.append(past[piece.past] + lengths[piece.past] if piece.past >= 0 else outside)
        alike = (lengths[i], piece.past, *map(id, piece.outside)) if together else i
        groups.setdefault(alike, []).append(i)
    followed = {piece.past for piece in pieces}
    batches, order = list[Batch](), list[int]()
    for group in groups.values():
        count = max(1, _TOGETHER // (past[group[0]] + lengths[group[0]]))
        for chosen in (group[i : i + count] for i in range(0, len(group), count)):
            order += chosen
            index: slice | Tensor = slice(pieces[chosen[0]].first, pieces[chosen[-1]].last)
            if chosen[-1] - chosen[0] >= len(chosen):  # not neighbours
                index = send(torch.cat([torch.arange(pieces[i].first, pieces[i].last) for i in chosen]), device)
            batches.append(Batch(chosen, index, [(row, i) for row, i in enumerate(chosen) if i in followed]))
    if order == [*range(len(pieces))]:
        return batches, None
    joined = torch.cat([torch.arange(pieces[i].first, pieces[i].last) for i in order])
    return batches, send(joined.argsort(), device)


def _attend_at_once(layout: PackLayout, past: list[tuple[Tensor, Tensor]], inputs: Inputs) -> Tensor:
    """Attend to all pieces in one call, with a mask over all pairs of a query and a key."""
    query, key, value = inputs[:3]
    at = ("pairs", inputs.window, query.dtype)
    if at not in layout.shared:
        seen = key_index(layout)
        mask = torch.full((layout.pieces[-1].last, int(seen[-1][-1]) + 1), -torch.inf, dtype=query.dtype)
        for piece, keys in zip(layout.pieces, seen, strict=True):
            length = piece.last - piece.first
            mask[piece.first : piece.last, keys] = layout.mask(
                length, len(keys) - length, len(keys), inputs.window, mask
            )
        layout.shared[at] = send(mask, query.device)
    if past:
        key, value = torch.cat([*(k for k, _ in past), key], 2), torch.cat([*(v for _, v in past), value], 2)
    return attend_block(inputs._replace(key=key, value=value), layout.shared[at]).transpose(1, 2).contiguous()


def _blocks(layout: PackLayout, inputs: Inputs) -> Iterator[tuple[Inputs, Tensor]]:
    """Yield blocks of the queries with their keys, values and mask. The queries are the last tokens."""
    (query, key, value), window = inputs[:3], inputs.window
    length, past = query.shape[2], key.shape[2] - query.shape[2]
    for first in range(0, length, _ROWS):
        last = min(first + _ROWS, length)
        start = 0 if window is None else max(0, past + first - window + 1)
        mask = layout.mask(last - first, past + first - start, past + last - start, window, inputs.query)
        cols = slice(start, past + last)
        yield Inputs(query[:, :, first:last], key[:, :, cols], value[:, :, cols], *inputs[3:]), mask


def attend_block(inputs: Inputs, mask: Tensor | None) -> Tensor:
    """Attention with a mask that is added to the scores. None means causal. Returns ``[b, heads, n, size]``."""
    query, key, value, sinks, scale, dropout, _, softcap = inputs
    if not inputs.has_own_scores:
        causal, grouped = mask is None, query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, mask, dropout, causal, scale=scale, enable_gqa=grouped)
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
    return F.dropout(weights if sinks is None else weights[..., :-1], dropout) @ value


# ---------------------------------------------------------------------- one operator, for compiled layers

# A compiled graph contains an attention call as one operator and its backward as another. When the operator runs, it looks
# up the pack of its thread and records its own autograd graph under the number of the call. The backward operator finds that
# graph by the number and runs it. Gradients of keys and values from earlier packs cannot flow from one compiled graph to
# another. They are summed in `PackLayout.gradients`, and the backward of the earlier pack adds them. The link ensures the
# order: every attention call of the later pack depends on the last hidden state of the earlier one.

_LAYOUTS: weakref.WeakValueDictionary[int, PackLayout] = weakref.WeakValueDictionary()


def link(layout: PackLayout, before: Tensor | None, device: torch.device) -> Tensor:
    """A tensor ``[1, 1, 1, 1]`` that a compiled body receives as its attention mask.

    With it, the backward of ``before`` (the last hidden state of the previous pack) waits until the backward of every
    layer in this pack is done. transformers passes a mask of four dimensions unchanged to the attention of each layer.
    """
    start = torch.zeros(1, 1, 1, 1, device=device, requires_grad=torch.is_grad_enabled())
    return _Link.apply(layout, start if before is None else before, start)


class _Link(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layout: PackLayout, before: Tensor, start: Tensor) -> Tensor:
        ctx.layout = layout  # keeps the entry of _LAYOUTS alive as long as the graph
        ctx.shape, ctx.dtype = before.shape, before.dtype
        _LAYOUTS[layout.number] = layout
        return torch.zeros_like(start)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        return None, gradient.new_zeros((), dtype=ctx.dtype).expand(ctx.shape), None


def _call_compiled(function: Callable[..., object], layout: PackLayout, *args: object, **options: object) -> object:
    """Call a compiled module with a dynamic number of tokens, so that one graph serves all packs."""
    layout.check_saving()
    tensors = [x for x in tensor_leaves((args, options)) if x.ndim > 1]
    for tensor in tensors:  # the first is token ids or hidden states, [1, N, ...]
        if tensor.shape[:2] == tensors[0].shape[:2]:
            mark_dynamic(tensor, 1)
    return function(*args, **options)


def _attend_by_operator(inputs: Inputs, link: Tensor) -> Tensor:
    """Run :func:`_attend` as an operator, in a compiled graph or eagerly beside one."""
    tensors = inputs[:3]
    if link.requires_grad and not torch.is_grad_enabled():
        raise CheckpointError
    device = inputs.query.device.type
    if torch.is_autocast_enabled(device):  # autocast does not reach custom operators in a graph
        dtype = torch.get_autocast_dtype(device)
        tensors = tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)  # type: ignore[assignment]
    # Frozen layers before the first adapter need no backward, although the link requires a gradient.
    grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    link = link if grad else link.detach()
    out: Tensor = torch.ops.torchrl_llm_kl.pack_attention(*tensors, inputs.sinks, link, grad, *inputs[4:])[0]
    return out


def _operator(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, link: Tensor, grad: bool, *settings: Any
) -> tuple[Tensor, Tensor]:
    layout, inputs = _active("a compiled attention"), Inputs(query, key, value, sinks, *settings)
    if saving()[1] is not layout.saving[1]:
        raise CheckpointError
    if not grad or (layout.saving[1] is not None and not layout.recomputes):  # no backward, or one that recomputes
        call = layout.begin(key, value, inputs.window)
        out = _attend(layout, layout.past(call), inputs)
    else:
        call = layout.begin(key.detach(), value.detach(), inputs.window)
        # Copies, since inductor may reuse the memory of a tensor after its last use in the graph.
        own = [None if t is None else t.detach().clone().requires_grad_() for t in (query, key, value, sinks)]
        pairs = [(k.detach().requires_grad_(), v.detach().requires_grad_()) for k, v in layout.past(call)]
        # The checkpoint's hooks must not pack the tensors of this inner graph.
        held = saved_tensors_hooks(lambda x: x, lambda x: x) if layout.recomputes else nullcontext()
        with default_dispatch(), torch.enable_grad(), held:
            recorded = _attend(layout, pairs, Inputs(*own, *settings))  # type: ignore[arg-type]
        given = [t for t in own if t is not None]
        _LAYOUTS[layout.number].recorded[call] = Recorded(recorded, given, [t for pair in pairs for t in pair])
        out = recorded.detach().clone()
    return out, torch.tensor([layout.number, call])


def _operator_fake(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, link: Tensor, grad: bool, *settings: Any
) -> tuple[Tensor, Tensor]:
    out = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
    return out, torch.empty(2, dtype=torch.long, device="cpu")


def _operator_backward(gradient: Tensor, where: Tensor, sizes: list[int]) -> list[Tensor]:
    """Gradients of query, key, value and, if present, sinks."""
    number, call = where.tolist()
    layout, task = _LAYOUTS.get(number), backward_task()
    if layout is None or call not in layout.recorded:
        raise RuntimeError(
            "a compiled model has no record of its forward. Leave out a checkpoint around it, or pass use_reentrant=True to "
            "it. Pass retain_graph=True to a first backward."
        )
    kept_graph = backward_keeps_graph()
    out, own, past = layout.recorded[call] if kept_graph else layout.recorded.pop(call)
    with default_dispatch():
        all_gradients = torch.autograd.grad(out, [*own, *past], gradient, retain_graph=kept_graph)
    gradients, others = layout.gradients, all_gradients[len(own) :]
    assert gradients is not None, "the operator is for bodies with compiled parts"
    for kept, k, v in zip(layout.outside(), others[::2], others[1::2], strict=True):
        before = gradients.get((id(kept), call))
        if before is not None and before[0] == task:  # an entry of another backward is left over from one that failed
            k, v = before[1].add_(k), before[2].add_(v)
        gradients[id(kept), call] = task, k, v
    mine = [t.contiguous() for t in all_gradients[: len(own)]]
    for first, last, kept in layout.kept:
        if (later := gradients.pop((id(kept), call), None)) and later[0] == task:
            mine[1][:, :, first:last] += later[1]
            mine[2][:, :, first:last] += later[2]
    return mine


def _operator_backward_fake(gradient: Tensor, where: Tensor, sizes: list[int]) -> list[Tensor]:
    _, length, heads, value_size = gradient.shape
    key_heads, size, *sinks = sizes
    shapes = [(1, heads, length, size), (1, key_heads, length, size), (1, key_heads, length, value_size)]
    return [gradient.new_empty(shape) for shape in [*shapes, *((n,) for n in sinks)]]


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, key, _, sinks, link, *_ = inputs
    ctx.save_for_backward(output[1])
    ctx.sizes = [key.shape[1], key.shape[3], *(() if sinks is None else sinks.shape)]
    ctx.dtypes = link.dtype, None if sinks is None else sinks.dtype


def _gradients(ctx: Any, gradient: Tensor, _: object) -> tuple[Tensor | None, ...]:
    gradients = torch.ops.torchrl_llm_kl.pack_attention_backward(gradient, *ctx.saved_tensors, ctx.sizes)
    sinks = gradients[3].to(ctx.dtypes[1]) if len(gradients) > 3 else None
    return *gradients[:3], sinks, gradient.new_zeros((1, 1, 1, 1), dtype=ctx.dtypes[0]), None, None, None, None, None


_SETTINGS = "Tensor link, bool grad, float? scale, float dropout, SymInt? window, float? softcap"
_SCHEMA = f"(Tensor query, Tensor key, Tensor value, Tensor? sinks, {_SETTINGS}) -> (Tensor, Tensor)"
_BACKWARD_SCHEMA = "(Tensor gradient, Tensor where, SymInt[] sizes) -> Tensor[]"
_FORWARD_NAME, _BACKWARD_NAME = "torchrl_llm_kl::pack_attention", "torchrl_llm_kl::pack_attention_backward"
_forward = torch.library.custom_op(_FORWARD_NAME, _operator, mutates_args=(), schema=_SCHEMA)
_forward.register_fake(_operator_fake)
_forward.register_autograd(_gradients, setup_context=_set_up)
_backward = torch.library.custom_op(_BACKWARD_NAME, _operator_backward, mutates_args=(), schema=_BACKWARD_SCHEMA)
_backward.register_fake(_operator_backward_fake)


# ---------------------------------------------------------------------- one flash-attention call for all pieces


def _varlen_obstacle(inputs: Inputs) -> str | None:
    """The reason why the flash-attention kernel cannot attend, or None if it can."""
    if inputs.has_own_scores or inputs.dropout:
        return "since the variable-length kernel has no soft-cap, sinks or dropout"
    if not takes_varlen(inputs.query):
        return "since the variable-length kernel needs half precision on CUDA, from Ampere on, and head sizes up to 256"
    return None


def takes_varlen(query: Tensor) -> bool:
    """Whether the flash-attention kernel supports these queries: half precision, head size up to 256, Ampere or later."""
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] <= 256
        and query.shape[-1] % 8 == 0
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def _attend_varlen(layout: PackLayout, past: list[tuple[Tensor, Tensor]], inputs: Inputs) -> Tensor:
    """Attend to all pieces in one variable-length flash-attention call. Returns ``[1, N, heads, size]``."""
    query, key, value = inputs[:3]
    if "varlen" not in layout.shared:
        layout.shared["varlen"] = _varlen_index(layout, query.device)
    index, spans = layout.shared["varlen"]
    keys, values = (
        torch.cat([*before, own], 2)[0].transpose(0, 1)[index]
        for before, own in (([k for k, _ in past], key), ([v for _, v in past], value))
    )
    window = (-1 if inputs.window is None else inputs.window - 1, 0)
    attend = partial(varlen_attn, scale=inputs.scale, window_size=window, enable_gqa=query.shape[1] != key.shape[1])
    return cast(Tensor, attend(query[0].transpose(0, 1), keys, values, *spans)).unsqueeze(0)


def _varlen_index(layout: PackLayout, device: torch.device) -> tuple[Tensor, tuple[Tensor, Tensor, int, int]]:
    """The indices of the keys of all pieces, and the kernel's spans. All layers share them.

    The spans are the cumulative numbers of queries and of keys (int32, from 0) and the largest number of each.
    """
    seen = key_index(layout)
    lengths = [piece.last - piece.first for piece in layout.pieces]
    key_lengths = [len(keys) for keys in seen]
    ends = [send(torch.tensor([0, *some]).cumsum(0).int(), device) for some in (lengths, key_lengths)]
    return send(torch.cat(seen), device), (ends[0], ends[1], max(lengths), max(key_lengths))


def key_index(layout: PackLayout) -> list[Tensor]:
    """The indices of each piece's keys. They count the keys of ``layout.outside()`` and then the pack's own keys."""
    span: dict[int, Tensor] = {}
    width = 0
    for kept in layout.outside():
        span[id(kept)] = torch.arange(width, width + kept[0][0].shape[2])
        width += len(span[id(kept)])
    seen: list[list[Tensor]] = []
    for piece in layout.pieces:
        before = seen[piece.past] if piece.past >= 0 else [span[id(kept)] for kept in piece.outside]
        seen.append([*before, torch.arange(width + piece.first, width + piece.last)])
    return [torch.cat(parts) for parts in seen]
