"""The code blocks of the documentation: which there are, in which language, and whether they are marked as not run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from project import PROJECT

PAGES = sorted(
    [
        *PROJECT.glob("docs/*.md"),
        *PROJECT.glob("benchmarks/*.md"),
        PROJECT / "README.md",
        PROJECT / "CONTRIBUTING.md",
        PROJECT / "CHANGELOG.md",
    ]
)
_BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]*?) -->\n+)?^```(?P<language>[\w.]*)[^\n`]*\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Args:
        page: path in the repository.
        line: of its first line of code, from 1.
        language: as it is written after the fence; empty if there is none.
        code: the text between the fences.
        reason: why it is not run; None for a block that is run.
    """

    page: str
    line: int
    language: str
    code: str
    reason: str | None


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    name = page.relative_to(PROJECT).as_posix()
    return [
        Block(name, text.count("\n", 0, match.start("code")) + 1, match["language"], match["code"], match["reason"])
        for match in _BLOCK.finditer(text)
    ]


def all_blocks(*languages: str) -> list[Block]:
    """The blocks of all pages in these languages."""
    return [block for page in PAGES for block in blocks(page) if block.language in languages]
