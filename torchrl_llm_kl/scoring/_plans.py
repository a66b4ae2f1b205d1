"""Plans of the forwards of a request: packs of a prefix tree, and padded micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor, nn

from torchrl_llm_kl._numerics import check_range
from torchrl_llm_kl.scoring._model import frequency_switches
from torchrl_llm_kl.scoring._tree import PrefixTree

# The most tokens of the packs whose graphs are held at once, as a multiple of the longest sequence's.
_HELD = 1.2

# ---------------------------------------------------------------------- packs


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
        for number, pack in enumerate(self.packs):
            for piece in self.outside(pack):
                out[pack_of[piece]].add(number)
        return out

    def outside(self, pack: list[int]) -> set[int]:
        """The pieces outside a pack that it attends to."""
        inside, out = {*pack}, set[int]()
        for index in inside:
            piece = self.pieces[index].past
            while piece >= 0 and piece not in inside and piece not in out:
                out.add(piece)
                piece = self.pieces[piece].past
        return out

    def last_use(self) -> list[int]:
        """For each piece, the last other pack that attends to it, or -1."""
        out = [-1] * len(self.pieces)
        for number, pack in enumerate(self.packs):
            for piece in self.outside(pack):
                out[piece] = number
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


def row_of_tokens(plan: PackPlan, tree: PrefixTree) -> tuple[Tensor, Tensor, np.ndarray]:
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
