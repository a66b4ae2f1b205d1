"""The scores of a request, computed from hidden states and the head, or from whole logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchrl_llm_kl._numerics import is_dtensor, send, widen
from torchrl_llm_kl._typing import asked
from torchrl_llm_kl.head import (
    WHOLE,
    HeadOptions,
    Kept,
    PairOptions,
    Truncation,
    dropped,
    fused_obstacle,
    linear_kept,
    linear_log_prob,
    linear_outcomes,
    linear_pair,
    linear_top_k,
    log_softmax,
    logits_kl,
)
from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.scoring._model import LogitMap, Setup, body_and_head, logit_map
from torchrl_llm_kl.scoring._options import ScoreOptions
from torchrl_llm_kl.scoring._request import ScoreRequest
from torchrl_llm_kl.scoring._wrapping import is_fsdp2, is_zero3

#: Fields of :class:`Scores` at ``n`` tokens: float32 ``[n]``, or ``[n, k]`` for the top k.
Columns = dict[str, Tensor]


class Scores(NamedTuple):
    """Per-token scores in nats, in the layout of the sequences. They are exactly 0 where the mask is False.

    Args:
        log_prob: log-probs of the tokens, ``[N]``.
        entropy: entropy of the distribution that each token was drawn from, ``[N]``.
        ref_log_prob: log-probs of the tokens under the reference, ``[N]``.
        kl: the exact KL over the whole vocabulary, ``[N]``.
        top_indices: the most probable tokens, in descending order, ``[N, k]``.
        top_log_probs: log-probs of ``top_indices``, ``[N, k]``.
        tail_log_prob: log of the total probability of all other tokens, ``[N]``. ``-inf`` if there are no others.
        collision: ``sum p ** 2`` over the vocabulary, the probability that two draws are the same token, ``[N]``.
        discriminator: ``sum p ** 2 (H + log p)``, the mean entropy discriminator ``p (H + log p)`` of a draw, ``[N]``.
        outcomes: log-probs of the ``top_ids``, and last the log of the total probability of all other tokens,
            ``[N, *M, k + 1]``.
        routing: the experts that the routers chose for each token, layer with a router and slot, int8 or int16
            ``[N, L, k]``. -1 at tokens that were not forwarded, since no scored token follows them.
        kept: the tokens that each distribution was restricted to, on the CPU. Masked-out tokens have none. Set only with
            ``return_kept``.
        version: the version of a service's weights. None for a model in this process.
    """

    log_prob: Ragged
    entropy: Ragged | None = None
    ref_log_prob: Ragged | None = None
    kl: Ragged | None = None
    top_indices: Ragged | None = None
    top_log_probs: Ragged | None = None
    tail_log_prob: Ragged | None = None
    collision: Ragged | None = None
    discriminator: Ragged | None = None
    outcomes: Ragged | None = None
    routing: Ragged | None = None
    kept: Kept | None = None
    version: int | None = None

    @property
    def per_token(self) -> dict[str, Ragged]:
        """The per-token scores that were computed, by name."""
        return {name: value for name, value in self._asdict().items() if isinstance(value, Ragged)}

    @classmethod
    def spread(cls, sequences: Ragged, elements: Tensor, log_prob: Tensor, **others: Tensor | None) -> Scores:
        """Scatter scores (``[K]`` or ``[K, k]``, by name) at flat ``elements [K]`` into the layout of ``sequences``.

        Example:
            >>> tokens = Ragged.from_list([torch.tensor([7, 8, 9])])
            >>> Scores.spread(tokens, torch.tensor([1, 2]), torch.tensor([-0.5, -1.5])).log_prob.to_list()
            [tensor([ 0.0000, -0.5000, -1.5000])]
        """
        index = send(elements, log_prob.device)

        def place(values: Tensor) -> Ragged:
            out = values.new_zeros((sequences.values.shape[0], *values.shape[1:]))
            if elements.numel() or values.requires_grad:  # a rank without tokens must take part in the backward
                out = out.index_copy_(0, index.to(out.device), values)
            return sequences.like(out.to(sequences.values.device))

        placed = {name: place(x) for name, x in others.items() if x is not None}
        return cls(place(log_prob), **placed)  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class States:
    """The distributions at ``n`` positions."""

    source: Tensor  # hidden states [n, H], or indices [n] into logits that exist already
    logits: Callable[[Tensor], Tensor]  # the model's logits [k, V] for some rows of the source
    temperature: float
    head: nn.Linear | None = None  # set if the logits are exactly `map(head(source))`
    map: LogitMap = field(default_factory=LogitMap)
    dtype: torch.dtype | None = None  # dtype of the head's products; None for the head's own
    truncation: Truncation = WHOLE
    kept: Kept | None = None  # a record, which replaces the truncation
    unfused: str | None = None  # why the fused kernel is not used, None if it is proven

    @property
    def head_options(self) -> HeadOptions:
        """The options of the linear head."""
        bias = None if self.head is None else self.head.bias
        own: HeadOptions = {"bias": bias, "scale": self.map.scale, "soft_cap": self.map.soft_cap}
        return own | {"temperature": self.temperature, "product_dtype": self.dtype}

    def tempered(self, rows: Tensor) -> Tensor:
        """Logits of the rows ``[k]``, in float32 or wider, divided by the temperature: ``[k, V]``."""
        (logits,) = widen(self.logits(self.source[rows.to(self.source.device)]))
        return logits if self.temperature == 1.0 else logits / self.temperature


class TokenStates:
    """The states that predict the scored tokens of a call, so that whole distributions can be computed after it."""

    def __init__(self) -> None:
        self._parts: list[States] = []
        self._places: dict[int, tuple[int, int]] = {}

    def add(self, elements: Tensor, states: States) -> None:
        """Add the states that predict some flat elements ``[n]``."""
        self._places.update((element, (len(self._parts), row)) for row, element in enumerate(elements.tolist()))
        self._parts.append(states)

    def log_probs(self, elements: Sequence[int]) -> Tensor:
        """The log-probs of all tokens at some flat elements, ``[n, V]``, in float32 or wider. With gradient if the call had."""
        places = [self._places[element] for element in elements]
        order = sorted(range(len(places)), key=places.__getitem__)
        # Consecutive places of one part take one product with the head.
        rows = {part: [places[i][1] for i in order if places[i][0] == part] for part in sorted({p for p, _ in places})}
        computed = [log_softmax(self._parts[part].tempered(torch.tensor(some))) for part, some in rows.items()]
        return join_tensors(computed)[torch.tensor(order).argsort().to(computed[0].device)]


def head_states(setup: Setup, hidden: Tensor) -> States:
    """The distributions that follow from hidden states ``[n, H]``.

    A head that is more than a linear layer (wrapped by an adapter, quantised or hooked) is called as a module.
    """
    head, mapped = setup.inspection.of(body_and_head)[1], setup.inspection.of(logit_map)
    weight, plain = asked(head, "weight", Tensor), _is_plain(head)
    if not plain and is_dtensor(weight):
        raise ValueError(f"the head {type(head).__name__} is sharded and more than linear: leave it out of the plan.")
    own = weight.dtype if weight is not None and weight.is_floating_point() else None
    narrow = setup.options.dtype if plain and own != torch.float64 else None
    if weight is not None:
        # Under autocast the body's output is narrower than the head's weight.
        hidden = hidden.to(weight.device, narrow or own)

    def logits(some: Tensor) -> Tensor:
        with setup.active(), torch.autocast(some.device.type, enabled=False):
            return mapped(widen(head(some if narrow is None else some.to(own)))[0])

    linear, sampling = cast(nn.Linear, head) if plain else None, setup.options.sampling
    unfused = setup.route.unfused if plain else "the head is more than a linear layer"
    return States(hidden, logits, sampling.temperature, linear, mapped, narrow, sampling.truncation, unfused=unfused)


def _is_plain(head: nn.Module) -> bool:
    """Whether the head computes ``hidden @ weight.T + bias`` and nothing else.

    Hooks of FSDP2 and ZeRO-3 are fine, since the whole score runs between them. So are the hooks of tensor parallel:
    :mod:`~torchrl_llm_kl.head` shards and gathers itself.
    """
    hooks = [*head._forward_hooks.values(), *head._forward_pre_hooks.values()]
    known = {name for name, applies in (("fsdp", is_fsdp2(head)), ("deepspeed", is_zero3(head))) if applies}
    if is_dtensor(asked(head, "weight", Tensor)):
        known.add("torch.distributed.tensor")
    # FSDP2 derives a class from FSDPModule and the module's own class.
    kind = type(head).__mro__[2] if is_fsdp2(head) else type(head)
    return kind is nn.Linear and all(any(name in hook.__module__ for name in known) for hook in hooks)


def kept_of(columns: Columns, elements: Tensor, count: int) -> Kept:
    """Remove the columns of kept tokens at ``elements [K]``, and return them as the record of all ``count`` tokens."""
    ids, counts = columns.pop("kept_ids").cpu(), columns.pop("kept_counts").cpu()
    ordered = Kept.of(ids, counts).take(elements.argsort())
    every = torch.zeros(count, dtype=torch.long).index_copy(0, elements, counts)
    return Kept.of(ordered.ids, every)


def join_columns(parts: Sequence[Columns]) -> Columns:
    """Concatenate columns by name."""
    return {name: join_tensors([part[name] for part in parts]) for name in parts[0]}


def join_tensors(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors. A single one is returned without a copy."""
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


