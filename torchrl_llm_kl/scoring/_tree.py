"""The prefix tree of a batch. A prefix that several sequences share is forwarded once."""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from torchrl_llm_kl.ragged import Ragged


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """``M`` nodes, each a stretch of tokens, that spell out ``S`` sequences. All tensors are on the CPU.

    The tokens before a node belong to its ancestors. A node ends where sequences part, or where the longest of them
    ends. A sequence that is a prefix of another one, or equal to it, ends inside a node and costs nothing.

    Nodes are numbered by their first sequence, then by their start: parents come before children, and the order does not
    depend on the token ids.

    Example:
        >>> answers = [[1, 2, 3, 4, 5], [1, 2, 3, 6], [1, 2, 3]]
        >>> tokens = Ragged.from_list([torch.tensor(answer) for answer in answers])
        >>> tree = PrefixTree.build(tokens, tokens.lengths, min_shared=3)
        >>> tree.parent.tolist(), tree.start.tolist(), tree.length.tolist(), tree.leaf.tolist()
        ([-1, 0, 0], [0, 3, 3], [3, 2, 1], [1, 2, 0])
        >>> tree.num_tokens, int(tokens.lengths.sum())
        (6, 12)
    """

    # Of each node, int64 [M]:
    parent: Tensor  # the node before it, -1 for a node at the start of sequences
    start: Tensor  # number of tokens before it
    length: Tensor  # number of its tokens, at least 1
    element: Tensor  # its tokens are values[element : element + length] of the flat sequences
    # Of each sequence, int64 [S]:
    offset: Tensor  # its first token in the flat sequences
    leaf: Tensor  # the node with its last forwarded token, -1 if there is nothing to forward
    forward_lengths: Tensor  # number of leading tokens that are in the tree

    @classmethod
    def build(cls, tokens: Ragged, forward_lengths: Tensor, *, min_shared: int = 16, min_length: int = 1) -> PrefixTree:
        """Build the tree of the first ``forward_lengths [S]`` tokens of each sequence. Ids and lengths are int64.

        Splitting a pack has a cost, so a short common prefix is not worth sharing. From the first token on, a common prefix
        becomes a node if that saves at least ``min_shared`` tokens: its length after the last node times the number of its
        continuations minus one. Other sequences are separate after their last node. Equal sequences and prefixes of others
        are shared at any ``min_shared``. No node with children has less than ``min_length`` tokens.
        """
        values, lengths = tokens.values.detach().cpu().numpy(), tokens.lengths.tolist()
        forward_lengths = forward_lengths.detach().cpu()
        ends = forward_lengths.tolist()
        # Lists are faster than tensors for a few sequences, and not slow for many.
        offsets = [last - length for last, length in zip(itertools.accumulate(lengths), lengths, strict=True)]
        parts = [values[first : first + end] for first, end in zip(offsets, ends, strict=True)]
        order = _sorted_sequences(parts)
        shared = [_common_prefix(parts[a], parts[b]) for a, b in itertools.pairwise(order)]

        # In this order a sequence that is a prefix of others is a prefix of its successor.
        longest = [i for i, row in enumerate(order) if i == len(shared) or shared[i] < ends[row]]
        sources, between = [order[i] for i in longest], [shared[i] for i in longest[:-1]]
        nodes, leaf_of = _nodes(between, sources, [ends[row] for row in sources], min_shared, min_length)
        leaf = [-1] * len(lengths)
        for i, row in enumerate(order):
            node = leaf_of[bisect.bisect_left(longest, i)]
            while nodes[node][1] >= ends[row]:  # the node begins after the last token of this prefix
                node = nodes[node][3]
            leaf[row] = node
        columns = [(parent, start, end - start, offsets[source] + start) for source, start, end, parent in nodes]
        # numpy takes a fraction of torch's time for so few numbers.
        parent, start, length, element = map(torch.from_numpy, np.array(columns, "i8").reshape(-1, 4).T)
        offset, leaves = (torch.from_numpy(np.array(numbers, "i8")) for numbers in (offsets, leaf))
        return cls(parent, start, length, element, offset, leaves, forward_lengths)

    @property
    def num_nodes(self) -> int:
        """``M``."""
        return self.parent.numel()

    @cached_property
    def num_tokens(self) -> int:
        """Number of tokens that a model forwards. Without sharing it would be ``forward_lengths.sum()``."""
        return int(self.length.numpy().sum())

    @cached_property
    def first(self) -> Tensor:
        """The start of each node when all nodes are concatenated, ``[M]``."""
        return torch.from_numpy(self.length.numpy().cumsum()) - self.length

    def place(self, element: Tensor) -> Tensor:
        """The places of flat elements when all nodes are concatenated, ``[K]``. See :meth:`locate`."""
        node, offset = self.locate(element)
        return self.first[node] + offset

    def locate(self, element: Tensor) -> tuple[Tensor, Tensor]:
        """The node of each flat element and the place in it, ``[K]`` each. All must be forwarded, which is not checked."""
        firsts, nodes = self._paths
        flat = element.numpy()
        step = firsts.searchsorted(flat, "right") - 1
        return torch.from_numpy(nodes[step]), torch.from_numpy(flat - firsts[step])

    def forwarded(self, count: int) -> Tensor:
        """A mask of the elements that are forwarded, among ``count`` flat elements; bool ``[N]``."""
        inside = torch.arange(self.num_tokens) - self.first.repeat_interleave(self.length)
        return torch.zeros(count, dtype=torch.bool).index_fill_(
            0, self.element.repeat_interleave(self.length) + inside, True
        )

    def spread(self, values: Tensor, tokens: Ragged) -> Tensor:
        """Copy the value of each forwarded token to all tokens that share it, in place; ``values [N, ...]``."""
        element = (tokens.positions < self.forward_lengths[tokens.sequence_ids]).nonzero().squeeze(-1)
        node, offset = self.locate(element)
        values[element] = values[self.element[node] + offset]
        return values

    @cached_property
    def _paths(self) -> tuple[np.ndarray, np.ndarray]:
        """The path of each sequence through the tree: the first flat element in each node, ascending ``[P]``, and the node."""
        parent, start, offset, node = (x.numpy() for x in (self.parent, self.start, self.offset, self.leaf))
        firsts, nodes = [offset[:0]], [node[:0]]
        while len(node):
            offset, node = offset[node >= 0], node[node >= 0]
            firsts.append(offset + start[node])
            nodes.append(node)
            node = parent[node]
        every = np.concatenate(firsts)
        order = every.argsort()
        return every[order], np.concatenate(nodes)[order]


