"""A call of a scorer: the forwards of one model, or of two in step, and the head.

Models run in packs, where every distinct prefix is forwarded once and without padding. Models with a recurrent state continue
it after a shared prefix. All other models run in padded micro-batches.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Final, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn

from torchrl_llm_kl._numerics import check_range, send
from torchrl_llm_kl._private import compiled_call
from torchrl_llm_kl.head import Kept
from torchrl_llm_kl.scoring._attention import Gradients, KeysValues, PackLayout, PackPiece, hooked, link, pack_attention
from torchrl_llm_kl.scoring._branches import Cut, recomputed
from torchrl_llm_kl.scoring._cache import CacheLookup, PrefixKVCache
from torchrl_llm_kl.scoring._checkpoints import CheckpointError
from torchrl_llm_kl.scoring._forks import MIN_LENGTH, MIN_SHARED, ForkedPass, checkpoints_layers
from torchrl_llm_kl.scoring._images import ImageInputs
from torchrl_llm_kl.scoring._invariant import BLOCK, PACK, attend, pad_pack
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
# The most tokens of the packs whose graphs are held at once, as a multiple of the longest sequence's.
_HELD = 1.2

# ---------------------------------------------------------------------- packs


class PackedPass:
    """Runs one model over the prefix tree of a request, one pack at a time. A ``lookup`` skips the cached part."""

    kind: Final = "pack"

    def __init__(
        self,
        setup: Setup,
        request: ScoreRequest,
        tree: PrefixTree,
        tokens_per_batch: int,
        lookup: CacheLookup | None = None,
        routing: Routing | None = None,
        images: ImageInputs | None = None,
        branches: bool = False,
    ) -> None:
        self.setup, self.size, self.lookup, self.routing, self.images = setup, tokens_per_batch, lookup, routing, images
        self._request, self._tree, self._joins = request, tree, branches
        if branches:
            self.plan = plan_branches(tree, tokens_per_batch)
            self._bounds = self.plan.bounds()
        else:
            self.plan = plan_packs(tree, tokens_per_batch, None if lookup is None else lookup.cached)
            self._bounds = [*range(0, (len(self.plan.packs) + 1) * tokens_per_batch, tokens_per_batch)]
        element, position, place = _row_of_tokens(self.plan, tree)
        scored = np.flatnonzero((request.mask if lookup is None else lookup.scored).numpy())
        slots = place[tree.place(torch.from_numpy(scored - 1)).numpy()]
        order = slots.argsort(kind="stable")
        counts = np.diff(slots[order].searchsorted(self._bounds))
        starts = np.repeat(self._bounds[:-1], counts)
        sizes = counts.tolist()
        # Flat indices of the tokens that each pack predicts.
        self.elements = list(torch.from_numpy(scored[order]).split(sizes))
        # One transfer before the first forward: a copy between forwards would make the device wait.
        row = request.tokens.values[element], position
        if setup.options.deterministic:
            row = pad_pack(row[0], tokens_per_batch), pad_pack(row[1], tokens_per_batch)
        self._ids, self._positions = send(row[0], setup.device), send(row[1], setup.device)
        self._slots = send(torch.from_numpy(slots[order] - starts), setup.device).split(sizes)
        self._element = element
        self._last_use = self.plan.last_use()
        # For each piece that later packs attend to: the keys and values of all pieces up to it, in order.
        self._pasts: dict[int, list[KeysValues]] = {-1: []}
        # Only for compiled parts: the gradients that later packs add to those keys, and the hidden states of the last pack.
        self._gradients: Gradients = {}
        self._last: Tensor | None = None
        self.has_window = False  # whether a forwarded layer had a sliding window

    def run(self, index: int) -> States:
        """Run a pack, and return the states that predict ``elements[index]``. Packs must run in order."""
        layout = self._layout(index)
        here = slice(self._bounds[index], self._bounds[index + 1])
        inputs = None if self.images is None else self.images.of_pack(self._element[here])
        with self.setup.active():
            with self.routing.forward(self._element[here], self.setup.device) if self.routing else nullcontext():
                hidden = self._forward(layout, self._ids[here], self._positions[here], inputs)
            self.has_window |= layout.has_window
            if self.lookup is not None:
                for i, (_, _, kept) in zip(self.plan.packs[index], layout.kept, strict=True):
                    piece = self.plan.pieces[i]
                    self.lookup.insert(piece.node, piece.first, piece.length, kept)
            # Free the keys and values that no later pack attends to.
            self._pasts = {i: past for i, past in self._pasts.items() if i < 0 or self._last_use[i] > index}
            return head_states(self.setup, hidden[0][self._slots[index]])

    def run_last_twice(self, others: Tensor) -> list[Tensor]:
        """The hidden states of all packs, and of the last one again with other token ids ``[N]``."""
        last = len(self.elements) - 1
        states = [self.run(i).source for i in range(last)]
        pasts = dict(self._pasts)
        states.append(self.run(last).source)
        self._pasts, self._ids = pasts, send(others[self._element], self.setup.device)
        return [*states, self.run(last).source]

    def run_dummy(self) -> States:
        """Forward a dummy token, since layers that ranks share must be called on all of them. Returns no positions."""
        ids = torch.zeros(1, dtype=torch.long, device=self.setup.device)
        with self.setup.active():
            return head_states(self.setup, self._forward(PackLayout([PackPiece(0, 1, -1, [])]), ids, ids)[0][:0])

    def cut(self, index: int) -> list[Cut]:
        """Detach the keys and values that later packs attend to."""
        cuts: list[Cut] = []
        for kept in (self._pasts[piece][-1] for piece in self.plan.packs[index] if piece in self._pasts):
            for i, pair in enumerate(kept):
                leaves = tuple(own.detach().requires_grad_(own.requires_grad) for own in pair)
                cuts += zip(pair, leaves, strict=True)
                kept[i] = leaves[0], leaves[1]
        return cuts

    def readers(self, index: int) -> set[int]:
        """The later packs that attend to a pack."""
        return self.plan.readers[index]

    def elsewhere(self, element: Tensor) -> int:
        """How many of the positions that ``element [1]`` attends to are in packs before its own."""
        pieces, packs = self.plan.pieces, {i: n for n, pack in enumerate(self.plan.packs) for i in pack}
        node, place = self._tree.locate(element)
        at = next(i for i in packs if pieces[i].node == node and 0 <= place - pieces[i].first < pieces[i].length)
        pack, earlier = packs[at], 0
        while at >= 0:
            earlier += pieces[at].length if packs[at] < pack else 0
            at = pieces[at].past
        return earlier

    def _forward(
        self, layout: PackLayout, ids: Tensor, positions: Tensor, inputs: dict[str, object] | None = None
    ) -> Tensor:
        """The hidden states of a pack, ``[1, N, H]``. ``inputs`` replace the ids and positions."""
        facts = self.setup.inspection
        body = facts.of(body_and_head)[0]
        options: dict[str, object] = {"position_ids": positions[None], "use_cache": False, **(inputs or {})}
        if any(map(compiled_call, facts.of(hooked))):
            layout.gradients = self._gradients
            # A compiled body takes the pack as an argument, since its graph reads no Python state.
            options["attention_mask"] = link(layout, self._last, ids.device)
        with pack_attention(facts, layout):
            out = call(body, ids[None], **options) if inputs is None else body(**options)
            hidden = read_output(out, "last_hidden_state")
        if layout.gradients is not None and self.setup.options.grad:
            self._last = hidden
        return hidden

    def _layout(self, number: int) -> PackLayout:
        continued = Counter(self.plan.pieces[i].past for i in self.plan.packs[number])
        inside: dict[int, int] = {}  # the piece of the layout that ends with a piece of the plan, or holds it
        pieces, keeps = list[PackPiece](), list[tuple[int, int, KeysValues]]()
        first = last = 0
        for i in self.plan.packs[number]:
            piece = self.plan.pieces[i]
            first, last = last, last + piece.length
            later = self._last_use[i] > number
            if piece.past not in self._pasts and piece.past not in inside:
                lookup = cast(CacheLookup, self.lookup)  # a piece that no pack forwards is cached
                self._pasts[piece.past] = lookup.past(self.plan.pieces[piece.past].node)
            kept: KeysValues = []
            if later:
                self._pasts[i] = [*self._pasts[piece.past], kept]
            if later or self.lookup is not None:
                keeps.append((first, last, kept))
            # A graph holds the prefix of each piece once more. So the nodes of a branch are one piece, up to a fork in it.
            if self._joins and continued[piece.past] == 1 and inside.get(piece.past) == len(pieces) - 1 >= 0:
                pieces[-1] = replace(pieces[-1], last=last)
            else:
                outside = [] if piece.past in inside else self._pasts[piece.past]
                pieces.append(PackPiece(first, last, inside.get(piece.past, -1), outside))
            inside[i] = len(pieces) - 1
        return PackLayout(pieces, keeps, attend=attend if self.setup.options.deterministic else None)


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one node of a prefix tree."""

    node: int
    first: int  # index of its first token in the node
    length: int  # at least 1
    past: int  # the piece before it; -1 at the start of a sequence, and for a cached piece, which is in no pack


