"""Packs: how the tokens of a prefix tree are laid end to end, each token once and without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from torchrl_llm_kl._numerics import check_range
from torchrl_llm_kl.scoring._tree import PrefixTree

#: Keys and values of some tokens, one pair for each attention call of a forward: ``[1, heads, tokens, size]``.
KeysValues = list[tuple[Tensor, Tensor]]

# ---------------------------------------------------------------------- the plan for all packs


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one node of a prefix tree."""

    node: int
    first: int  # place of its first token in the node
    length: int  # at least 1
    past: int  # the piece before its first token, -1 at the start of a sequence
    cached: bool = False  # keys and values of its tokens and of all before them are cached: in no pack, `past` is -1


@dataclass(frozen=True)
class PackPlan:
    """Pieces in an order in which each comes after its ``past``, and the packs that they form."""

    pieces: list[Piece]
    packs: list[list[int]]  # indices of pieces, ascending through all packs

    def last_use(self) -> list[int]:
        """The last pack in which another piece attends to each piece, -1 if none does."""
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

    Depth first holds the fewest keys and values for later packs.

    Args:
        tree: of the tokens to forward.
        tokens_per_batch: tokens in each pack but the last.
        cached: number of leading tokens of each node that need no forward; by default none.

    Returns:
        Pieces that together hold every token of the tree exactly once.

    Raises:
        ValueError: if the budget is below 1.

    Example:
        >>> import torch
        >>> from torchrl_llm_kl.ragged import Ragged
        >>> answers = [[1, 2, 3, 4, 5], [1, 2, 3, 6], [7, 8]]
        >>> tokens = Ragged.from_list([torch.tensor(answer) for answer in answers])
        >>> plan = plan_packs(PrefixTree.build(tokens, tokens.lengths, min_shared=3), 6)
        >>> [[(piece.node, piece.first, piece.length, piece.past) for piece in map(plan.pieces.__getitem__, pack)]
        ...  for pack in plan.packs]
        [[(0, 0, 3, -1), (2, 0, 2, 0), (3, 0, 1, 0)], [(1, 0, 2, -1)]]
    """
    check_range(1, tokens_per_batch=tokens_per_batch)
    parents, lengths = tree.parent.tolist(), tree.length.tolist()
    children: list[list[int]] = [[] for _ in lengths]
    roots: list[int] = []
    for node, parent in enumerate(parents):
        (children[parent] if parent >= 0 else roots).append(node)

    pieces: list[Piece] = []
    packs: list[list[int]] = []
    room = 0
    last_piece: dict[int, int] = {-1: -1}
    waiting = roots[::-1]
    while waiting:
        node = waiting.pop()
        waiting.extend(reversed(children[node]))
        past, done = last_piece[parents[node]], 0
        if cached is not None and cached[node] > 0:
            pieces.append(Piece(node, 0, cached[node], -1, cached=True))
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


# ---------------------------------------------------------------------- one pack, as attention sees it


@dataclass(frozen=True, eq=False)
class PackPiece:
    """One piece of a pack."""

    first: int  # its first place in the pack
    last: int  # the place after its last one
    past: int  # the piece before it, -1 if that is not in the pack
    outside: list[KeysValues]  # of all tokens before it, in order, if the piece before it is not in the pack
    keep: bool  # its keys and values are needed after the forward


@dataclass(eq=False)
class PackLayout:
    """The pieces of a pack, and the state of its forward."""

    pieces: list[PackPiece]  # in the order of the pack, without gaps
    kept: dict[int, KeysValues] = field(init=False)  # of each piece to keep
    calls: int = 0  # attention calls so far
    has_window: bool = False  # whether any layer passed a sliding window
    shared: dict[Any, Any] = field(default_factory=dict)  # tensors for all attention calls of the forward

    def __post_init__(self) -> None:
        self.kept = {i: [] for i, piece in enumerate(self.pieces) if piece.keep}
        self.followed = {piece.past for piece in self.pieces}
