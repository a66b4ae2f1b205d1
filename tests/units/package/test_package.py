"""The package as a whole: what it exports. What importing it costs: tests/runs/test_interpreters.py."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

import torchrl_llm_kl
from torchrl_llm_kl import losses
from torchrl_llm_kl.losses import objectives


def test_every_exported_name_exists_that_of_objectives_twice() -> None:
    for name in torchrl_llm_kl.__all__:
        assert getattr(torchrl_llm_kl, name).__name__ == name
    assert set(torchrl_llm_kl.__all__) <= set(dir(torchrl_llm_kl))
    assert {"ppo", "select_kl_cov", "sppo_hard"} <= set(objectives.__all__) < set(losses.__all__)
    for name in objectives.__all__:
        assert getattr(objectives, name) is getattr(losses, name)


def imported(statements: list[ast.stmt]) -> dict[str, str]:
    """Name -> module, of the imports among these statements."""
    found = [statement for statement in statements if isinstance(statement, ast.ImportFrom)]
    return {alias.asname or alias.name: str(each.module) for each in found for alias in each.names}


LAZY = [
    path.parent
    for path in Path(torchrl_llm_kl.__file__).parent.rglob("__init__.py")
    if "def __getattr__" in path.read_text()
]


def test_what_loads_on_first_use_is_imported_for_type_checkers_too() -> None:
    """An editor and mypy know only those names."""
    assert {folder.name for folder in LAZY} == {"torchrl_llm_kl", "service", "training"}
    for folder in LAZY:
        package = import_module(".".join(folder.relative_to(Path(torchrl_llm_kl.__file__).parents[1]).parts))
        body = ast.parse((folder / "__init__.py").read_text()).body
        (block,) = (node for node in body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        static = imported(block.body)
        assert set(static) == set(package.__all__) - set(imported(body))
        for name, module in static.items():
            assert getattr(import_module(module), name) is getattr(package, name)


@pytest.mark.parametrize(
    ("package", "typo", "name"),
    [
        ("torchrl_llm_kl", "RetreiveKL", "RetrieveKL"),
        ("torchrl_llm_kl", "servise", "service"),
        ("torchrl_llm_kl.service", "ScoringServise", "ScoringService"),
        ("torchrl_llm_kl.training", "tarin", "train"),
    ],
)
def test_a_misspelt_name_has_a_suggestion(package: str, typo: str, name: str) -> None:
    module = import_module(package)
    with pytest.raises(AttributeError) as error:
        getattr(module, typo)
    assert str(error.value) == f"module {package!r} has no attribute {typo!r}. Did you mean {name!r}?"
    for far in ("_ipython_display_", "xyzzy"):
        with pytest.raises(AttributeError, match=f"no attribute '{far}'$"):
            getattr(module, far)