def columns_of_nothing(request: ScoreRequest, options: ScoreOptions, reference: bool, device: torch.device) -> Columns:
    """Empty columns, with the dtypes and shapes of all requested scores."""
    # topk needs at least as many columns as it returns, even for no rows.
    width, none = max(1, options.top_k, options.sampling.top_k), torch.zeros(0, dtype=torch.long, device=device)
    nothing = States(none, lambda _: torch.zeros(0, width, device=device), 1.0, truncation=options.sampling.truncation)
    ids = None if request.top_ids is None else request.top_ids[:0].to(device)
    return HeadReading(nothing, none, options, nothing if reference else None, ids).columns()


@dataclass(frozen=True, eq=False)
class HeadReading:
    """The requested scores of some tokens, from one sweep over the distributions that predict them.

    Where whole logits are needed, they are held for ``chunk`` positions at once. With ``recompute`` they are dropped and
    computed again in the backward. With ``tile``, the head always runs on exactly that many positions.
    """

    states: States
    targets: Tensor  # [n]
    options: ScoreOptions
    ref: States | None = None  # of the reference, for a KL
    ids: Tensor | None = None  # [n, *M, k], the ids of the outcomes; with a KL they take another sweep
    chunk: int = 1024
    recompute: bool = False
    tile: int | None = None

    def columns(self) -> Columns:
        """Compute all requested scores."""
        if self.tile is None:
            return self._columns()
        count = self.targets.shape[0]
        padded = replace(self._padded(-count % self.tile), chunk=self.tile)
        return {name: values[:count] for name, values in padded._columns().items()}

    def _padded(self, after: int) -> HeadReading:
        """Append ``after`` dummy positions."""
        kept, ref, ids = self.states.kept, self.ref, self.ids
        if kept is not None:
            kept = kept._replace(offsets=F.pad(kept.offsets, (0, after), value=len(kept.ids)))
        states = replace(self.states, source=F.pad(self.states.source, (0, 0, 0, after)), kept=kept)
        ref = None if ref is None else replace(ref, source=F.pad(ref.source, (0, 0, 0, after)))
        ids = None if ids is None else F.pad(ids, (*[0, 0] * (ids.ndim - 1), 0, after))
        return replace(self, states=states, targets=F.pad(self.targets, (0, after)), ref=ref, ids=ids)

    def _columns(self) -> Columns:
        head, ref = self.states.head, self.ref
        if head is not None and (ref is None or ref.head is not None):
            return self._of_linear(head, None if ref is None else ref.head)
        read = partial(checkpoint, self._of_logits, use_reentrant=False) if self.recompute else self._of_logits
        positions = torch.arange(self.states.source.shape[0], device=self.targets.device)
        return join_columns([read(rows) for rows in positions.split(self.chunk)])

    # ------------------------------------------------------------------ a linear head, in tiles

    @property
    def unfused(self) -> str | None:
        """The reason why the log-probs do not come from the fused kernel. None if they do."""
        states, head = self.states, self.states.head
        if head is None or states.unfused:
            return states.unfused
        whole = self.ref is None and self.ids is None and states.kept is None and not states.truncation.active
        if not whole or self.options.beside or self.tile is not None:
            return "the kernel computes only log-probs over all tokens, and not in tiles of one size"
        return fused_obstacle(states.source, head.weight, **states.head_options)

    def _of_linear(self, head: nn.Linear, ref_head: nn.Linear | None) -> Columns:
        states, ref, options, tile = self.states, self.ref, self.options, self.tile
        hidden, device = states.source, states.source.device
        targets = self.targets.to(device)
        ids = None if self.ids is None else self.ids.to(device)
        own: HeadOptions = {**states.head_options, "chunk": tile}
        if ref is not None and ref.dtype != states.dtype:
            own["product_dtype"] = torch.float32  # products of the two heads in different dtypes would appear as a KL
        kept, truncation = states.kept, states.truncation
        sampled = kept is not None or truncation.active
        # A search for the kept tokens saves work, but an accelerator would wait for the host to read their number.
        finds = hidden.device.type == "cpu" or options.return_kept or options.moments
        if kept is None and truncation.active and tile is None and finds and not torch.compiler.is_compiling():
            # A returned record must hold every kept token, however many there are.
            most = head.weight.shape[0] if options.return_kept else None
            kept = linear_kept(hidden.detach(), head.weight.detach(), truncation, targets, most=most, **own)
        limits: dict[str, Any] = {"kept": kept} if kept is not None else {}
        compiling, outside = torch.compiler.is_compiling(), list[Tensor]()
        if kept is None and truncation.active:
            limits = {"truncation": truncation, "keep_targets": True, "added": None if compiling else outside}
        only_own = ref is None and ids is None and tile is None and not torch.is_grad_enabled()
        if options.beside == ("top_k",) and only_own:
            *top, log_prob = linear_top_k(hidden, head.weight, options.top_k, targets, **own)
            return {"log_prob": cast(Tensor, log_prob)} | _top_columns(*top)
        if ref is not None and ref_head is not None:
            bias = None if ref_head.bias is None else ref_head.bias.detach().to(device)
            both: PairOptions = {**own, "ref_bias": bias, "ref_scale": ref.map.scale, "ref_soft_cap": ref.map.soft_cap}
            both["ref_kept"] = options.sampling.reference == "kept"
            others = ref.source.to(device), ref_head.weight.detach().to(device)
            pair = partial(linear_pair, direction=options.direction, beta=options.beta, entropy=options.entropy)
            scores = pair(hidden, head.weight, *others, targets, **both, **limits)._asdict()
            scores["ref_log_prob"] = scores["ref_log_prob"].detach()
            if ids is not None:
                scores["outcomes"] = linear_outcomes(hidden, head.weight, targets, ids, **own).outcomes
        elif ids is not None:
            scores = linear_outcomes(hidden, head.weight, targets, ids, entropy=options.entropy, **own)._asdict()
        else:
            limits |= {"entropy": options.entropy, "fused": self.unfused is None}
            scores = linear_log_prob(hidden, head.weight, targets, **own, **limits)._asdict()
        columns = {name: values for name, values in scores.items() if values is not None}
        if options.top_k:
            columns |= _top_columns(*linear_top_k(hidden, head.weight, options.top_k, **own)[:3])
        if options.moments:
            if sampled and kept is None:
                raise ValueError(f"moments=True: {truncation} leaves too many tokens: score without it.")
            columns |= _moments(hidden, head.weight, targets, kept, own)
        if states.kept is None and truncation.active:
            outside += [torch.zeros_like(targets, dtype=torch.bool) if kept is None else cast(Tensor, kept.added)]
            columns["added"] = outside[0]
        if options.return_kept and kept is not None:
            columns |= {"kept_ids": kept.ids.long(), "kept_counts": kept.offsets.diff()}
        return columns

    # ------------------------------------------------------------------ whole logits, some positions at a time

    def _of_logits(self, rows: Tensor) -> Columns:
        states, options = self.states, self.options
        logits = states.tempered(rows)
        targets = self.targets[rows].to(logits.device)
        out = None
        columns: Columns = {}
        if states.kept is not None or states.truncation.active:
            kept = None if states.kept is None else states.kept.take(rows)
            out, added = dropped(logits, states.truncation, kept, targets)
            logits = logits.masked_fill(out, -torch.inf)
            columns |= {"added": added} if kept is None else {}
            if options.return_kept:
                columns |= {"kept_ids": (~out).nonzero()[:, 1], "kept_counts": (~out).sum(-1)}
        log_probs = log_softmax(logits)
        columns["log_prob"] = log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        # 0 * -inf is NaN, and 0 log 0 must be 0: replace -inf first.
        finite = log_probs.masked_fill(log_probs.isneginf(), 0.0) if options.entropy or options.moments else log_probs
        if options.entropy:
            columns["entropy"] = -(log_probs.exp() * finite).sum(-1)
        if self.ref is not None:
            with torch.no_grad():
                ref_logits = self.ref.tempered(rows).to(logits.device)
            if out is not None and options.sampling.reference == "kept":
                ref_logits = ref_logits.masked_fill(out, -torch.inf)
            columns["ref_log_prob"] = log_prob_at(ref_logits, targets)
            columns["kl"] = logits_kl(logits, ref_logits, direction=options.direction, beta=options.beta)
        if self.ids is not None:
            columns["outcomes"] = _outcomes(log_probs, self.ids[rows].to(logits.device))
        with torch.no_grad():
            if options.moments:
                square, entropy = log_probs.exp().square(), -(log_probs.exp() * finite).sum(-1, keepdim=True)
                columns |= {"collision": square.sum(-1), "discriminator": (square * (entropy + finite)).sum(-1)}
            if options.top_k:
                top, indices = log_probs.topk(options.top_k, -1)
                columns |= _top_columns(indices, top, log_probs.scatter(-1, indices, -torch.inf).logsumexp(-1))
        return columns


