"""Log-probs tile by tile, once the sums over the vocabulary are known, and how those of two heads differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_llm_kl.head._tiles import Columns, Head, Plan, Tiles

__all__ = ["Look", "Side", "log_ratio", "log_ratio_to_mixture", "looks"]


class Side(NamedTuple):
    """One head's tile: log-probs, probabilities and, with soft-capping, ``1 - tanh ** 2``; ``[n, v]`` each."""

    log_prob: Tensor
    prob: Tensor
    bend: Tensor


class Look(NamedTuple):
    """A tile of every head, and two buffers to work in; ``columns`` are its tokens' weights and biases."""

    rows: slice
    cols: slice
    columns: list[Columns]
    sides: list[Side]
    out: Tensor
    scratch: Tensor


def looks(plan: Plan, heads: list[Head], statistics: Sequence[Tensor]) -> Iterator[Look]:
    """All tiles, those of the same tokens after each other; ``statistics`` as in ``Known``."""
    tiles = Tiles(plan.chunk, heads[0], 3 * len(heads) + 2)
    for cols in tiles.columns():
        columns = [head.columns(cols) for head in heads]
        for rows in tiles.rows():
            *buffers, out, scratch = tiles.buffers(rows, cols)
            sides = [Side(*buffers[3 * i : 3 * i + 3]) for i in range(len(heads))]
            for i, head in enumerate(heads):
                logits = head.logits(rows, cols, columns[i], out=sides[i].log_prob)
                if head.map.soft_cap is not None:
                    bend = torch.div(logits, head.map.gain, out=sides[i].bend)
                    torch.square(bend, out=bend).neg_().add_(1.0)
                for statistic in statistics[2 * i : 2 * i + 2]:
                    logits.sub_(statistic[rows].unsqueeze(-1))
                torch.exp(logits, out=sides[i].prob)
            yield Look(rows, cols, columns, sides, out, scratch)


def log_ratio(plan: Plan, sides: list[Side], i: int, out: Tensor) -> Tensor:
    """``log p - log m`` of head ``i``'s ``p``, where ``m`` is the other head's distribution or the mixture.

    Where ``p`` is 0 it is finite, so that ``p`` times it is 0.
    """
    side, other = sides[i], sides[1 - i]
    if plan.mixture:
        return log_ratio_to_mixture(plan, side.prob, other.prob, i, out)
    return torch.sub(side.log_prob, other.log_prob, out=out).masked_fill_(side.prob == 0, 0.0)


def log_ratio_to_mixture(plan: Plan, prob: Tensor, other_prob: Tensor, i: int, out: Tensor) -> Tensor:
    """``log p - log m``, finite, where ``m`` is the mixture of head ``i``'s probabilities ``p`` and the other's."""
    # m / p is 1 + share * (q / p - 1): log1p keeps the digits where the two agree, log p - log m would lose them.
    torch.div(other_prob, prob, out=out).nan_to_num_(nan=1.0)
    out.sub_(1.0).mul_(plan.shares[1 - i]).log1p_()
    # m is at least p's own share; a share near 1 may have been rounded to 1.
    return out.clamp_(min=math.log(plan.shares[i])).neg_()
