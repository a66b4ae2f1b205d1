"""One model, or two side by side, over a request: the passes of each, and the head."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, cast

import torch
from torch import Tensor

from torchrl_llm_kl.head import Kept
from torchrl_llm_kl.scoring._cache import CacheLookup, PrefixKVCache
from torchrl_llm_kl.scoring._checkpoints import CheckpointError
from torchrl_llm_kl.scoring._invariant import BLOCK, PACK
from torchrl_llm_kl.scoring._model import Setup, body_and_head, drops_layers, frequency_switches, send
from torchrl_llm_kl.scoring._options import ScoreOptions
from torchrl_llm_kl.scoring._passes import PackedPass, PaddedPass, padded_batches
from torchrl_llm_kl.scoring._request import ScoreRequest
from torchrl_llm_kl.scoring._routing import Routing, tell_apart
from torchrl_llm_kl.scoring._scores import Columns, States, columns_of_nothing, join_columns, read
from torchrl_llm_kl.scoring._tree import PrefixTree
from torchrl_llm_kl.scoring._wrapping import ErrorGuard, Ranks, inside, is_out_of_memory

_SMALLEST_PACK = 16


class Local(Protocol):
    """What is used of a :class:`~torchrl_llm_kl.LogProbScorer`."""

    memory: PrefixKVCache
    tokens_per_batch: int | None
    head_chunk: int
    forwards: int
    options: ScoreOptions

    def _setup(self, default: torch.device, options: ScoreOptions) -> Setup: ...

    def _warn_apart(self, reason: str) -> None: ...


def run(
    scorers: Sequence[Local],
    ranks: Ranks,
    request: ScoreRequest,
    routings: list[Routing | None],
    options: ScoreOptions,
) -> tuple[Tensor, Columns]:
    """Score every masked-in token under a model, and under a reference if a second scorer is given.

    Returns flat elements ``[K]`` on the CPU, and their scores on the model's device.
    """
    device, of_reference = request.layout.values.device, options.sampling.of_reference
    setups = [scorers[0]._setup(device, options)]
    setups += [scorer._setup(device, replace(scorer.options, sampling=of_reference)) for scorer in scorers[1:]]
    if any(frequency_switches(setup.model) for setup in setups):
        request = replace(request, whole=True)
    tree, caches = None, []
    if all(setup.route.packed for setup in setups):
        if options.grad and drops_layers(setups[0].model):
            scorers[0]._warn_apart("Layers are dropped at random: set layerdrop to 0, or call eval().")
        else:
            tree = tree_of(request, routings)
        if (
            options.remember
            and not options.grad
            and not any(routings)
            and all(scorer.memory.limit for scorer in scorers)
        ):
            caches = [scorer.memory for scorer in scorers]
    budget = min(map(budget_of, scorers, setups))
    while True:
        try:
            return _attempt(scorers, setups, ranks, request, routings, tree, caches, options, budget)
        except CheckpointError as error:
            if options.deterministic:
                raise ValueError(
                    f"deterministic=True, but the model cannot be scored in packs with gradient. {error}"
                ) from error
            tree, caches = None, []
            scorers[0]._warn_apart(str(error))
            continue
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if options.deterministic:
                raise  # another budget would round otherwise
            if budget <= (
                ranks.most(max(request.forward_lengths.tolist(), default=0)) if tree is None else _SMALLEST_PACK
            ):
                raise  # the budget cannot shrink further
        budget //= 2
        for scorer in scorers:
            scorer.tokens_per_batch = budget
        warnings.warn(
            f"out of memory: LogProbScorer continues with tokens_per_batch={budget}. Pass that or less to avoid the retry.",
            stacklevel=4,
        )
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _attempt(
    scorers: Sequence[Local],
    setups: list[Setup],
    ranks: Ranks,
    request: ScoreRequest,
    routings: list[Routing | None],
    tree: PrefixTree | None,
    caches: list[PrefixKVCache],
    options: ScoreOptions,
    budget: int,
) -> tuple[Tensor, Columns]:
    """Forward and read the whole request, ``budget`` tokens at a time; returns what :func:`run` does."""
    lookups: list[CacheLookup] = []
    if tree is not None:
        plain = not options.beside and len(setups) == 1 and request.top_ids is None and request.kept is None
        for setup, cache in zip(setups, caches, strict=False):
            cache.bind(setup, ranks)
            lookups.append(CacheLookup(cache, request, tree, values=plain))
        # Both models run side by side: use only hits of both caches.
        cached = [min(both) for both in zip(*(lookup.cached for lookup in lookups), strict=True)]
        for lookup in lookups:
            lookup.cached = cached
    passes = passes_of(setups, request, routings, tree, lookups, budget)
    models = [(setup.model, *body_and_head(setup.model)) for setup in setups if setup.route.path == "head"]
    guard = ErrorGuard([body for _, body, _ in models], ranks)
    found = inside(models, partial(_forward_all, scorers, setups, ranks, guard, request, passes, lookups, options))
    guard.check()
    if routings[0] is not None and routings[0].records:
        found[1]["routing"] = passes[0].chosen()
    return found


def passes_of(
    setups: list[Setup],
    request: ScoreRequest,
    routings: Sequence[Routing | None],
    tree: PrefixTree | None,
    lookups: Sequence[CacheLookup],
    budget: int,
) -> Sequence[PackedPass | PaddedPass]:
    """The forwards of each model: packs of a tree, or padded micro-batches without one."""
    if tree is None:
        batches = padded_batches(request.forward_lengths, budget, *(setup.model for setup in setups))
        return [PaddedPass(setup, request, batches, of) for setup, of in zip(setups, routings, strict=True)]
    return [
        PackedPass(setup, request, tree, budget, lookups[i] if lookups else None, routings[i])
        for i, setup in enumerate(setups)
    ]


def budget_of(scorer: Local, setup: Setup) -> int:
    """The most tokens of a forward."""
    default = PACK if setup.options.deterministic else 1024 if setup.device.type == "cpu" else 16384
    return scorer.tokens_per_batch or default


def tree_of(request: ScoreRequest, routings: Sequence[Routing | None]) -> PrefixTree:
    """A prefix is shared among sequences that route it alike."""
    ids = tell_apart(request.tokens.values, *(each.record for each in routings if each is not None))
    return PrefixTree.build(request.tokens.like(ids), request.forward_lengths)


def _forward_all(
    scorers: Sequence[Local],
    setups: list[Setup],
    ranks: Ranks,
    guard: ErrorGuard,
    request: ScoreRequest,
    passes: Sequence[PackedPass | PaddedPass],
    lookups: list[CacheLookup],
    options: ScoreOptions,
) -> tuple[Tensor, Columns]:
    """Run all packs or micro-batches, and the head."""
    grad, device, tile = options.grad, setups[0].device, BLOCK if options.deterministic else None
    # Layers that ranks share are called, and have a backward, equally often on each rank.
    number = ranks.most(max(1, len(passes[0].elements))) if ranks.groups else len(passes[0].elements)
    elements: list[Tensor] = [torch.zeros(0, dtype=torch.long)]
    parts: list[Columns] = []
    held: list[tuple[Tensor, Tensor, list[States]]] = []

    def add(some: Tensor, targets: Tensor, states: list[States]) -> None:
        if request.kept is not None:
            kept = request.kept.take(some)
            states[0] = replace(states[0], kept=Kept(*(send(x, states[0].source.device) for x in kept[:2])))
        ids = None if request.top_ids is None else send(request.top_ids[some], device)
        ref, chunk = states[1] if len(states) > 1 else None, scorers[0].head_chunk
        work = partial(read, states[0], targets, options, ref, ids, chunk=chunk, recompute=grad, tile=tile)
        if columns := guard.compute(work):
            parts.append(columns)

    for index in range(number):
        for scorer in scorers:
            scorer.forwards += 1
        missing = index >= len(passes[0].elements)
        some = elements[0] if missing else passes[0].elements[index]
        found = [
            guard.forward(each.setup.model, each.run_dummy if missing else partial(each.run, index)) for each in passes
        ]
        if guard.error is not None or (some.numel() == 0 and not (ranks.groups and grad)):
            continue
        states = cast(list[States], found)
        elements.append(some)
        targets = send(request.tokens.values[some], device)
        if grad and all(each.head is not None for each in states):
            # The graph holds hidden states anyway, and a single head call yields a single gradient of its weight.
            held.append((some, targets, states))
        else:
            add(some, targets, states)
    if held:
        some, targets = (torch.cat(each) for each in list(zip(*held, strict=True))[:2])
        columns_of_states = zip(*(states for *_, states in held), strict=True)
        states = [replace(each[0], source=torch.cat([part.source for part in each])) for each in columns_of_states]
        add(some, targets, states)
    columns = join_columns(parts) if parts else columns_of_nothing(request, options, len(setups) > 1, device)
    if guard.error is not None:
        return elements[0], columns
    element = torch.cat(elements)
    for lookup, name in zip(lookups if request.kept is None else [], ("log_prob", "ref_log_prob"), strict=False):
        lookup.finish(element, columns[name].cpu())
    if lookups and lookups[0].element.numel():  # only if nothing but log-probs is requested
        element = torch.cat([element, lookups[0].element])
        columns["log_prob"] = torch.cat([columns["log_prob"], lookups[0].values.to(device)])
    return element, columns