def log_prob_at(logits: Tensor, targets: Tensor) -> Tensor:
    """``log softmax(logits)`` at ``targets``, in float32 or wider: ``[n, V], [n] -> [n]``."""
    (logits,) = widen(logits)
    return log_softmax(logits).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


@torch.no_grad()
def _moments(hidden: Tensor, weight: Tensor, targets: Tensor, kept: Kept | None, own: HeadOptions) -> Columns:
    """The moments of ``p``, from the entropies of ``p`` and ``q``.

    ``q = p ** 2 / c`` with ``c = sum p ** 2`` is the softmax at half the temperature of ``p``. Then
    ``log c = 2 log p - log q`` at any token, and ``sum p ** 2 log p = c E_q[log p] = c (log c - H(q)) / 2``.
    """
    p = linear_log_prob(hidden, weight, targets, entropy=True, kept=kept, **own)
    kept = None if kept is None else kept._replace(logits=None)  # its logits have the temperature of p
    colder: HeadOptions = {**own, "temperature": own["temperature"] / 2}
    q = linear_log_prob(hidden, weight, targets, entropy=True, kept=kept, **colder)
    log_c, entropies = 2 * p.log_prob - q.log_prob, (cast(Tensor, p.entropy), cast(Tensor, q.entropy))
    collision = log_c.exp()
    return {"collision": collision, "discriminator": collision * (entropies[0] + (log_c - entropies[1]) / 2)}


