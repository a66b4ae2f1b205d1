"""The inspector's page opens in a browser, and shows the numbers of a token."""

from __future__ import annotations

import numpy as np

from inspector_tab import Tab, needs_chromium
from torchrl_llm_kl.diagnostics import TokenColumns

pytestmark = needs_chromium


def test_the_page_shows_a_token_s_numbers(tab: Tab, columns: TokenColumns) -> None:
    tab.open(3)
    start = int(columns.tokens.offsets[3])
    first = int(columns.mask[start:].nonzero()[0])
    tab.token(first).hover()
    shown = tab.card()
    for name in ("kl", "log_prob", "advantage"):
        assert shown[name] == float(str(np.float32(columns.columns[name][start + first]))), name
