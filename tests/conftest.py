from __future__ import annotations

from typing import Any

import torch

# The models of the tests are tiny: threads only wait for each other.
torch.set_num_threads(1)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say loudly that the inspector's page was not tested: a skip among hundreds is easily overlooked."""
    skipped = [report for report in terminalreporter.stats.get("skipped", ()) if "no chromium" in str(report.longrepr)]
    if skipped:
        terminalreporter.section("THE INSPECTOR'S PAGE WAS NOT TESTED", sep="!", red=True, bold=True)
        terminalreporter.line(
            f"{len(skipped)} tests need a browser: `apt-get install chromium` and `pip install playwright`."
        )
