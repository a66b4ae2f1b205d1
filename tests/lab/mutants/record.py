"""Which tests notice which change, in a file of one line for each change."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

SURVIVED, EQUIVALENT, UNCALLED = "survived", "equivalent", "no test calls it"


class Key(NamedTuple):
    """What tells changes apart. Their tests may come and go, their place in the file may move."""

    file: str
    function: str
    before: str
    after: str


def write(path: Path, found: Mapping[Key, list[str] | str]) -> None:
    """The tests that fail for each change, or one of the words above. What the file holds about other files stays."""
    files = {key.file for key in found}
    kept = {key: tests for key, tests in read(path).items() if key.file not in files} if path.exists() else {}
    found = {**kept, **found}
    lines = [json.dumps([*key, tests], ensure_ascii=False) for key, tests in sorted(found.items())]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def read(path: Path) -> dict[Key, list[str] | str]:
    """As it was written."""
    return {Key(*key): tests for *key, tests in json.loads(path.read_text(encoding="utf-8"))}


def killed(found: Mapping[Key, list[str] | str]) -> list[Key]:
    """Those that a test noticed."""
    return [key for key, tests in found.items() if not isinstance(tests, str)]
