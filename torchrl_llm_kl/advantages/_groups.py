"""Statistics of groups of rows, for all groups at once."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Groups", "join", "normalised"]


class Groups:
    """Rows that belong together because they carry the same number.

    Every statistic is returned once for each row, ``[B]``. A group never sees another: NaN in one stays there.

    Args:
        group: int64 ``[B]``; equal numbers make a group, in any order.

    Example:
        >>> groups = Groups(torch.tensor([7, 3, 7]))
        >>> groups.size.tolist(), groups.mean(torch.tensor([1.0, 5.0, 2.0])).tolist()
        ([2, 1, 2], [1.5, 5.0, 1.5])
    """

    def __init__(self, group: Tensor) -> None:
        _, self.ids, sizes = torch.unique(group, return_inverse=True, return_counts=True)
        self.sizes = sizes
        self.size = sizes[self.ids]

    @classmethod
    def everything(cls, like: Tensor) -> Groups:
        """All rows in one group."""
        return cls(torch.zeros(like.shape, dtype=torch.long, device=like.device))

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the row's group."""
        return x.new_zeros(self.sizes.shape).index_add(0, self.ids, x)[self.ids]

    def mean(self, x: Tensor) -> Tensor:
        """The mean over the row's group."""
        return self.sum(x) / self.size

    def min(self, x: Tensor) -> Tensor:
        """The least of the row's group."""
        return x.new_zeros(self.sizes.shape).scatter_reduce(0, self.ids, x, "amin", include_self=False)[self.ids]

    def max(self, x: Tensor) -> Tensor:
        """The greatest of the row's group."""
        return -self.min(-x)

    def centred(self, x: Tensor) -> Tensor:
        """The difference from the group's mean: exactly 0 in a group of one, and where all are equal."""
        # Measured from the least, equal values are 0 each, and so is their mean: nothing is left to round.
        above = x - self.min(x)
        return above - self.mean(above)

    def std(self, x: Tensor, *, unbiased: bool = True) -> Tensor:
        """The standard deviation of the row's group; 0 for a group of one."""
        count = self.size - 1 if unbiased else self.size
        return (self.sum(self.centred(x).square()) / count.clamp(min=1)).sqrt()

    def rank(self, x: Tensor) -> Tensor:
        """How many of the row's group are smaller; int64."""
        order = x.argsort(stable=True)
        order = order[self.ids[order].argsort(stable=True)]
        ids, values = self.ids[order], x[order]
        place = torch.arange(len(x), device=x.device)
        first = torch.ones_like(ids, dtype=torch.bool)
        first[1:] = (ids[1:] != ids[:-1]) | (values[1:] != values[:-1])
        start = self.sizes.cumsum(0) - self.sizes
        smaller = torch.where(first, place, 0).cummax(0).values - start[ids] if len(x) else place
        return torch.empty_like(order).index_put((order,), smaller)


def join(a: Tensor, b: Tensor) -> Tensor:
    """One number for each pair of numbers; int64 ``[B]``."""
    return torch.unique(torch.stack([a, b], 1), dim=0, return_inverse=True)[1]


def normalised(centred: Tensor, std: Tensor, epsilon: float) -> Tensor:
    """``centred / (std + epsilon)``, and 0 where there is no spread, also for ``epsilon = 0``."""
    return centred / torch.where(std == 0, 1, std + epsilon)
