"""Ceilings of host syncs and kernels, by operation. ``test_budgets.py`` holds them; lower one when an operation got cheaper.

A sync is a wait of the host for the device. Kernels of transformers' own code are not counted, but for ``PACKED``. Each
operation runs a second time, after what happens only once.
"""

from typing import NamedTuple


class Budget(NamedTuple):
    """The ceilings."""

    syncs: int
    kernels: int | None = None


BUDGETS: dict[str, Budget] = {
    "construction of a scorer": Budget(5, 80),
    "score, ids on the device": Budget(2, 28),
    "score, padded ids on the device": Budget(2, 31),
    "score, ids on the CPU": Budget(1, 25),
    "score of top-k and top-p": Budget(2, 84),
    "PolicyLoss forward": Budget(3, 150),
    "PolicyLoss backward": Budget(0, 255),
    "KLComputation": Budget(1, 12),
    "GRPO advantage": Budget(1, 11),
    "diagnose": Budget(8, None),
}
#: All kernels of a scorer's construction, those of the model's own code among them.
PROBE = 540
#: Kernels of a packed score with shared prefixes by those of a plain padded forward of the same sequences.
PACKED = 1.1
