"""In which micro-batches the nodes of a prefix tree are forwarded, and which of their hidden states are asked for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.scoring._tree import PrefixTree, forward_tokens

__all__ = ["ScoredTokens", "plan_levels", "scored_tokens"]


def plan_levels(tree: PrefixTree, tokens_per_batch: int) -> list[list[Tensor]]:
    """Split each level of a prefix tree into micro-batches of similar nodes under a token budget.

    A micro-batch costs ``rows * (longest past + longest node)``: the keys and values of the ancestors are padded to the
    longest past, the tokens of the nodes to the longest node. Nodes are taken in the order of their length, the longest
    first, and of their past where lengths are equal: a padded token passes through the whole model, a padded key only
    through attention.

    Args:
        tree: whose nodes to forward.
        tokens_per_batch: the budget. A node that alone exceeds it gets a micro-batch of its own.

    Returns:
        For each level, from the first, its micro-batches of nodes, int64 on the CPU; together each node exactly once.
        The parent of a node is in the level before it.

    Raises:
        ValueError: if the budget is below 1.

    Example:
        >>> answers = [[1, 2, 3, 4, 5], [1, 2, 3, 6], [7, 8]]
        >>> tokens = Ragged.from_list([torch.tensor(answer) for answer in answers])
        >>> tree = PrefixTree.build(tokens, tokens.lengths, min_shared=3)
        >>> [[batch.tolist() for batch in level] for level in plan_levels(tree, 8)]
        [[[0, 1]], [[2], [3]]]
    """
    if tokens_per_batch < 1:
        raise ValueError(f"tokens_per_batch must be at least 1, got {tokens_per_batch}")
    past, own = tree.start.tolist(), tree.length.tolist()
    levels: list[list[int]] = [[] for _ in range(tree.num_levels)]
    for node, level in enumerate(tree.level.tolist()):
        levels[level].append(node)
    plan = []
    for nodes in levels:
        nodes.sort(key=lambda node: (-own[node], -past[node]))
        batches: list[list[int]] = []
        longest_past = 0
        for node in nodes:
            longest_past = max(longest_past, past[node])
            if not batches or (len(batches[-1]) + 1) * (longest_past + own[batches[-1][0]]) > tokens_per_batch:
                batches.append([])
                longest_past = past[node]
            batches[-1].append(node)
        plan.append([torch.tensor(batch, dtype=torch.long) for batch in batches])
    return plan


@dataclass(frozen=True, eq=False)
class ScoredTokens:
    """``K`` tokens to score and the ``U`` hidden states that predict them, each of these listed once. All on the CPU.

    Several tokens may need one hidden state: the last token of a prompt predicts the first of each answer. Log-sum-exp
    is computed once for each of the ``U``; token ``k`` picks the logit ``target[k]`` of row ``hidden_index[k]``.

    Args:
        node: the node of each hidden state, ascending; ``[U]``, int64, as are all others.
        offset: its place in the node, ascending within one node; ``[U]``.
        hidden_index: which of the ``U`` predicts each token to score; ``[K]``.
        target: the id of each token to score; ``[K]``.
        element: its index in the flat sequences, ascending; ``[K]``.
    """

    node: Tensor
    offset: Tensor
    hidden_index: Tensor
    target: Tensor
    element: Tensor


def scored_tokens(tree: PrefixTree, tokens: Ragged, mask: Tensor) -> ScoredTokens:
    """Find the hidden states of a prefix tree that predict the tokens of a mask.

    Args:
        tree: built from ``tokens``.
        tokens: ids ``[N]``, on any device.
        mask: True at tokens to score; ``[N]``, bool. Token ``t`` of a sequence is predicted by its position ``t - 1``.

    Raises:
        ValueError: if the mask has another shape or dtype, or asks for a token whose predecessor the tree does not hold.

    Example:
        >>> answers = [[1, 2, 3, 4, 5], [1, 2, 3, 6]]
        >>> tokens = Ragged.from_list([torch.tensor(answer) for answer in answers])
        >>> tree = PrefixTree.build(tokens, tokens.lengths - 1, min_shared=3)
        >>> scored = scored_tokens(tree, tokens, tokens.positions >= 3)
        >>> scored.node.tolist(), scored.offset.tolist()
        ([0, 0], [2, 3])
        >>> scored.hidden_index.tolist(), scored.target.tolist(), scored.element.tolist()
        ([0, 1, 0], [4, 5, 6], [3, 4, 8])
    """
    if mask.dtype != torch.bool or mask.shape != tokens.values.shape:
        raise ValueError(
            f"the mask must be bool with one entry for each token, {tuple(tokens.values.shape)}, got shape "
            f"{tuple(mask.shape)} of dtype {mask.dtype}"
        )
    element = mask.cpu().nonzero().squeeze(-1)
    lengths = tokens.lengths.cpu()
    offsets = lengths.cumsum(0)
    sequence = torch.searchsorted(offsets, element, right=True)
    position = element - (offsets - lengths)[sequence] - 1
    _check_held(tree, sequence, position)

    node, offset = tree.locate(sequence, position)
    # Each token of the tree has a place in the row of all nodes: marked places, in order, are the hidden states.
    first = tree.length.cumsum(0) - tree.length
    place = first[node] + offset
    asked = torch.zeros(forward_tokens(tree), dtype=torch.bool)
    asked[place] = True
    nodes = torch.repeat_interleave(torch.arange(tree.num_nodes), tree.length)
    places = asked.nonzero().squeeze(-1)
    return ScoredTokens(
        node=nodes[places],
        offset=places - first[nodes[places]],
        hidden_index=(asked.cumsum(0) - 1)[place],
        target=tokens.values.detach().cpu()[element],
        element=element,
    )


def _check_held(tree: PrefixTree, sequence: Tensor, position: Tensor) -> None:
    """Every position lies in the tree."""
    bad = ((position < 0) | (position >= tree.forward_lengths[sequence])).nonzero()
    if bad.numel() == 0:
        return
    row, token = int(sequence[bad[0]]), int(position[bad[0]]) + 1
    if token == 0:
        raise ValueError(f"the mask asks for the first token of sequence {row}: it has no prefix and so no log-prob")
    raise ValueError(
        f"the mask asks for token {token} of sequence {row}, which takes {token} forwarded tokens: the tree holds "
        f"{int(tree.forward_lengths[row])}. Build it with longer forward_lengths"
    )
