"""Write the table of settings in ``docs/train.md`` from the configuration's own fields.

Run ``make docs`` after a change to a setting; a test fails while the page is out of date.
"""

from __future__ import annotations

import re
from pathlib import Path

from torchrl_llm_kl.training import settings_table

PAGE = Path(__file__).with_name("train.md")


def render() -> str:
    """Return the page with the table of today."""
    text = PAGE.read_text(encoding="utf-8")
    table = settings_table()
    return re.sub(r"(<!-- settings -->\n).*?(<!-- end -->)", lambda m: m[1] + table + m[2], text, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
