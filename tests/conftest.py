from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

# The models of the tests are tiny: threads only wait for each other.
torch.set_num_threads(1)


#: Folders whose files take minutes. They come first: begun last, they would run alone while the other worker idles.
LONG = ("tutorials", "distributed", "service", "docs", "training", "diagnostics", "algorithms")


def pytest_collection_modifyitems(items: list[Any]) -> None:
    here = Path(__file__).parent
    rank = {name: i for i, name in enumerate(LONG)}
    items.sort(key=lambda item: rank.get(item.path.relative_to(here).parts[0], len(LONG)))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say loudly that the inspector's page was not tested: a skip among hundreds is easily overlooked."""
    skipped = [report for report in terminalreporter.stats.get("skipped", ()) if "no chromium" in str(report.longrepr)]
    if skipped:
        terminalreporter.section("THE INSPECTOR'S PAGE WAS NOT TESTED", sep="!", red=True, bold=True)
        terminalreporter.line(
            f"{len(skipped)} tests need a browser: `apt-get install chromium` and `pip install playwright`."
        )
