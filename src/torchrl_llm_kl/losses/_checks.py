"""Checks of hyper-parameters. Only numbers are checked: reading a tensor would stall an accelerator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

__all__ = ["check_choice", "check_range"]


def check_range(low: float = -math.inf, high: float = math.inf, *, above: float = -math.inf, **named: Any) -> None:
    """Raise a ValueError unless each named number lies in ``[low, high]`` and is greater than ``above``."""
    for name, value in named.items():
        if isinstance(value, (int, float)) and not (low <= value <= high and value > above):
            bounds = [f"at least {low:g}"] * (low > -math.inf)
            bounds += [f"greater than {above:g}"] * (above > -math.inf)
            bounds += [f"at most {high:g}"] * (high < math.inf)
            raise ValueError(f"{name} must be {' and '.join(bounds) or 'a number'}, got {value}")


def check_choice(choices: Sequence[str], **named: Any) -> None:
    """Raise a ValueError unless each named value is one of ``choices``."""
    for name, value in named.items():
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
