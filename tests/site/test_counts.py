"""Counts of the package that must not grow: a ceiling goes down after a clean-up, and up only with a reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from project import script

ROOT = script("docs/build_architecture.py").ROOT
TREES = {
    path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(ROOT.rglob("*.py*")) if path.suffix != ".pyc"
}
NODES = [(path, node) for path, tree in TREES.items() for node in ast.walk(tree)]

#: Parameters of functions with more than twelve. The first three have torchrl's, and five of ours. What an objective computes
#: with is its signature: the hyper-parameters of Trinity-RFT's formulas. Two of the service put everything together.
MANY = {
    "RetrieveKL.__init__": 24,
    "KLRewardTransform.__init__": 19,
    "RetrieveLogProb.__init__": 14,
    "rec": 13,
    "ScoringService.__init__": 20,
    "GangEngine.__init__": 13,
}
#: The files with private names of other libraries; two derive from classes of torchrl.
PRIVATE = {"_private.py", "ragged/_tensordict.py", "transforms/_base.py", "service/_weight_sync.py"}
LIBRARIES = {"torch", "torchrl", "tensordict", "transformers", "peft", "ray"}
#: Of named tuples, of Python, and the tables of a torch module, which are as old as torch.
COMMON = {"_replace", "_asdict", "_make", "_fields", "_exit"}
COMMON |= {"_modules", "_buffers", "_parameters", "_forward_hooks", "_forward_pre_hooks"}


def count(text: str) -> int:
    """How often an expression is written."""
    kinds = (ast.Name, ast.Subscript)
    return sum(isinstance(node, kinds) and ast.unparse(node) == text for _, node in NODES)


@pytest.mark.parametrize(("text", "most"), [("Any", 410), ("dict[str, Any]", 20)])
def test_names_without_meaning(text: str, most: int) -> None:
    assert count(text) <= most


def parameters() -> Iterator[tuple[str, int]]:
    """Functions and methods by name, and how many parameters each has beside ``self``."""
    owners = {id(each): node.name for _, node in NODES if isinstance(node, ast.ClassDef) for each in node.body}
    for _, node in NODES:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            given = node.args
            named = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
            total = len(named) + bool(given.vararg) + bool(given.kwarg) - (named[:1] in (["self"], ["cls"]))
            yield f"{owners.get(id(node), '')}.{node.name}".strip("."), total


def test_parameters() -> None:
    assert {name: number for name, number in parameters() if number > MANY.get(name, 12)} == {}
    assert max(MANY.values()) <= 24


def private_names(path: Path, tree: ast.AST, own: set[str]) -> Iterator[str]:
    """Private names in a file that the package does not define."""
    for node in ast.walk(tree):
        found = []
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") != "self":  # a base class's
            found = [node.attr]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LIBRARIES:
            found = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            found = [str(each.value) for each in node.args[1:2] if isinstance(each, ast.Constant)]
        yield from (f"{path.relative_to(ROOT)}: {x}" for x in found if x[0] == "_" and x[1:2] != "_" and x not in own)


def defined() -> set[str]:
    """The names that the package defines or sets."""
    own = set(COMMON)
    for _, node in NODES:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own.add(node.attr)
    return own


def test_private_names_of_other_libraries_are_in_one_file() -> None:
    own = defined()
    files = {path: tree for path, tree in TREES.items() if path.relative_to(ROOT).as_posix() not in PRIVATE}
    assert [name for path, tree in files.items() for name in private_names(path, tree, own)] == []
    tried = "from torch._ops import f\nx._of_a_library, getattr(x, '_other'), x._replace(), x.__dict__, x.own"
    names = [each.partition(": ")[2] for each in private_names(ROOT / "x.py", ast.parse(tried), own)]
    assert sorted(names) == ["_of_a_library", "_ops", "_other"]
