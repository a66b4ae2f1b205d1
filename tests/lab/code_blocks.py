"""The code blocks of the documentation: which there are, in which language, and whether they are marked as not run."""

from __future__ import annotations

import re
from typing import NamedTuple

from project import PROJECT

_TOP = [PROJECT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES = sorted([*PROJECT.glob("docs/*.md"), *PROJECT.glob("benchmarks/*.md"), *_TOP])
_BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]*?) -->\n+)?^```(?P<language>[\w.]*)[^\n`]*\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


class Block(NamedTuple):
    """A fenced block."""

    page: str  # path in the repository
    line: int  # of its first line of code, from 1
    language: str  # as it is written after the fence; empty if there is none
    code: str
    reason: str | None  # why it is not run; None for a block that is run


def all_blocks(*languages: str) -> list[Block]:
    """The blocks of all pages in these languages, in order."""
    found = []
    for page in PAGES:
        text, name = page.read_text(encoding="utf-8"), page.relative_to(PROJECT).as_posix()
        for match in _BLOCK.finditer(text):
            line = text.count("\n", 0, match.start("code")) + 1
            found.append(Block(name, line, match["language"], match["code"], match["reason"]))
    return [block for block in found if block.language in languages]
