"""Forwards without padding: every distinct prefix of a batch goes through the body once, a pack of tokens at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchrl_llm_kl.scoring._attention import attend, pack_attention
from torchrl_llm_kl.scoring._device import send
from torchrl_llm_kl.scoring._mode import Mode
from torchrl_llm_kl.scoring._model import call, find_body, hidden_of
from torchrl_llm_kl.scoring._pack_layout import KeysValues, PackLayout, PackPiece
from torchrl_llm_kl.scoring._pack_plan import PackPlan, plan_packs
from torchrl_llm_kl.scoring._recall import Recall
from torchrl_llm_kl.scoring._request import Request
from torchrl_llm_kl.scoring._states import States, head_states
from torchrl_llm_kl.scoring._tree import PrefixTree

__all__ = ["PackedPass"]


class PackedPass:
    """One model over the prefix tree of a request, a pack at a time.

    Args:
        model: what to run; attends as transformers' models do.
        mode: how.
        request: what to score.
        tree: of the request's tokens and forward lengths.
        tokens_per_batch: tokens in one forward.
        temperature: of the states.
        device: where the model is.
        recall: what is known of the tree from earlier requests, and takes what is new.
    """

    def __init__(
        self,
        model: nn.Module,
        mode: Mode,
        request: Request,
        tree: PrefixTree,
        *,
        tokens_per_batch: int,
        temperature: float,
        device: torch.device,
        recall: Recall | None = None,
    ) -> None:
        body = find_body(model)
        if body is None:
            raise TypeError(f"{type(model).__name__} has no separate body and head")
        self.model, self.body, self.mode, self.tree = model, body, mode, tree
        self.size, self.temperature, self.device, self.recall = tokens_per_batch, temperature, device, recall
        asked = request.mask if recall is None else recall.asked
        self.plan = plan_packs(tree, tokens_per_batch, None if recall is None else recall.known)
        row = _Row.of(self.plan, tree)
        element, place = row.asked(request, tree, asked)
        bounds = torch.arange(len(self.plan.packs) + 1) * tokens_per_batch
        counts = torch.searchsorted(place, bounds).diff().tolist()
        self.elements = list(element.split(counts))
        # All that the forwards need crosses to the device at once, ahead of them.
        self._ids = send(request.tokens.values[row.element], device)
        self._positions = send(row.position, device)
        self._slots = send(place % tokens_per_batch, device).split(counts)
        self._last_use = self.plan.last_use()
        self._pasts: dict[int, list[KeysValues]] = {}
        self.has_window = False  # whether any layer was told of a sliding window

    def run(self, index: int) -> States:
        """States at the positions that predict ``elements[index]``. Packs must be run in order."""
        layout = self._layout(index)
        here = slice(index * self.size, (index + 1) * self.size)
        with self.mode.of(self.model), pack_attention(self.body), attend(layout):
            output = call(self.body, self._ids[None, here], position_ids=self._positions[None, here], use_cache=False)
            self.has_window |= layout.has_window
            self._keep(index, layout)
            return head_states(self.model, self.mode, hidden_of(output)[0][self._slots[index]], self.temperature)

    def _layout(self, number: int) -> PackLayout:
        pack = self.plan.packs[number]
        inside = {piece: i for i, piece in enumerate(pack)}
        pieces = []
        first = 0
        for i in pack:
            piece = self.plan.pieces[i]
            outside = [] if piece.past in inside else self._past(piece.past)
            keep = self.recall is not None or self._last_use[i] > number
            pieces.append(PackPiece(first, first + piece.length, inside.get(piece.past, -1), outside, keep))
            first += piece.length
        return PackLayout(pieces)

    def _past(self, index: int) -> list[KeysValues]:
        """Keys and values of a piece that is not in the pack and of all before it, in order."""
        if index < 0:
            return []
        if index not in self._pasts:
            assert self.recall is not None, "a piece is forwarded before those that follow it"
            self._pasts[index] = self.recall.past(self.plan.pieces[index].node)
        return self._pasts[index]

    def _keep(self, number: int, layout: PackLayout) -> None:
        """Hold what later packs need, hand what is new to the memory, and drop the rest."""
        pack = self.plan.packs[number]
        for i, kept in layout.kept.items():
            piece = self.plan.pieces[pack[i]]
            if self.recall is not None:
                self.recall.learn(piece.node, piece.first, piece.length, kept)
            if self._last_use[pack[i]] > number:
                before = layout.pieces[i]
                chain = self._pasts_inside(layout, before)
                self._pasts[pack[i]] = [*chain, kept]
        self._pasts = {piece: kept for piece, kept in self._pasts.items() if self._last_use[piece] > number}

    def _pasts_inside(self, layout: PackLayout, piece: PackPiece) -> list[KeysValues]:
        if piece.past < 0:
            return piece.outside
        before = layout.pieces[piece.past]
        return [*self._pasts_inside(layout, before), layout.kept[piece.past]]


@dataclass(frozen=True, eq=False)
class _Row:
    """All tokens to forward, pack after pack.

    Args:
        element: the flat element of each; ``[R]``.
        position: its place in its sequence; ``[R]``.
        place: where each token of the tree is in the row, node after node, -1 for those not in it.
    """

    element: Tensor
    position: Tensor
    place: Tensor

    @classmethod
    def of(cls, plan: PackPlan, tree: PrefixTree) -> _Row:
        pieces = [plan.pieces[i] for pack in plan.packs for i in pack]
        node, first, length = (
            torch.tensor([(p.node, p.first, p.length) for p in pieces]).long().reshape(-1, 3).unbind(-1)
        )
        start = length.cumsum(0) - length
        inside = torch.arange(int(length.sum())) - (start - first).repeat_interleave(length)
        node = node.repeat_interleave(length)
        place = torch.full((int(tree.length.sum()),), -1)
        place[tree.first[node] + inside] = torch.arange(inside.numel())
        return cls(tree.element[node] + inside, tree.start[node] + inside, place)

    def asked(self, request: Request, tree: PrefixTree, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The flat elements that a mask asks for, and the place in the row that predicts each, ascending; ``[K]``."""
        element = mask.nonzero().squeeze(-1)
        place, order = self.place[tree.place(*request.before(element))].sort(stable=True)
        return element[order], place