@dataclass(frozen=True)
class PackPlan:
    """Pieces, each after its ``past``, and the packs that they form."""

    pieces: list[Piece]
    packs: list[list[int]]  # indices of pieces, ascending through all packs

    def bounds(self) -> list[int]:
        """Where each pack begins in the row of all tokens, and the end of the row."""
        return [0, *accumulate(sum(self.pieces[i].length for i in pack) for pack in self.packs)]

    @cached_property
    def readers(self) -> list[set[int]]:
        """For each pack, the later packs that attend to it."""
        pack_of = {piece: number for number, pack in enumerate(self.packs) for piece in pack}
        out: list[set[int]] = [set() for _ in self.packs]
        for piece, number in pack_of.items():
            past = self.pieces[piece].past
            while past >= 0:
                if pack_of[past] < number:
                    out[pack_of[past]].add(number)
                past = self.pieces[past].past
        return out

    def last_use(self) -> list[int]:
        """For each piece, the last pack that attends to it from another piece, or -1."""
        out = [-1] * len(self.pieces)
        for pack, indices in enumerate(self.packs):
            for index in indices:
                piece = self.pieces[index].past
                while piece >= 0 and out[piece] < pack:
                    out[piece] = pack
                    piece = self.pieces[piece].past
        return out


def plan_packs(tree: PrefixTree, tokens_per_batch: int, cached: Sequence[int] | None = None) -> PackPlan:
    """Lay the nodes of a prefix tree end to end, depth first, and cut the row every ``tokens_per_batch`` tokens.

    In depth-first order the fewest keys and values are held for later packs. ``cached`` is the number of leading tokens of
    each node that need no forward, by default 0.

    Example:
        >>> from torchrl_llm_kl.ragged import Ragged
        >>> answers = [[1, 2, 3, 4, 5], [1, 2, 3, 6], [7, 8]]
        >>> tokens = Ragged.from_list([torch.tensor(answer) for answer in answers])
        >>> plan = plan_packs(PrefixTree.build(tokens, tokens.lengths, min_shared=3), 6)
        >>> [[(p.node, p.first, p.length, p.past) for p in map(plan.pieces.__getitem__, pack)] for pack in plan.packs]
        [[(0, 0, 3, -1), (1, 0, 2, 0), (2, 0, 1, 0)], [(3, 0, 2, -1)]]
    """
    check_range(1, tokens_per_batch=tokens_per_batch)
    parents, lengths = tree.parent.tolist(), tree.length.tolist()
    children: dict[int, list[int]] = {node: [] for node in range(-1, len(lengths))}
    for node, parent in enumerate(parents):
        children[parent].append(node)

    pieces: list[Piece] = []
    packs: list[list[int]] = []
    room = 0
    last_piece: dict[int, int] = {-1: -1}
    waiting = children[-1][::-1]
    while waiting:
        node = waiting.pop()
        waiting.extend(reversed(children[node]))
        past, done = last_piece[parents[node]], 0
        if cached is not None and cached[node] > 0:
            pieces.append(Piece(node, 0, cached[node], -1))
            past, done = len(pieces) - 1, cached[node]
        while done < lengths[node]:
            if room == 0:
                packs.append([])
                room = tokens_per_batch
            length = min(room, lengths[node] - done)
            pieces.append(Piece(node, done, length, past))
            past, done, room = len(pieces) - 1, done + length, room - length
            packs[-1].append(past)
        last_piece[node] = past
    return PackPlan(pieces, packs)


