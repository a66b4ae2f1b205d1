"""Ceilings of host syncs and kernels, by operation. ``test_budgets.py`` holds them; lower one when an operation got cheaper.

A sync is a wait of the host for the device. Kernels of transformers' own code are not counted, but for ``PACKED``. Each
operation runs a second time, after what happens only once. Three kernels of each score are the price of a sum that leaves the
largest probability out (``rest_of``), without which the log-prob of a nearly certain token has no digits.
"""

from typing import NamedTuple


class Budget(NamedTuple):
    """The ceilings."""

    syncs: int
    kernels: int | None = None


BUDGETS: dict[str, Budget] = {
    "construction of a scorer": Budget(5, 82),
    "score, ids on the device": Budget(2, 31),
    "score, padded ids on the device": Budget(2, 34),
    "score, ids on the CPU": Budget(1, 28),
    "score of top-k and top-p": Budget(2, 90),
    "PolicyLoss forward": Budget(3, 154),
    "PolicyLoss backward": Budget(0, 258),
    "KLComputation": Budget(1, 12),
    "GRPO advantage": Budget(1, 11),
    "diagnose": Budget(8, None),
}
#: All kernels of a scorer's construction, those of the model's own code among them.
PROBE = 540
#: Kernels of a packed score with shared prefixes by those of a plain padded forward of the same sequences.
PACKED = 1.1
