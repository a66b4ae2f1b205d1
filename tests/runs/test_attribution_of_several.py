"""Shares of several seeded faults at once, against Shapley values by plain forwards."""

from __future__ import annotations

from itertools import combinations

import pytest

from seeded_mismatch import FAULTS, check_shares

CASES = [some for size in (2, 3) for some in combinations(FAULTS, size)]


@pytest.mark.parametrize("faults", CASES, ids="+".join)
def test_shares_of_several_faults(faults: tuple[str, ...]) -> None:
    check_shares(faults)
