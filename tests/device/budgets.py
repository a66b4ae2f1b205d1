"""Ceilings of host syncs and kernels, by operation. ``test_budgets.py`` holds them; lower one when an operation got cheaper.

A sync is a wait of the host for the device. Kernels of transformers' own code are not counted, but for ``PACKED``. Each
operation runs a second time, after what happens only once.
"""

from __future__ import annotations

from typing import NamedTuple


class Budget(NamedTuple):
    """The ceilings, and the goals that they approach."""

    syncs: int
    kernels: int | None = None
    goal_syncs: int | None = None
    goal_kernels: int | None = None


BUDGETS: dict[str, Budget] = {
    "score, ids on the device": Budget(4, 144, goal_syncs=2),
    "score, ids on the CPU": Budget(2, 144, goal_syncs=1),
    "score of top-k and top-p": Budget(19, 259, goal_syncs=3),
    "PolicyLoss forward": Budget(19, 539, goal_syncs=3, goal_kernels=150),
    "PolicyLoss backward": Budget(0, None, goal_syncs=0),
    "KLComputation": Budget(2, 21, goal_syncs=1, goal_kernels=25),
    "GRPO advantage": Budget(19, 93, goal_syncs=1, goal_kernels=30),
    "diagnose": Budget(268, None, goal_syncs=30),
}
#: Kernels of a packed score with shared prefixes by those of a plain padded forward of the same sequences; the goal is 1.5.
PACKED = 1.94
