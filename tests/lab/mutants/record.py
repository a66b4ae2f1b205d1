"""Which files are changed, and which changes no test can notice."""

import json
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from project import PROJECT

from .mutations import Mutant, dropped, mutants_of

PACKAGE = "torchrl_llm_kl"
#: Files below the package. A layer's tests are in the folder of its name, a single file's tests have its name in theirs.
_FILES = "estimators/* losses/* losses/objectives/* advantages/* head/* rollouts/* masks/* scoring/* service/_batcher"
#: Files with formulas, of which each change must be noticed.
_MATHS = """
    losses/objectives/* losses/corrections losses/terms losses/_arithmetic losses/_token_loss
    advantages/_group advantages/_token advantages/_trajectory
"""
#: Files through which gradients go.
_WITH_GRAPH = "estimators/* head/* losses/[!c]*"


class Key(NamedTuple):
    """Identifies a change, independent of its line number."""

    file: str
    function: str
    before: str
    after: str


@dataclass(frozen=True)
class Target:
    """A file that is changed."""

    file: str  #: below ``torchrl_llm_kl``
    tests: str  #: files or a folder of the tests that should notice, below ``tests``; a pattern

    @property
    def maths(self) -> bool:
        """Whether the file holds formulas, of which every change must be noticed."""
        return _any(self.file, _MATHS)

    def mutants(self) -> dict[Key, Mutant]:
        """All its changes."""
        text = (PROJECT / PACKAGE / self.file).read_text()
        found = mutants_of(text, graph=_any(self.file, _WITH_GRAPH))
        found += dropped(text, {".".join(x.function.split(".")[:n]) for x in found for n in (1, 2, 3)})
        out: dict[Key, Mutant] = {}
        for mutant in found:
            out.setdefault(Key(self.file, mutant.function, mutant.before, mutant.after), mutant)
        return out


def targets() -> list[Target]:
    """All files that can be changed."""
    root = PROJECT / PACKAGE
    found = sorted((path, pattern) for pattern in _FILES.split() for path in root.glob(f"{pattern}.py"))
    places = [(path.relative_to(root), pattern) for path, pattern in found if path.name != "__init__.py"]
    own = ("" if pattern.endswith("*") else f"/test_*{place.stem.strip('_')}*.py" for place, pattern in places)
    return [Target(str(place), f"units/{place.parts[0]}{tests}") for (place, _), tests in zip(places, own, strict=True)]


def _any(file: str, patterns: str) -> bool:
    return any(fnmatch(file, f"{pattern}.py") for pattern in patterns.split())


def equivalents() -> dict[tuple[str, str, str], str]:
    """File, function and changed line of changes that no test can notice -> the reason."""
    rows = json.loads(Path(__file__).with_name("equivalent.json").read_text(encoding="utf-8"))
    return {(file, function, line): reason for file, function, line, reason in rows}