# ---------------------------------------------------------------------- the order of the sequences


def _sorted_sequences(parts: list[np.ndarray]) -> list[int]:
    """The indices of the non-empty sequences, ordered so that those with a common prefix are neighbours.

    A prefix comes before the sequences that continue it. Of equal sequences the first one comes last.
    """
    # Any total order works. Comparing bytes takes one memory comparison per pair of sequences.
    return sorted((i for i in reversed(range(len(parts))) if len(parts[i])), key=lambda i: parts[i].tobytes())


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """The number of leading tokens that two sequences share."""
    end = min(len(a), len(b))
    differ = a[:end] != b[:end]
    first = int(differ.argmax())
    return first if differ[first] else end


# ---------------------------------------------------------------------- where to share


def _branches(shared: list[int]) -> list[tuple[int, int, int, int]]:
    """``(depth, first, last, parts)`` of every branch of ``len(shared) + 1`` sorted sequences, parents before children.

    The sequences ``first .. last`` share ``depth`` leading tokens and part there into ``parts``.
    """
    done: list[tuple[int, int, int, int]] = []
    stack = [[0, 0, 0]]  # depth, first and parts so far of the branches of the current sequence
    for row, depth in enumerate([*shared, 0]):
        if depth > stack[-1][0]:
            stack.append([depth, row, 0])
        stack[-1][2] += 1
        while stack[-1][0] > depth:
            deeper, first, parts = stack.pop()
            done.append((deeper, first, row, parts))
            if stack[-1][0] < depth:
                stack.append([depth, first, 0])
            stack[-1][2] += 1
    return done[::-1]


def _nodes(
    shared: list[int], sources: list[int], ends: list[int], min_shared: int, min_length: int
) -> tuple[list[tuple[int, int, int, int]], list[int]]:
    """``(source, start, end, parent)`` of each node in order, and the last node of each sorted sequence.

    ``source`` is the first sequence that holds the whole node.
    """
    nodes: list[tuple[int, int, int, int]] = []
    owner = [-1] * len(sources)  # the deepest node of each sequence so far
    leaves = [(end, row, row, 0) for row, end in enumerate(ends)]
    for end, first, last, parts in [*_branches(shared), *leaves]:
        parent = owner[first]
        start = nodes[parent][2] if parent >= 0 else 0
        if parts == 0 or (end - start >= min_length and (end - start) * (parts - 1) >= min_shared):
            rows = slice(first, last + 1)
            owner[rows] = [len(nodes)] * (last + 1 - first)
            nodes.append((min(sources[rows]), start, end, parent))
    order = sorted(range(len(nodes)), key=nodes.__getitem__)
    rank = {-1: -1} | {node: i for i, node in enumerate(order)}
    return [(*nodes[node][:3], rank[nodes[node][3]]) for node in order], [rank[node] for node in owner]
