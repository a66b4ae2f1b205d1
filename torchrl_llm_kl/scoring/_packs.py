"""The forwards of a prefix tree in packs: each distinct prefix once, without padding, on one rank or on several."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import Final, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torchrl_llm_kl._numerics import send
from torchrl_llm_kl._private import compiled_call
from torchrl_llm_kl.scoring._attention import Gradients, KeysValues, PackLayout, PackPiece, hooked, link, pack_attention
from torchrl_llm_kl.scoring._branches import Cut
from torchrl_llm_kl.scoring._cache import CacheLookup
from torchrl_llm_kl.scoring._context import Exchange, gather
from torchrl_llm_kl.scoring._images import ImageInputs
from torchrl_llm_kl.scoring._invariant import attend, pad_pack
from torchrl_llm_kl.scoring._model import Setup, body_and_head, call, read_output
from torchrl_llm_kl.scoring._plans import plan_branches, plan_packs, row_of_tokens
from torchrl_llm_kl.scoring._request import ScoreRequest
from torchrl_llm_kl.scoring._routing import Routing
from torchrl_llm_kl.scoring._scores import Columns, States, head_states
from torchrl_llm_kl.scoring._tree import PrefixTree


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
        element, position, place = row_of_tokens(self.plan, tree)
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
        self.attention = ""  # how the last pack attended

    def run(self, index: int) -> States:
        """Run a pack, and return the states that predict ``elements[index]``. Packs must run in order."""
        return self._run(index, index, self._layout(self.plan.packs[index], index))

    def _run(self, number: int, stage: int, layout: PackLayout) -> States:
        """Run pack ``number`` in a stage, which is one pack here."""
        here = slice(self._bounds[number], self._bounds[number + 1])
        inputs = None if self.images is None else self.images.of_pack(self._element[here])
        with self.setup.active():
            with self.routing.forward(self._element[here], self.setup.device) if self.routing else nullcontext():
                hidden = self._forward(layout, self._ids[here], self._positions[here], inputs)
            self.has_window |= layout.has_window
            self.attention = layout.attention
            if self.lookup is not None:
                for i, (_, _, kept) in zip(self.plan.packs[number], layout.kept, strict=True):
                    piece = self.plan.pieces[i]
                    self.lookup.insert(piece.node, piece.first, piece.length, kept)
            # Free the keys and values that no later pack attends to.
            self._pasts = {i: past for i, past in self._pasts.items() if i < 0 or self._last_use[i] > stage}
            return head_states(self.setup, hidden[0][self._slots[number]])

    def run_last_twice(self, others: Tensor) -> list[Tensor]:
        """The hidden states of all packs, and of the last one again with other token ids ``[N]``."""
        last = len(self.elements) - 1
        states = [self.run(i).source for i in range(last)]
        pasts = dict(self._pasts)
        states.append(self.run(last).source)
        self._pasts, self._ids = pasts, send(others[self._element], self.setup.device)
        return [*states, self.run(last).source]

    def run_dummy(self, layout: PackLayout | None = None) -> States:
        """Forward a dummy token, since layers that ranks share must be called on all of them. Returns no positions."""
        ids = torch.zeros(1, dtype=torch.long, device=self.setup.device)
        layout = layout or PackLayout([PackPiece(0, 1, -1, [])])
        with self.setup.active():
            return head_states(self.setup, self._forward(layout, ids, ids)[0][:0])

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

    def _layout(self, pack: list[int], stage: int) -> PackLayout:
        continued = Counter(self.plan.pieces[i].past for i in pack)
        inside: dict[int, int] = {}  # the piece of the layout that ends with a piece of the plan, or holds it
        pieces, keeps = list[PackPiece](), list[tuple[int, int, KeysValues]]()
        first = last = 0
        for i in pack:
            piece = self.plan.pieces[i]
            first, last = last, last + piece.length
            later = self._last_use[i] > stage
            if piece.past not in self._pasts and piece.past not in inside:
                lookup = cast(CacheLookup, self.lookup)  # a piece that no pack forwards is cached
                self._pasts[piece.past] = lookup.past(self.plan.pieces[piece.past].node)
            kept: KeysValues = []
            if later:
                self._pasts[i] = [*self._pasts[piece.past], kept]
            if later or self.lookup is not None:
                keeps.append((first, last, kept))
            # A graph holds the prefix of each piece once more. So nodes of a branch are one piece, up to a fork in the pack.
            if self._joins and continued[piece.past] == 1 and inside.get(piece.past) == len(pieces) - 1 >= 0:
                pieces[-1] = replace(pieces[-1], last=last)
            else:
                outside = [] if piece.past in inside else self._pasts[piece.past]
                pieces.append(PackPiece(first, last, inside.get(piece.past, -1), outside))
            inside[i] = len(pieces) - 1
        return PackLayout(pieces, keeps, attend=attend if self.setup.options.deterministic else None)


# ---------------------------------------------------------------------- packs of several ranks


class SharedPass(PackedPass):
    """Runs one model over the prefix tree of a request, a stage at a time. ``elements`` are this rank's."""

    def __init__(
        self,
        setup: Setup,
        request: ScoreRequest,
        tree: PrefixTree,
        tokens_per_batch: int,
        routing: Routing | None,
        group: dist.ProcessGroup,
    ) -> None:
        self._group, self._rank, self._count = group, group.rank(), group.size()
        stages = max(1, -(-tree.num_tokens // (self._count * tokens_per_batch)))
        size = max(1, -(-tree.num_tokens // (self._count * stages)))  # as many tokens on each rank
        super().__init__(setup, request, tree, size, None, routing)
        none, count = torch.zeros(0, dtype=torch.long), self._count
        self._shares = [torch.cat([none, *self.elements[rank::count]]) for rank in range(count)]
        stages = -(-len(self.elements) // count)
        own = self.elements[self._rank :: count]
        self.elements = own + [none] * (stages - len(own))
        self._rank_of = {piece: number % count for number, pack in enumerate(self.plan.packs) for piece in pack}
        self._last_use = [use // count for use in self._last_use]  # the stage, -1 as before

    def run(self, index: int) -> States:
        """Run this rank's pack of a stage, and return the states that predict ``elements[index]``."""
        numbers = range(index * self._count, (index + 1) * self._count)
        # The last stage may have fewer packs than ranks.
        packs = [self.plan.packs[number] if number < len(self.plan.packs) else [] for number in numbers]
        needed = [self.plan.outside(pack) for pack in packs]
        layout, own = PackLayout([PackPiece(0, 1, -1, [])]), packs[self._rank]  # a dummy token, without a pack
        for pack in packs:  # in order, since a piece continues one of an earlier pack
            if own and pack is own:
                layout = self._layout(pack, index)
                continue
            for i in pack:
                if self._last_use[i] > index or i in needed[self._rank]:
                    # Stands for the keys and values on the other rank.
                    none = torch.empty(1, 1, self.plan.pieces[i].length, 0)
                    self._pasts[i] = [*self._pasts[self.plan.pieces[i].past], [(none, none)]]
        layout.exchange = self._exchange(needed, dict(zip(own, layout.pieces, strict=False)))
        return self._run(numbers[self._rank], index, layout) if own else self.run_dummy(layout)

    def gather(self, columns: Columns) -> tuple[Tensor, Columns]:
        """The flat elements of all ranks, and their scores."""
        counts = [len(share) for share in self._shares]
        return torch.cat(self._shares), {name: gather(self._group, counts, columns[name]) for name in sorted(columns)}

    def _exchange(self, needed: list[set[int]], here: dict[int, PackPiece]) -> Exchange | None:
        """The keys and values that ranks give each other. None if no pack attends to another rank's."""
        parts, given = self.plan.pieces, [list[int]() for _ in needed]
        for i in sorted(set[int]().union(*needed)):
            owner = self._rank_of[i]
            if any(i in some for rank, some in enumerate(needed) if rank != owner):
                given[owner].append(i)
        counts = [sum(parts[i].length for i in some) for some in given]
        if not any(counts):
            return None
        taken: dict[int, slice] = {}
        for rank, some in enumerate(given):
            first = rank * max(counts)
            for i in some:
                if rank != self._rank and i in needed[self._rank]:
                    taken[id(self._pasts[i][-1])] = slice(first, first + parts[i].length)
                first += parts[i].length
        own = [slice(here[i].first, here[i].last) if i in here else self._pasts[i][-1] for i in given[self._rank]]
        return Exchange(self._group, counts, own, taken)