def _outcomes(log_probs: Tensor, ids: Tensor) -> Tensor:
    """The outcomes of :func:`~torchrl_llm_kl.head.linear_outcomes`, computed from log-probs ``[n, V]``."""
    shape, ids = ids.shape, ids.flatten(1, -2) if ids.ndim > 2 else ids.unsqueeze(1)
    outcomes = []
    for some in ids.unbind(1):
        pads = some < 0
        listed = torch.zeros_like(log_probs).scatter_add(1, some.clamp(min=0), (~pads).to(log_probs.dtype)) > 0
        chosen = log_probs.gather(1, some.clamp(min=0)).masked_fill(pads, -torch.inf)
        # The gradient of logsumexp over only -inf is NaN. Such rows use 0 instead, and their result is replaced.
        possible = (~listed & ~log_probs.isneginf()).any(-1, keepdim=True)
        others = torch.where(possible, log_probs.masked_fill(listed, -torch.inf), 0.0).logsumexp(-1, keepdim=True)
        outcomes.append(torch.cat([chosen, others.masked_fill(~possible, -torch.inf)], -1))
    return torch.stack(outcomes, 1).view(*shape[:-1], shape[-1] + 1)


def _top_columns(indices: Tensor, log_probs: Tensor, tail: Tensor) -> Columns:
    return {"top_indices": indices, "top_log_probs": log_probs, "tail_log_prob": tail}
