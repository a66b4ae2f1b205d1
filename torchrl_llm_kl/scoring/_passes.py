"""A call of a scorer: the forwards of one model, or of two in step, and the head.

Models run in packs, where every distinct prefix is forwarded once and without padding. Models with a recurrent state continue
it after a shared prefix. All other models run in padded micro-batches.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Protocol, cast

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import send
from torchrl_llm_kl.head import Kept
from torchrl_llm_kl.scoring._branches import Cut, recomputed
from torchrl_llm_kl.scoring._cache import CacheLookup, PrefixKVCache
from torchrl_llm_kl.scoring._checkpoints import CheckpointError
from torchrl_llm_kl.scoring._context import checksum
from torchrl_llm_kl.scoring._forks import MIN_LENGTH, MIN_SHARED, ForkedPass, checkpoints_layers
from torchrl_llm_kl.scoring._images import ImageInputs
from torchrl_llm_kl.scoring._invariant import BLOCK, PACK
from torchrl_llm_kl.scoring._model import (
    Setup,
    body_and_head,
    call,
    drops_layers,
    frequency_switches,
    read_output,
    shards_logits,
)
from torchrl_llm_kl.scoring._options import ScoreOptions
from torchrl_llm_kl.scoring._packs import PackedPass, SharedPass
from torchrl_llm_kl.scoring._plans import padded_batches
from torchrl_llm_kl.scoring._request import ScoreRequest
from torchrl_llm_kl.scoring._routing import Routing, tell_apart
from torchrl_llm_kl.scoring._scores import (
    Columns,
    HeadReading,
    States,
    TokenStates,
    columns_of_nothing,
    head_states,
    join_columns,
    join_tensors,
)
from torchrl_llm_kl.scoring._tree import PrefixTree
from torchrl_llm_kl.scoring._wrapping import ErrorGuard, Ranks, inside, is_out_of_memory, is_sharded

_SMALLEST_PACK = 16  # tokens

# ---------------------------------------------------------------------- padded micro-batches


class PaddedPass:
    """Runs one model over a request, one micro-batch at a time. Each sequence has at least one token to forward."""

    kind: Final = "micro-batch"

    def __init__(
        self,
        setup: Setup,
        request: ScoreRequest,
        batches: list[Tensor],
        routing: Routing | None = None,
        images: ImageInputs | None = None,
    ) -> None:
        self.setup, self.routing, self.images, self._rows = setup, routing, images, batches
        self._batches = [request.padded(rows) for rows in batches]
        self.elements = [batch.elements for batch in self._batches]  # flat indices that each micro-batch predicts

    def elsewhere(self, element: Tensor) -> int:
        """0, since a micro-batch holds whole sequences."""
        return 0

    def cut(self, index: int) -> list[Cut]:
        """Nothing, since no micro-batch reads another one."""
        return []

    def readers(self, index: int) -> set[int]:
        """None."""
        return set()

    def run_dummy(self) -> States:
        """Forward a dummy token, since layers that ranks share must be called on all of them. Returns no positions."""
        ids = torch.zeros(1, 1, dtype=torch.long)
        return self._run(ids, torch.ones_like(ids), torch.zeros(0, dtype=torch.long))

    def run(self, index: int) -> States:
        """Run a micro-batch, and return the states that predict ``elements[index]``."""
        ids, real, slots = (send(part, self.setup.device) for part in self._batches[index][:3])
        sources = self._batches[index].sources.flatten()
        with self.routing.forward(sources, self.setup.device) if self.routing else nullcontext():
            if self.images is not None and (given := self.images.arguments(self._rows[index].tolist(), ids)):
                return self._run(ids, real, slots, given)
            return self._run(ids, real, slots)

    def _run(self, ids: Tensor, real: Tensor, slots: Tensor, images: dict[str, object] | None = None) -> States:
        setup = self.setup
        options: dict[str, object] = {"attention_mask": real} if setup.route.mask else {}
        if images is not None:
            options = {"attention_mask": real, **images}
        elif setup.route.positions:
            positions = torch.arange(ids.shape[1]).expand(ids.shape).contiguous()
            options["position_ids"] = send(positions, setup.device)
        with setup.active():
            if setup.route.path == "full":
                logits = read_output(call(setup.model, ids, use_cache=False, **options), "logits")
                if shards_logits(setup.model, logits):
                    raise ValueError('the logits are sharded: use tp_plan={"lm_head": "colwise_gather_output"}.')
                # Counted from the end, since prompt tuning puts virtual tokens before the sequence.
                logits = logits[:, -ids.shape[1] :].flatten(0, 1)
                places, temperature = slots.to(logits.device), setup.options.temperature
                return States(
                    places, lambda some: logits[some], temperature, truncation=setup.options.sampling.truncation
                )
            text = nullcontext(setup.inspection.of(body_and_head)[0])
            with text if images is None or self.images is None else self.images.forward() as body:
                output = call(body, ids, use_cache=False, **options)
            return head_states(setup, read_output(output, "last_hidden_state").flatten(0, 1)[slots])


# ---------------------------------------------------------------------- a call

Pass = PackedPass | ForkedPass | PaddedPass


class RunScorer(Protocol):
    """The attributes of a :class:`~torchrl_llm_kl.LogProbScorer` that a call uses."""

    options: ScoreOptions
    tokens_per_batch: int | None
    head_chunk: int
    forwards: int

    @property
    def memory(self) -> PrefixKVCache:
        """The cache of ``remember``."""

    def _setup(self, default: torch.device, options: ScoreOptions) -> Setup: ...
    def _warn_apart(self, reason: str, where: str = ...) -> None: ...


@dataclass(eq=False)
class ScoringRun:
    """One call: scores every masked-in token under a model, and under a reference if there is a second scorer."""

    scorers: Sequence[RunScorer]
    ranks: Ranks
    request: ScoreRequest
    routings: Sequence[Routing | None]  # one for each scorer
    options: ScoreOptions
    states: TokenStates | None = None  # keeps the states of the first model

    def __post_init__(self) -> None:
        device, options = self.request.layout.values.device, self.options
        self.setups = [self.scorers[0]._setup(device, options)]
        for each in self.scorers[1:]:
            self.setups.append(each._setup(device, replace(each.options, sampling=options.sampling.of_reference)))
        if any(setup.inspection.of(frequency_switches) for setup in self.setups):
            self.request = replace(self.request, whole=True)
        self.budget = min(map(budget_of, self.scorers, self.setups))
        self.tree: PrefixTree | None = None
        self.forks = False
        images, tokens = self.request.images, self.request.tokens
        self.images = [ImageInputs(setup, images, tokens) for setup in self.setups if images is not None]
        # Both models forward the same packs, so they must share prefixes in the same way.
        sharing = {setup.route.sharing for setup in self.setups}
        if len(sharing) == 1 and None not in sharing:
            # Sequences share a prefix only if they also route it alike.
            records = (each.record for each in self.routings if each is not None)
            values = self.images[0].keys() if self.images else tokens.values
            tokens = tokens.like(tell_apart(values, *records))
            self.forks = "forks" in sharing
            lengths = self.request.forward_lengths
            # A step for a short prefix costs more than it saves.
            least = {"min_shared": MIN_SHARED, "min_length": MIN_LENGTH} if self.forks else {}
            self.tree = PrefixTree.build(tokens, lengths, **least)
        if self.images:
            self._place_images()
        if self.ranks.context is not None:
            with self.ranks.together():
                self._check_context()

    def _check_context(self) -> None:
        """Raise a ValueError if the ranks of a context cannot share this call."""
        settings = self.budget, self.options, *(setup.options for setup in self.setups)
        if not self.ranks.same_context(checksum(self.request, *settings)):
            raise ValueError(
                "context_parallel, but the ranks have different sequences, masks, records, options or tokens_per_batch: give "
                "all ranks the same."
            )
        if self.tree is None or self.forks:
            self._check_packs(
                "it has a recurrent state, other frequencies for long sequences or an attention of its own, or "
                "share_prefixes is False"
            )

    def _check_packs(self, reason: str) -> None:
        """Raise a ValueError if this call needs packs."""
        if self.ranks.context is not None:
            model = type(self.setups[0].model).__name__
            raise ValueError(f"context_parallel needs packs, which {model} cannot run: {reason}. Leave it out.")

    def _place_images(self) -> None:
        """Compute the packs' inputs with the models' own code. If that fails, do not share prefixes."""
        whole = replace(self.request, whole=True)
        if self.tree is not None and not self.forks:
            needed = self.tree.forwarded(len(whole.mask))
            batches = padded_batches(whole.forward_lengths, self.budget, *(setup.model for setup in self.setups))
            padded = [(rows.tolist(), x.ids, x.real, x.sources) for rows in batches for x in [whole.padded(rows)]]
            if all(images.prepare(padded, needed) for images in self.images):
                return
        if self.tree is not None:
            self._part("Image tokens attend to later ones, or layers have a state.", "is given images")
        self.request = whole

    def __call__(self) -> tuple[Tensor, Columns]:
        """Score the request. Returns the flat elements ``[K]`` on the CPU, and their scores on the model's device."""
        if self.tree is not None and self.options.grad and drops_layers(self.setups[0].model):
            self._part("Layers are dropped at random: set layerdrop to 0, or call eval().")
        model = self.setups[0].model
        if self.forks and self.options.grad and self.ranks.groups and is_sharded(model) and checkpoints_layers(model):
            # A recomputed step would gather weights in another order, and not equally often on each rank.
            self._part("Sharded layers are checkpointed one by one.")
        while True:
            try:
                return self._attempt()
            except CheckpointError as error:
                if self.options.deterministic:
                    raise ValueError("deterministic=True with grad=True needs packs: leave one out.") from error
                self._part(str(error))
                continue
            except (RuntimeError, MemoryError) as error:
                # Another budget rounds differently, which deterministic=True forbids. The ranks of a context need one budget.
                if not is_out_of_memory(error) or self.options.deterministic or self.ranks.context is not None:
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
            # Return cached blocks, or fragmentation may keep the smaller forward from fitting.
            if torch.accelerator.is_available():
                torch.accelerator.empty_cache()

    def _part(self, reason: str, *where: str) -> None:
        """Stop sharing prefixes in this call."""
        self._check_packs(reason.rstrip("."))
        self.tree, self.forks = None, False
        if self.images:  # an image must not be cut
            self.request = replace(self.request, whole=True)
        self.scorers[0]._warn_apart(reason, *where)

    def _attempt(self) -> tuple[Tensor, Columns]:
        """Forward and score the whole request, ``budget`` tokens at a time."""
        lookups = [] if self.tree is None else self._lookups(self.tree)
        passes = self.passes(lookups)
        heads = [setup.inspection for setup in self.setups if setup.route.path == "head"]
        models = [(each.model, *each.of(body_and_head)) for each in heads]
        guard = ErrorGuard([body for _, body, _ in models], self.ranks)
        scores = inside(models, partial(self._forward_all, guard, passes, lookups))
        guard.check()
        if isinstance(passes[0], SharedPass):
            scores = passes[0].gather(scores[1])
        if self.routings[0] is not None and self.routings[0].records:
            tokens = self.request.tokens
            chosen = self.routings[0].result(len(tokens.values))
            scores[1]["routing"] = chosen if self.tree is None else self.tree.spread(chosen, tokens)
        return scores

    def _lookups(self, tree: PrefixTree) -> list[CacheLookup]:
        """The cached part of the request for each model. Empty if the call does not use the caches."""
        caches = [scorer.memory for scorer in self.scorers]
        options, request = self.options, self.request
        unused = options.grad or any(self.routings) or self.ranks.context is not None
        if not options.remember or unused or not all(cache.limit for cache in caches):
            return []
        # The cache stores only log-probs of the sampler's distribution. Other scores need the distribution itself.
        beside = bool(options.beside) or self.states is not None
        plain = not beside and len(caches) == 1 and request.top_ids is None and request.kept is None
        lookups = []
        keyed = replace(request, tokens=request.tokens.like(self.images[0].keys())) if self.images else request
        for setup, cache in zip(self.setups, caches, strict=True):
            cache.bind(setup, self.ranks)
            lookups.append(CacheLookup(cache, keyed, tree, values=plain))
            if self.forks:
                lookups[-1].only_states()
        # Both models forward the same tokens: use only hits of both caches.
        pairs = zip(*(lookup.cached for lookup in lookups), strict=True)
        cached = [min(both) if not self.forks or len({*both}) == 1 else 0 for both in pairs]
        for lookup in lookups:
            lookup.cached = cached
        return lookups

    def passes(self, lookups: Sequence[CacheLookup] = ()) -> Sequence[Pass]:
        """The forwards of each model: packs or steps of the prefix tree, or padded micro-batches without a tree."""
        images: list[ImageInputs | None] = [*self.images] or [None] * len(self.setups)
        parts: list[CacheLookup | None] = [*lookups] or [None] * len(self.setups)
        each = zip(self.setups, self.routings, images, parts, strict=True)
        if self.tree is None:
            models = (setup.model for setup in self.setups)
            batches = padded_batches(self.request.forward_lengths, self.budget, *models)
            return [PaddedPass(setup, self.request, batches, routing, some) for setup, routing, some, _ in each]
        args = self.request, self.tree, self.budget
        if self.forks:
            return [ForkedPass(setup, *args, part, routing) for setup, routing, _, part in each]
        branches = self.options.grad and self.options.recompute
        if (group := self.ranks.context) is not None:
            return [SharedPass(setup, *args, routing, group) for setup, routing, _, _ in each]
        return [PackedPass(setup, *args, part, routing, some, branches) for setup, routing, some, part in each]

    def _forward_all(
        self, guard: ErrorGuard, passes: Sequence[Pass], lookups: list[CacheLookup]
    ) -> tuple[Tensor, Columns]:
        """Run all packs or micro-batches, and the head on their states."""
        request, ranks, grad, device = self.request, self.ranks, self.options.grad, self.setups[0].device
        # Layers that ranks share must be called, and have a backward, equally often on each rank.
        number = ranks.most(max(1, len(passes[0].elements))) if ranks.groups else len(passes[0].elements)
        nothing, elements = torch.zeros(0, dtype=torch.long), list[Tensor]()
        parts: list[Columns] = []
        held: list[tuple[Tensor, Tensor, list[States]]] = []
        recomputes = grad and self.options.recompute
        for index in range(number):
            for scorer in self.scorers:
                scorer.forwards += 1
            missing = index >= len(passes[0].elements)
            some = nothing if missing else passes[0].elements[index]
            with torch.no_grad() if recomputes else nullcontext():
                states_of_models = [
                    guard.forward(each.setup.model, each.run_dummy if missing else partial(each.run, index))
                    for each in passes
                ]
            unread = some.numel() == 0 and not (ranks.groups and grad)
            # Each rank of a context needs all columns, so one without scored tokens reads no rows.
            if guard.error is not None or (unread and (ranks.context is None or parts or index < number - 1)):
                continue
            states = cast(list[States], states_of_models)
            elements.append(some)
            targets = send(request.tokens.values[some], device)
            if recomputes or (grad and all(each.head is not None for each in states)):
                # The graph holds the hidden states anyway. A single head call computes a single gradient of its weight.
                held.append((some, targets, states))
            else:
                parts += self._read(guard, some, targets, states)
        if held:
            some, targets = (join_tensors(each) for each in list(zip(*held, strict=True))[:2])
            of_each_model = zip(*(states for *_, states in held), strict=True)
            states = [replace(each[0], source=join_tensors([part.source for part in each])) for each in of_each_model]
            if recomputes:
                setup = self.setups[0]
                source = recomputed(lambda: self.passes()[0], states[0].source, setup.model)
                states[0] = replace(states[0], source=source)
            parts += self._read(guard, some, targets, states)
        reference = len(self.setups) > 1
        columns = join_columns(parts) if parts else columns_of_nothing(request, self.options, reference, device)
        if guard.error is not None:
            return nothing, columns
        element = join_tensors(elements or [nothing])
        for lookup, name in zip(lookups if request.kept is None else [], ("log_prob", "ref_log_prob"), strict=False):
            lookup.finish(element, columns[name].cpu())
        if lookups and lookups[0].element.numel():  # cached scores, only if a call requests nothing but log-probs
            element = torch.cat([element, lookups[0].element])
            columns["log_prob"] = torch.cat([columns["log_prob"], lookups[0].values.to(device)])
        return element, columns

    def _read(self, guard: ErrorGuard, some: Tensor, targets: Tensor, states: list[States]) -> list[Columns]:
        """The scores of some tokens. Empty after an error."""
        request, grad, tile = self.request, self.options.grad, BLOCK if self.options.deterministic else None
        own, ref = states[0], states[1] if len(states) > 1 else None
        if self.states is not None:
            self.states.add(some, own)
        if request.kept is not None:
            own = replace(own, kept=Kept(*(send(x, own.source.device) for x in request.kept.take(some)[:2])))
        ids = None if request.top_ids is None else send(request.top_ids[some], self.setups[0].device)
        chunk = self.scorers[0].head_chunk
        columns = guard.compute(HeadReading(own, targets, self.options, ref, ids, chunk, grad, tile).columns)
        return [columns] if columns else []


def budget_of(scorer: RunScorer, setup: Setup) -> int:
    """The most tokens of one forward."""
    default = PACK if setup.options.deterministic else 1024 if setup.device.type == "cpu" else 16384
    return scorer.tokens_per_batch or default