def plan_branches(tree: PrefixTree, tokens_per_batch: int) -> PackPlan:
    """Plan packs so that the graphs of few of them are held at a time: about the tokens of the longest sequence.

    Below each node its longest branch comes first, up to its end. Then come the others, from the end back to the start. The
    graph of a pack is held until no later pack attends to it. So a pack ends at a fork if the graphs of the other branches, and
    the packs before them, would have too many tokens. At most 1.2 times the tokens of the longest sequence are held.

    Example:
        >>> from torchrl_llm_kl.ragged import Ragged
        >>> answers = [[1, 2, 3, 4, 5], [1, 2, 3, 6], [7, 8]]
        >>> tokens = Ragged.from_list([torch.tensor(answer) for answer in answers])
        >>> plan = plan_branches(PrefixTree.build(tokens, tokens.lengths, min_shared=3), 6)
        >>> [[(p.node, p.first, p.length, p.past) for p in map(plan.pieces.__getitem__, pack)] for pack in plan.packs]
        [[(0, 0, 3, -1), (1, 0, 2, 0), (2, 0, 1, 0)], [(3, 0, 2, -1)]]
    """
    check_range(1, tokens_per_batch=tokens_per_batch)
    lengths = tree.length.tolist()
    children: dict[int, list[int]] = {node: [] for node in range(-1, len(lengths))}
    for node, parent in enumerate(tree.parent.tolist()):
        children[parent].append(node)
    depth = [0] * len(lengths)  # tokens up to the end of the longest branch
    for node in reversed(range(len(lengths))):
        depth[node] = lengths[node] + max((depth[child] for child in children[node]), default=0)
    most = _HELD * max(depth, default=0)
    for each in children.values():
        each.sort(key=depth.__getitem__)
    plan, last_piece = PackPlan([], []), {-1: -1}
    sizes, held = [0], [list[int]()]  # the tokens and pieces of the packs that are held, the last one included
    waiting = list(children[-1])
    while waiting:
        node = waiting.pop()
        parent = int(tree.parent[node])
        past, done = last_piece[parent], 0
        children[parent].pop()  # from now on it holds the children that did not come yet
        # The longest of the other branches that will read the last pack, and hold all of it.
        forks = (children[plan.pieces[i].node] for i in held[-1])
        rest = max((depth[others[-1]] for others in forks if others), default=0)
        room = tokens_per_batch - sizes[-1]
        if plan.packs and plan.packs[-1][-1] == past:  # the path goes on
            joins = rest == 0 or sum(sizes) + min(room, lengths[node]) + rest <= most
        else:
            joins = bool(plan.packs) and rest == 0 and lengths[node] <= room and sum(sizes) + depth[node] <= most
        # A pack is held until all that read it are done.
        while not joins and held and past not in held[-1]:
            del held[-1], sizes[-1]
        waiting += children[node]
        while done < lengths[node]:
            if not joins or sizes[-1] == tokens_per_batch:
                plan.packs.append([])
                held.append(plan.packs[-1])
                sizes.append(0)
                joins = True
            length = min(tokens_per_batch - sizes[-1], lengths[node] - done)
            plan.pieces.append(Piece(node, done, length, past))
            past, done, sizes[-1] = len(plan.pieces) - 1, done + length, sizes[-1] + length
            plan.packs[-1].append(past)
        last_piece[node] = past
    return plan


