"""Hidden states of a batch whose sequences share prefixes: each shared stretch goes through the body once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchrl_llm_kl.scoring._model import call, hidden_of
from torchrl_llm_kl.scoring._request import Request
from torchrl_llm_kl.scoring._tree import PrefixTree
from torchrl_llm_kl.scoring._tree_plan import plan_levels, scored_tokens

__all__ = ["Past", "shared_hidden"]

# Keys and values of some tokens of one sequence, layer by layer: [heads, tokens, size].
Past = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class _Asked:
    """Hidden states that predict tokens to score: ``element [K]`` sorted by node, and where they are."""

    element: Tensor
    node: Tensor
    offset: Tensor


def shared_hidden(
    body: nn.Module, request: Request, tree: PrefixTree, *, tokens_per_batch: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Run the body over a prefix tree, level by level, each node on the keys and values of those before it.

    Args:
        body: maps token ids to hidden states, takes and returns ``past_key_values``.
        request: what to score.
        tree: of the request's tokens and forward lengths.
        tokens_per_batch: the most tokens in one forward, padding and past included.
        device: where the body is.

    Yields:
        Flat elements to score ``[n]`` (on the CPU), and the hidden states that predict them ``[n, H]``.
    """
    asked = _asked(request, tree)
    pasts: dict[int, Past] = {}
    for level, batches in enumerate(plan_levels(tree, tokens_per_batch)):
        for nodes in batches:
            hidden, cache, width = _forward(body, request, tree, nodes, pasts, device)
            for row, node in enumerate(nodes.tolist()):
                if tree.has_children[node]:
                    first = width - int(tree.start[node])
                    last = width + int(tree.length[node])
                    pasts[node] = [(k[row, :, first:last], v[row, :, first:last]) for k, v in _layers(cache)]
            row_of = torch.full((tree.num_nodes,), -1, dtype=torch.long)
            row_of[nodes] = torch.arange(len(nodes))
            mine = row_of[asked.node] >= 0
            if bool(mine.any()):
                picked = row_of[asked.node[mine]].to(device), asked.offset[mine].to(device)
                yield asked.element[mine], hidden[picked]
        for node in [node for node in pasts if int(tree.level[node]) < level]:
            del pasts[node]  # its children are done


def _asked(request: Request, tree: PrefixTree) -> _Asked:
    scored = scored_tokens(tree, request.tokens, request.mask)
    return _Asked(scored.element, scored.node[scored.hidden_index], scored.offset[scored.hidden_index])


def _forward(
    body: nn.Module,
    request: Request,
    tree: PrefixTree,
    nodes: Tensor,
    pasts: dict[int, Past],
    device: torch.device,
) -> tuple[Tensor, object, int]:
    """Hidden states ``[b, L, H]`` of some nodes, the cache with their keys and values, and the width of the past."""
    start, length = tree.start[nodes], tree.length[nodes]
    width, longest = int(start.max()), int(length.max())
    column = torch.arange(longest)
    real = column < length.unsqueeze(-1)
    index = tree.element[nodes].unsqueeze(-1) + torch.minimum(column, length.unsqueeze(-1) - 1)
    seen = torch.arange(width) >= width - start.unsqueeze(-1)
    options: dict[str, object] = {
        "attention_mask": torch.cat([seen, real], -1).long().to(device),
        "position_ids": (start.unsqueeze(-1) + column).to(device),
        "use_cache": bool(tree.has_children[nodes].any()) or width > 0,
    }
    cache = None
    if options["use_cache"]:
        parents = [pasts[parent] for parent in tree.parent[nodes].tolist()] if width else []
        cache = options["past_key_values"] = make_cache(parents, width)
    hidden = hidden_of(call(body, torch.where(real, request.tokens.values[index], 0).to(device), **options))
    if cache is not None and any(keys.shape[-2] != width + longest for keys, _ in _layers(cache)):
        raise RuntimeError(f"{type(body).__name__} was given keys and values and did not add its own to them")
    return hidden, cache, width


def make_cache(pasts: list[Past], width: int) -> object:
    """A cache that holds the last ``width`` tokens of each row, those of a shorter past padded on the left."""
    from transformers import DynamicCache

    cache = DynamicCache()
    if not pasts:
        return cache
    for layer in range(len(pasts[0])):
        cache.update(
            _stack([past[layer][0] for past in pasts], width), _stack([past[layer][1] for past in pasts], width), layer
        )
    return cache


def _stack(rows: list[Tensor], width: int) -> Tensor:
    """``[heads, T_i, size]`` to ``[b, heads, width, size]``, padded on the left."""
    first = rows[0]
    if all(row is first for row in rows) and first.shape[1] == width:
        return first.unsqueeze(0).expand(len(rows), -1, -1, -1)
    out = first.new_zeros(len(rows), first.shape[0], width, first.shape[2])
    for i, row in enumerate(rows):
        out[i, :, width - row.shape[1] :] = row
    return out


def _layers(cache: object) -> list[tuple[Tensor, Tensor]]:
    return [(layer.keys, layer.values) for layer in cache.layers]  # type: ignore[attr-defined]
