"""The inspector's page opens in a browser, and shows the numbers of each token."""

import numpy as np
import torch

from inspector_tab import Tab, needs_chromium, span
from torchrl_llm_kl.diagnostics import TokenColumns

pytestmark = needs_chromium


def test_the_numbers_of_every_token_equal_the_tensors(tab: Tab, columns: TokenColumns) -> None:
    row = 5  # two turns
    tab.open(row)
    read = tab.page.evaluate(
        """() => [...document.querySelectorAll(".tokens [data-i]")].map((span) => {
             span.dispatchEvent(new MouseEvent("mouseover", { bubbles: true }));
             const cells = [...document.querySelectorAll("#card dd")].map((cell) => [cell.dataset.name, cell.textContent]);
             return [document.querySelector("#card .where").textContent, Object.fromEntries(cells)];
           })"""
    )
    given, at = columns.columns, span(columns, row)
    assert len(read) == at.stop - at.start
    expected = {
        **given,
        "mismatch": given["old_log_prob"] - given["sampler_log_prob"],
        "drift": given["log_prob"] - given["old_log_prob"],
    }
    for i, (where, shown) in enumerate(read, at.start):
        assert f"id {columns.tokens.values[i]} ·" in where
        assert f"token {i - at.start + 1} of {len(read)}" in where
        if not columns.mask[i]:
            assert shown == {}
            continue
        assert set(shown) == {*expected, "reward"}
        for name, values in expected.items():
            assert float(shown[name]) == float(str(np.float32(values[i]))), name  # the shortest such decimal
        assert torch.tensor(float(shown["reward"])) == columns.rows["reward"][row]
        assert f"{columns.places[i] + 1} of the answer" in where
        assert f"turn {columns.turns[i] + 1}" in where
