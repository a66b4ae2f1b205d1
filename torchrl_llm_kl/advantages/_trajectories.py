"""Trajectories of several sequences: which rows are one trajectory, and in which order."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_llm_kl.advantages._gae import estimate
from torchrl_llm_kl.advantages._groups import Groups, join

__all__ = ["Trajectories"]


class Trajectories:
    """Rows in any order, each one step of a trajectory.

    Args:
        group: the task; int64 ``[B]``.
        run: the trajectory; ``[B]``. Numbers may start again in each group.
        step: where in the trajectory; ``[B]``. Only the order counts.

    Raises:
        ValueError: if a trajectory has two rows with the same step.
    """

    def __init__(self, group: Tensor, run: Tensor, step: Tensor) -> None:
        self.rows = Groups(join(group, run))
        self.place = self.rows.rank(step)
        # `rank` gives equal steps the same place.
        if bool(torch.unique(torch.stack([self.rows.ids, self.place], 1), dim=0).shape[0] != len(step)):
            _raise_for_repeated(self.rows.ids, self.place, run, step)
        self.last = self.place == self.rows.size - 1
        self.group = group[self.last]

    def at_last(self, x: Tensor) -> Tensor:
        """The value at the last step of each trajectory; ``[R]``, in the order of :attr:`group`."""
        return x[self.last]

    def broadcast(self, per_run: Tensor) -> Tensor:
        """The trajectory's number at each of its steps; ``[R]`` to ``[B]``."""
        at_id = torch.empty_like(per_run).index_put((self.rows.ids[self.last],), per_run)
        return at_id[self.rows.ids]

    def discounted(self, reward: Tensor, gamma: float) -> Tensor:
        """The discounted sum of the rewards from each step on; ``[B]``."""
        where = (self.rows.ids, self.place)
        shape = (len(self.rows.sizes), int(self.rows.sizes.max()) if len(reward) else 0)
        table = reward.new_zeros(shape).index_put(where, reward)
        present = torch.zeros(shape, dtype=torch.bool, device=reward.device)
        present = present.index_put(where, torch.ones_like(self.last))
        return estimate(table, torch.zeros_like(table), present, gamma, 1.0)[0][where]


def _raise_for_repeated(ids: Tensor, place: Tensor, run: Tensor, step: Tensor) -> None:
    same = (ids[:, None] == ids) & (place[:, None] == place)
    a, b = same.triu(1).nonzero()[0].tolist()
    raise ValueError(
        f"rows {a} and {b} are both step {int(step[a])} of trajectory {int(run[a])}: expected each step once. Pass whole "
        f"trajectories as they were collected, not a sample with repetitions"
    )
