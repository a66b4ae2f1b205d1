"""What the package exports. tests/runs/test_interpreters.py measures what importing it costs."""

import ast
from importlib import import_module
from pathlib import Path

import pytest

import torchrl_llm_kl
from torchrl_llm_kl import losses


def test_every_exported_name_exists() -> None:
    for name in torchrl_llm_kl.__all__:
        assert getattr(torchrl_llm_kl, name).__name__ == name
    assert set(torchrl_llm_kl.__all__) <= set(dir(torchrl_llm_kl))
    assert {*losses.available_objectives(), "select_kl_cov", "ObjectiveName"} < set(losses.__all__)
    for name in losses.available_objectives():
        assert getattr(losses, name) is losses.get_objective(name)


def imported(statements: list[ast.stmt]) -> dict[str, str]:
    """Imported name -> module, from the import statements among these."""
    found = [statement for statement in statements if isinstance(statement, ast.ImportFrom)]
    return {alias.asname: str(each.module) for each in found for alias in each.names if alias.asname}


STUBS = sorted(Path(torchrl_llm_kl.__file__).parent.rglob("__init__.pyi"))


def test_the_names_of_the_stubs_are_those_that_load() -> None:
    """A layer's names are listed in its stub alone, which an editor and mypy read."""
    assert len(STUBS) > 12
    for stub in STUBS:
        parts = stub.parent.relative_to(Path(torchrl_llm_kl.__file__).parents[1]).parts
        package = import_module(".".join(parts))
        names = imported(ast.parse(stub.read_text()).body)
        types = {name for name in package.__all__ if name not in names}
        assert all(name.endswith(("Name", "Args", "Overrides")) for name in types)
        assert set(names) <= set(dir(package))
        for name, module in names.items():
            below = module == package.__name__
            expected = import_module(f"{module}.{name}") if below else getattr(import_module(module), name)
            assert getattr(package, name) is expected
            assert (name in package.__all__) <= (not below)


def test_a_misspelt_name_has_a_suggestion() -> None:
    for package, typo, name in (
        ("torchrl_llm_kl", "RetreiveKL", "RetrieveKL"),
        ("torchrl_llm_kl", "servise", "service"),
        ("torchrl_llm_kl.service", "ScoringServise", "ScoringService"),
        ("torchrl_llm_kl.training", "tarin", "train"),
    ):
        suggestion = rf"^module '{package}' has no attribute '{typo}'\. Did you mean '{name}'\?$"
        far = {wrong: f"no attribute '{wrong}'$" for wrong in ("_ipython_display_", "xyzzy")}
        for wrong, message in {typo: suggestion, **far}.items():
            with pytest.raises(AttributeError, match=message):
                getattr(import_module(package), wrong)
