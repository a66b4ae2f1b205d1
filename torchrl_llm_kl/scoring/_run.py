"""One model, or two side by side, over a request: the passes of each, and the head."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, cast

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
from torchrl_llm_kl.scoring._scores import Columns, Reading, States, columns_of_nothing, join_columns
from torchrl_llm_kl.scoring._tree import PrefixTree
from torchrl_llm_kl.scoring._wrapping import ErrorGuard, Ranks, inside, is_out_of_memory

if TYPE_CHECKING:
    from torchrl_llm_kl.scoring._scorer import LogProbScorer

_SMALLEST_PACK = 16


@dataclass(eq=False)
class Run:
    """A call: every masked-in token under a model, and under a reference if there is a second scorer."""

    scorers: Sequence[LogProbScorer]
    ranks: Ranks
    request: ScoreRequest
    routings: Sequence[Routing | None]  # of each scorer
    options: ScoreOptions

    def __post_init__(self) -> None:
        device, of_reference = self.request.layout.values.device, self.options.sampling.of_reference
        self.setups = [self.scorers[0]._setup(device, self.options)]
        self.setups += [each._setup(device, replace(each.options, sampling=of_reference)) for each in self.scorers[1:]]
        if any(frequency_switches(setup.model) for setup in self.setups):
            self.request = replace(self.request, whole=True)
        self.budget = min(map(budget_of, self.scorers, self.setups))
        self.tree: PrefixTree | None = None
        if all(setup.route.packed for setup in self.setups):
            # A prefix is shared among sequences that route it alike.
            records = (each.record for each in self.routings if each is not None)
            tokens = self.request.tokens.like(tell_apart(self.request.tokens.values, *records))
            self.tree = PrefixTree.build(tokens, self.request.forward_lengths)

    def __call__(self) -> tuple[Tensor, Columns]:
        """Flat elements ``[K]`` on the CPU, and their scores on the model's device."""
        if self.tree is not None and self.options.grad and drops_layers(self.setups[0].model):
            self._part("Layers are dropped at random: set layerdrop to 0, or call eval().")
        while True:
            try:
                return self._attempt()
            except CheckpointError as error:
                if self.options.deterministic:
                    raise ValueError(f"deterministic=True with gradient needs packs. {error}") from error
                self._part(str(error))
                continue
            except (RuntimeError, MemoryError) as error:
                # With deterministic=True another budget would round otherwise.
                if not is_out_of_memory(error) or self.options.deterministic:
                    raise
                longest = max(self.request.forward_lengths.tolist(), default=0)
                if self.budget <= (self.ranks.most(longest) if self.tree is None else _SMALLEST_PACK):
                    raise  # the budget cannot shrink further
            self.budget //= 2
            for scorer in self.scorers:
                scorer.tokens_per_batch = self.budget
            warnings.warn(
                f"out of memory: LogProbScorer continues with tokens_per_batch={self.budget}. Pass that or less to avoid the "
                "retry.",
                stacklevel=4,
            )
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _part(self, reason: str) -> None:
        """Share no prefixes in this call."""
        self.tree = None
        self.scorers[0]._warn_apart(reason)

    def _attempt(self) -> tuple[Tensor, Columns]:
        """Forward and read the whole request, ``budget`` tokens at a time."""
        lookups = [] if self.tree is None else self._lookups(self.tree)
        passes = self.passes(lookups)
        models = [(setup.model, *body_and_head(setup.model)) for setup in self.setups if setup.route.path == "head"]
        guard = ErrorGuard([body for _, body, _ in models], self.ranks)
        found = inside(models, partial(self._forward_all, guard, passes, lookups))
        guard.check()
        if self.routings[0] is not None and self.routings[0].records:
            found[1]["routing"] = passes[0].chosen()
        return found

    def _lookups(self, tree: PrefixTree) -> list[CacheLookup]:
        """The cached part of the request for each model; nothing if the call does not use the caches."""
        caches: list[PrefixKVCache] = [scorer.memory for scorer in self.scorers]
        options, request = self.options, self.request
        if not options.remember or options.grad or any(self.routings) or not all(cache.limit for cache in caches):
            return []
        plain = not options.beside and len(caches) == 1 and request.top_ids is None and request.kept is None
        lookups = []
        for setup, cache in zip(self.setups, caches, strict=True):
            cache.bind(setup, self.ranks)
            lookups.append(CacheLookup(cache, request, tree, values=plain))
        # Both models run side by side: use only hits of both caches.
        cached = [min(both) for both in zip(*(lookup.cached for lookup in lookups), strict=True)]
        for lookup in lookups:
            lookup.cached = cached
        return lookups

    def passes(self, lookups: Sequence[CacheLookup] = ()) -> Sequence[PackedPass | PaddedPass]:
        """The forwards of each model: packs of the tree, or padded micro-batches without one."""
        if self.tree is None:
            models = (setup.model for setup in self.setups)
            batches = padded_batches(self.request.forward_lengths, self.budget, *models)
            pairs = zip(self.setups, self.routings, strict=True)
            return [PaddedPass(setup, self.request, batches, routing) for setup, routing in pairs]
        each = zip(self.setups, lookups or [None] * len(self.setups), self.routings, strict=True)
        return [PackedPass(setup, self.request, self.tree, self.budget, *others) for setup, *others in each]

    def _forward_all(
        self, guard: ErrorGuard, passes: Sequence[PackedPass | PaddedPass], lookups: list[CacheLookup]
    ) -> tuple[Tensor, Columns]:
        """Run all packs or micro-batches, and the head."""
        request, ranks, grad, device = self.request, self.ranks, self.options.grad, self.setups[0].device
        # Layers that ranks share are called, and have a backward, equally often on each rank.
        number = ranks.most(max(1, len(passes[0].elements))) if ranks.groups else len(passes[0].elements)
        elements: list[Tensor] = [torch.zeros(0, dtype=torch.long)]
        parts: list[Columns] = []
        held: list[tuple[Tensor, Tensor, list[States]]] = []
        for index in range(number):
            for scorer in self.scorers:
                scorer.forwards += 1
            missing = index >= len(passes[0].elements)
            some = elements[0] if missing else passes[0].elements[index]
            found = [
                guard.forward(each.setup.model, each.run_dummy if missing else partial(each.run, index))
                for each in passes
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
                parts += self._read(guard, some, targets, states)
        if held:
            some, targets = (torch.cat(each) for each in list(zip(*held, strict=True))[:2])
            of_each_model = zip(*(states for *_, states in held), strict=True)
            states = [replace(each[0], source=torch.cat([part.source for part in each])) for each in of_each_model]
            parts += self._read(guard, some, targets, states)
        reference = len(self.setups) > 1
        columns = join_columns(parts) if parts else columns_of_nothing(request, self.options, reference, device)
        if guard.error is not None:
            return elements[0], columns
        element = torch.cat(elements)
        for lookup, name in zip(lookups if request.kept is None else [], ("log_prob", "ref_log_prob"), strict=False):
            lookup.finish(element, columns[name].cpu())
        if lookups and lookups[0].element.numel():  # only if nothing but log-probs is requested
            element = torch.cat([element, lookups[0].element])
            columns["log_prob"] = torch.cat([columns["log_prob"], lookups[0].values.to(device)])
        return element, columns

    def _read(self, guard: ErrorGuard, some: Tensor, targets: Tensor, states: list[States]) -> list[Columns]:
        """The scores of some tokens; nothing after an error."""
        request, grad, tile = self.request, self.options.grad, BLOCK if self.options.deterministic else None
        own, ref = states[0], states[1] if len(states) > 1 else None
        if request.kept is not None:
            own = replace(own, kept=Kept(*(send(x, own.source.device) for x in request.kept.take(some)[:2])))
        ids = None if request.top_ids is None else send(request.top_ids[some], self.setups[0].device)
        chunk = self.scorers[0].head_chunk
        columns = guard.compute(Reading(own, targets, self.options, ref, ids, chunk, grad, tile).columns)
        return [columns] if columns else []


def budget_of(scorer: LogProbScorer, setup: Setup) -> int:
    """The most tokens of a forward."""
    default = PACK if setup.options.deterministic else 1024 if setup.device.type == "cpu" else 16384
    return scorer.tokens_per_batch or default
