"""What belongs together by its place in the batch."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_llm_kl.advantages._entries import amounts, find

__all__ = ["groups_of_size", "runs_along_time"]


def groups_of_size(td: TensorDictBase, size: int, *, trajectories: bool) -> Tensor:
    """Consecutive rows, or trajectories along the last dimension, ``size`` at a time; int64 ``[S]``.

    Raises:
        ValueError: if the batch does not divide into groups, or it cannot be told where trajectories begin.
    """
    rows, steps = td.batch_size.numel(), 1
    if trajectories:
        if td.batch_dims < 2:
            raise ValueError(
                f"group_size counts trajectories along the last of several dimensions, found batch size "
                f"{tuple(td.batch_size)}: give group_key="
            )
        steps = td.batch_size[-1]
        done = _done(td)
        if done is not None and bool(done.reshape(-1, steps)[:, :-1].any()):
            raise ValueError(
                "group_size needs one trajectory for each env, found some that end before the last step: give group_key="
            )
    units = rows // steps
    if units % size:
        raise ValueError(
            f"found {units} {'trajectories' if trajectories else 'sequences'}, which do not divide into groups of "
            f"group_size={size}: pass whole groups, or give group_key="
        )
    return torch.arange(rows) // steps // size


def runs_along_time(td: TensorDictBase) -> Tensor:
    """Which trajectory a row is of: they lie along the last dimension, and end where ``("next", "done")`` is True.

    Returns:
        Int64 ``[S]``.

    Raises:
        ValueError: for a batch of one dimension that does not say where trajectories end.
    """
    done = _done(td)
    if done is None and td.batch_dims < 2:
        raise ValueError(
            f"cannot tell trajectories apart: found batch size {tuple(td.batch_size)} and no ('next', 'done'). Give "
            f"keys={{'run': ..., 'step': ...}}, or a batch [*envs, steps]"
        )
    rows = td.batch_size.numel()
    line = torch.arange(rows) // (td.batch_size[-1] if td.batch_dims > 1 else rows)
    if done is None:
        return line
    ended_before = done.long().cumsum(0) - done.long()
    return line * (rows + 1) + ended_before.cpu()


def _done(td: TensorDictBase) -> Tensor | None:
    value = find(td, ("next", "done"))
    return None if value is None else amounts(value, td.batch_size.numel(), "('next', 'done')") > 0