def _row_of_tokens(plan: PackPlan, tree: PrefixTree) -> tuple[Tensor, Tensor, np.ndarray]:
    """Lay all tokens to forward in a row, pack after pack.

    Returns the flat element and the position of each token in the row, and the index in the row of each token of the tree,
    node after node. Tokens that are not in the row have the index -1.
    """
    pieces = [plan.pieces[i] for pack in plan.packs for i in pack]
    # numpy takes a fraction of torch's time for so few numbers.
    node, first, length = np.array([(p.node, p.first, p.length) for p in pieces], "i8").reshape(-1, 3).T
    before = length.cumsum() - length
    starts = np.array([tree.element.numpy(), tree.start.numpy(), tree.first.numpy()])[:, node] + first - before
    order = np.arange(length.sum())
    element, position, index = starts.repeat(length, 1) + order
    place = np.full(tree.num_tokens, -1)
    place[index] = order
    return torch.from_numpy(element), torch.from_numpy(position), place


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


def plan_micro_batches(lengths: Tensor, tokens_per_batch: int) -> list[Tensor]:
    """Split sequences into micro-batches of similar length under a token budget.

    A micro-batch costs ``rows * longest`` tokens, padding included. The longest sequences come first, so a run that does
    not fit into memory fails at once.

    Args:
        lengths: tokens to forward per sequence, int64 ``[S]``. A sequence of 0 tokens is in no micro-batch.
        tokens_per_batch: the budget. A longer sequence gets a micro-batch of its own.

    Returns:
        Sequence indices, int64 on the CPU, one tensor per micro-batch.

    Raises:
        ValueError: if the budget is below 1.

    Example:
        >>> import torch
        >>> [batch.tolist() for batch in plan_micro_batches(torch.tensor([2, 9, 0, 3, 4]), 10)]
        [[1], [4, 3], [0]]
    """
    check_range(1, tokens_per_batch=tokens_per_batch)
    sizes = lengths.tolist()
    order = sorted((row for row, size in enumerate(sizes) if size > 0), key=lambda row: -sizes[row])
    batches, start = list[Tensor](), 0
    while start < len(order):
        rows = max(1, tokens_per_batch // sizes[order[start]])
        batches.append(torch.tensor(order[start : start + rows]))
        start += rows
    return batches


def padded_batches(lengths: Tensor, tokens_per_batch: int, *models: nn.Module) -> list[Tensor]:
    """Plan micro-batches that stay on one side of each model's switch of rotary frequencies (longrope)."""
    sides = [lengths]
    for switch in set().union(*map(frequency_switches, models)):
        sides = [torch.where(within, side, 0) for side in sides for within in (side <= switch, side > switch)]
    return [rows for side in sides for rows in plan_micro_batches(side, tokens_per_batch)]


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
                # Another budget rounds differently, which deterministic=True forbids.
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
            # Return cached blocks, or fragmentation may keep the smaller forward from fitting.
            if torch.accelerator.is_available():
                torch.accelerator.empty_cache()

    def _part(self, reason: str, *where: str) -> None:
        """Stop sharing prefixes in this call."""
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
        if self.routings[0] is not None and self.routings[0].records:
            tokens = self.request.tokens
            chosen = self.routings[0].result(len(tokens.values))
            scores[1]["routing"] = chosen if self.tree is None else self.tree.spread(chosen, tokens)
        return scores

    def _lookups(self, tree: PrefixTree) -> list[CacheLookup]:
        """The cached part of the request for each model. Empty if the call does not use the caches."""
        caches = [scorer.memory for scorer in self.scorers]
        options, request = self.options, self.request
        if not options.remember or options.grad or any(self.routings) or not all(cache.limit for cache in caches):
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
            if guard.error is not None or (some.numel() == 0 and not (ranks.groups and grad)):
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
