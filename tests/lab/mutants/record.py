"""The files that are changed, the test that notices each change, and the changes that no test can notice."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from project import PROJECT

from .mutations import Mutant, dropped, mutants_of

PACKAGE = "torchrl_llm_kl"
#: Files below the package. Tests of a layer are in the folder with its name. Names of tests of a single file contain its name.
_FILES = "estimators/* losses/* losses/objectives/* advantages/* head/* rollouts/* masks/* scoring/* service/_core"
#: Formulas of papers: each of their changes must be noticed.
_MATHS = """
    losses/objectives/* losses/corrections losses/terms losses/_arithmetic losses/_token_loss
    advantages/_group advantages/_token advantages/_trajectory
"""
#: Gradients go through these.
_WITH_GRAPH = "estimators/* head/* losses/[!c]*"
SURVIVED, EQUIVALENT, UNCALLED = "survived", "equivalent", "no test calls it"


class Key(NamedTuple):
    """The identity of a change, which depends neither on its tests nor on its place in the file."""

    file: str
    function: str
    before: str
    after: str


@dataclass(frozen=True)
class Target:
    """A file that is changed."""

    file: str  #: below ``torchrl_llm_kl``
    tests: str  #: pattern of files or a folder below ``tests``, whose tests should notice

    @property
    def maths(self) -> bool:
        """Whether it holds formulas, of which every change must be noticed."""
        return _any(self.file, _MATHS)

    def mutants(self) -> dict[Key, Mutant]:
        """All changes of the file."""
        text = (PROJECT / PACKAGE / self.file).read_text()
        found = mutants_of(text, graph=_any(self.file, _WITH_GRAPH))
        found += dropped(text, {".".join(x.function.split(".")[:n]) for x in found for n in (1, 2, 3)})
        out: dict[Key, Mutant] = {}
        for mutant in found:
            out.setdefault(Key(self.file, mutant.function, mutant.before, mutant.after), mutant)
        return out


def targets() -> list[Target]:
    """All current files."""
    root = PROJECT / PACKAGE
    found = sorted((path, pattern) for pattern in _FILES.split() for path in root.glob(f"{pattern}.py"))
    places = [(path.relative_to(root), pattern) for path, pattern in found if path.name != "__init__.py"]
    own = ("" if pattern.endswith("*") else f"/test_*{place.stem.strip('_')}*.py" for place, pattern in places)
    return [Target(str(place), f"units/{place.parts[0]}{tests}") for (place, _), tests in zip(places, own, strict=True)]


def _any(file: str, patterns: str) -> bool:
    return any(fnmatch(file, f"{pattern}.py") for pattern in patterns.split())


def equivalents() -> dict[tuple[str, str, str], str]:
    """Changes that no test can notice: file, function, the line with the change -> why the result is equal."""
    rows = json.loads(Path(__file__).with_name("equivalent.json").read_text(encoding="utf-8"))
    return {(file, function, line): reason for file, function, line, reason in rows}


def write(path: Path, found: Mapping[Key, str], mutants: set[Key]) -> None:
    """Write the failing test of each change, or one of the words above. Other changes stay if they are ``mutants``."""
    kept = {key: test for key, test in read(path).items() if key in mutants} if path.exists() else {}
    lines = [json.dumps([*key, test], ensure_ascii=False) for key, test in sorted({**kept, **found}.items())]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def read(path: Path) -> dict[Key, str]:
    """Read a file that :func:`write` wrote."""
    return {Key(*key): test for *key, test in json.loads(path.read_text(encoding="utf-8"))}


def noticed(test: str) -> bool:
    """Whether an entry of a record names a test."""
    return test not in (SURVIVED, EQUIVALENT, UNCALLED)
