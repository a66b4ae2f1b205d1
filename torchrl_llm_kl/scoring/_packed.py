"""Forwards of packs: every distinct prefix of a request goes through the body once, a pack of tokens at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_llm_kl.scoring._attention import pack_attention
from torchrl_llm_kl.scoring._cache import CacheLookup
from torchrl_llm_kl.scoring._model import body_and_head, call, hidden_of
from torchrl_llm_kl.scoring._packs import KeysValues, PackLayout, PackPiece, PackPlan, plan_packs
from torchrl_llm_kl.scoring._request import Request
from torchrl_llm_kl.scoring._scores import States, head_states
from torchrl_llm_kl.scoring._setup import Setup, send
from torchrl_llm_kl.scoring._tree import PrefixTree


class PackedPass:
    """One model over the prefix tree of a request, a pack at a time.

    Args:
        setup: the model; attends as transformers' models do.
        request: the tokens to score.
        tree: of the request's tokens and forward lengths.
        tokens_per_batch: tokens in one forward.
        lookup: the cached part of the tree; takes the rest.

    Attributes:
        elements: flat indices of the tokens that each pack predicts.
        has_window: whether any layer has passed a sliding window so far.
    """

    def __init__(
        self,
        setup: Setup,
        request: Request,
        tree: PrefixTree,
        tokens_per_batch: int,
        lookup: CacheLookup | None = None,
    ) -> None:
        self.setup, self.size, self.lookup = setup, tokens_per_batch, lookup
        self.body = body_and_head(setup.model)[0]
        self.plan = plan_packs(tree, tokens_per_batch, None if lookup is None else lookup.cached)
        element, position, place = _row(self.plan, tree)
        scored = (request.mask if lookup is None else lookup.scored).nonzero().squeeze(-1)
        slots, order = place[tree.place(*request.before(scored))].sort(stable=True)
        bounds = torch.arange(len(self.plan.packs) + 1) * tokens_per_batch
        counts = torch.searchsorted(slots, bounds).diff().tolist()
        self.elements = list(scored[order].split(counts))
        # Everything that the forwards need crosses to the device at once, before them.
        self._ids = send(request.tokens.values[element], setup.device)
        self._positions = send(position, setup.device)
        self._slots = send(slots % tokens_per_batch, setup.device).split(counts)
        self._last_use = self.plan.last_use()
        self._pasts: dict[int, list[KeysValues]] = {}  # of pieces in earlier packs: theirs and those before, in order
        self.has_window = False

    def run(self, index: int) -> States:
        """States at the positions that predict ``elements[index]``. Packs must be run in order."""
        layout = self._layout(index)
        here = slice(index * self.size, (index + 1) * self.size)
        with self.setup.active(), pack_attention(self.body, layout):
            output = call(self.body, self._ids[None, here], position_ids=self._positions[None, here], use_cache=False)
            self.has_window |= layout.has_window
            self._keep(index, layout)
            return head_states(self.setup, hidden_of(output)[0][self._slots[index]])

    def _layout(self, number: int) -> PackLayout:
        pack = self.plan.packs[number]
        inside = {piece: i for i, piece in enumerate(pack)}
        pieces = []
        first = 0
        for i in pack:
            piece = self.plan.pieces[i]
            outside = [] if piece.past in inside else self._past(piece.past)
            keep = self.lookup is not None or self._last_use[i] > number
            pieces.append(PackPiece(first, first + piece.length, inside.get(piece.past, -1), outside, keep))
            first += piece.length
        return PackLayout(pieces)

    def _past(self, index: int) -> list[KeysValues]:
        """Keys and values of a piece outside the pack and of all before it, in order."""
        if index < 0:
            return []
        if index not in self._pasts:
            assert self.lookup is not None, "a piece is forwarded before those that follow it"
            self._pasts[index] = self.lookup.past(self.plan.pieces[index].node)
        return self._pasts[index]

    def _keep(self, number: int, layout: PackLayout) -> None:
        """Hold keys and values for later packs, insert new ones into the cache, and drop the rest."""
        pack = self.plan.packs[number]
        for i, kept in layout.kept.items():
            piece = self.plan.pieces[pack[i]]
            if self.lookup is not None:
                self.lookup.insert(piece.node, piece.first, piece.length, kept)
            if self._last_use[pack[i]] > number:
                chain, before = [kept], layout.pieces[i]
                while before.past >= 0:
                    chain.append(layout.kept[before.past])
                    before = layout.pieces[before.past]
                self._pasts[pack[i]] = [*before.outside, *reversed(chain)]
        self._pasts = {piece: kept for piece, kept in self._pasts.items() if self._last_use[piece] > number}


def _row(plan: PackPlan, tree: PrefixTree) -> tuple[Tensor, Tensor, Tensor]:
    """All tokens to forward, pack after pack.

    Returns:
        The flat element of each and its position in its sequence, ``[R]``; the place in the row of each token of the
        tree, node after node, -1 for those not in it.
    """
    pieces = [plan.pieces[i] for pack in plan.packs for i in pack]
    node, first, length = torch.tensor([(p.node, p.first, p.length) for p in pieces]).long().reshape(-1, 3).unbind(-1)
    start = length.cumsum(0) - length
    inside = torch.arange(int(length.sum())) - (start - first).repeat_interleave(length)
    node = node.repeat_interleave(length)
    place = torch.full((tree.num_tokens,), -1)
    place[tree.first[node] + inside] = torch.arange(inside.numel())
    return tree.element[node] + inside, tree.start[node] + inside, place
