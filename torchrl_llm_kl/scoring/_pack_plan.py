"""How the tokens of a prefix tree are laid end to end in packs of a fixed size, each token once and nothing padded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchrl_llm_kl.scoring._tree import PrefixTree

__all__ = ["PackPlan", "Piece", "plan_packs"]


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one node of a prefix tree.

    Args:
        node: of the tree.
        first: the place of its first token in the node.
        length: at least 1.
        past: the piece that its first token follows, -1 at the start of a sequence.
        known: whether it is in no pack, since keys and values of its tokens and of all before them exist already;
            ``past`` is then -1.
    """

    node: int
    first: int
    length: int
    past: int
    known: bool = False


@dataclass(frozen=True)
class PackPlan:
    """Pieces, each after the one that it follows, and which of them go through the model together.

    Args:
        pieces: all of them.
        packs: indices of pieces, ascending through all packs.
    """

    pieces: list[Piece]
    packs: list[list[int]]

    def last_use(self) -> list[int]:
        """The last pack in which a piece follows each piece, -1 if none does."""
        out = [-1] * len(self.pieces)
        for pack, indices in enumerate(self.packs):
            for index in indices:
                piece = self.pieces[index].past
                while piece >= 0 and out[piece] < pack:
                    out[piece] = pack
                    piece = self.pieces[piece].past
        return out


def plan_packs(tree: PrefixTree, tokens_per_batch: int, known: Sequence[int] | None = None) -> PackPlan:
    """Lay the nodes of a prefix tree end to end, depth first, and cut the row every ``tokens_per_batch`` tokens.

    Depth first, so that the fewest keys and values wait for tokens that follow them.

    Args:
        tree: whose tokens to forward.
        tokens_per_batch: tokens in each pack but the last.
        known: how many leading tokens of each node need not be forwarded; by default none.

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
    if tokens_per_batch < 1:
        raise ValueError(f"tokens_per_batch must be at least 1, got {tokens_per_batch}")
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
        if known is not None and known[node] > 0:
            pieces.append(Piece(node, 0, known[node], -1, known=True))
            past, done = len(pieces) - 1, known[node]
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
