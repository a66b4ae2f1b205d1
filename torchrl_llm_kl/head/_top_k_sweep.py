"""The most probable tokens and the sum of the rest, tile by tile."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_llm_kl.head._tiles import Head, Tiles, wide

__all__ = ["top_k_sweep"]


@torch.no_grad()
def top_k_sweep(head: Head, k: int, chunk: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Indices ``[N, k]``, log-probs ``[N, k]`` and the log-prob of all other tokens ``[N]``."""
    # The first tile fills all k places.
    tiles = Tiles((chunk[0], max(chunk[1], k)), head, 1)
    values = head.hidden.new_empty(head.hidden.shape[0], k, dtype=wide(head.map.dtype))
    indices = values.new_empty(values.shape, dtype=torch.long)
    tail_top, tail = head.state(torch.finfo(values.dtype).min), head.state(0.0)
    with torch.autocast(head.hidden.device.type, enabled=False):
        for cols in tiles.columns():
            columns = head.columns(cols)
            for rows in tiles.rows():
                (logits,) = tiles.buffers(rows, cols)
                head.logits(rows, cols, columns, out=logits)
                found, tokens = logits.topk(min(k, logits.shape[1]), -1)
                logits.scatter_(1, tokens, float("-inf"))
                tokens = tokens + cols.start
                if cols.start > 0:
                    found, order = torch.cat([values[rows], found], -1).sort(-1, descending=True)
                    tokens = torch.cat([indices[rows], tokens], -1).gather(1, order)
                values[rows], indices[rows] = found[:, :k], tokens[:, :k]
                for outside in (found[:, k:], logits):
                    _absorb(tail_top[rows], tail[rows], outside)
    top = values[:, :1]
    tail_share = tail.log() + (tail_top - top.squeeze(1))
    shares = values - top
    total = torch.logaddexp(shares.logsumexp(-1), tail_share)
    return indices, shares - total.unsqueeze(1), tail_share - total


def _absorb(top: Tensor, total: Tensor, values: Tensor) -> None:
    """Add ``exp(values)`` to ``total``, both relative to ``top``; in place, ``values`` too."""
    if values.shape[1] == 0:
        return
    common = torch.maximum(top, values.amax(-1))
    total.mul_((top - common).exp_()).add_(values.sub_(common.unsqueeze(1)).exp_().sum(-1))
    top.copy_(common)
