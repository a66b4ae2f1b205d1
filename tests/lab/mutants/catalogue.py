"""Which files are changed, and which tests should notice."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

PACKAGE = "torchrl_llm_kl"
#: Below the package. The tests of a layer are in the folder with its name; those of a single file have its name in theirs.
_FILES = (
    "estimators/*.py",
    "losses/*.py",
    "losses/objectives/*.py",
    "advantages/*.py",
    "head/*.py",
    "rollouts/*.py",
    "masks/*.py",
    "scoring/*.py",
    "service/_wire.py",
)
#: Formulas of papers: each of their changes must be noticed.
_MATHS = (
    "losses/objectives/*.py",
    "losses/corrections.py",
    "losses/terms.py",
    "losses/_arithmetic.py",
    "losses/_value_loss.py",
    "advantages/_group.py",
    "advantages/_token.py",
    "advantages/_trajectory.py",
)
#: Gradients go through these.
_WITH_GRAPH = ("estimators/*", "head/*", "losses/[!c]*")


@dataclass(frozen=True)
class Target:
    """A file that is changed.

    Args:
        file: below ``torchrl_llm_kl``.
        tests: files or a folder of those that should notice, below ``tests``; a pattern.
        maths: whether it holds formulas, of which every change must be noticed.
        graph: whether gradients go through it.
    """

    file: str
    tests: str
    maths: bool
    graph: bool


def targets(project: Path) -> list[Target]:
    """All files, as they are now."""
    root = project / PACKAGE
    found = sorted((path, pattern) for pattern in _FILES for path in root.glob(pattern) if path.name != "__init__.py")
    return [_target(str(path.relative_to(root)), pattern) for path, pattern in found]


def _target(file: str, pattern: str) -> Target:
    maths, graph = (any(fnmatch(file, pattern) for pattern in patterns) for patterns in (_MATHS, _WITH_GRAPH))
    layer = file.split("/")[0]
    tests = f"units/{layer}" if pattern.endswith("*.py") else f"units/{layer}/test_*{Path(file).stem.strip('_')}*.py"
    return Target(file, tests, maths, graph)
