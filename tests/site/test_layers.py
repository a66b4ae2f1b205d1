"""Imports go one way: down the layers, through each layer's package, and never in a circle."""

from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from project import script

layers = script("docs/build_architecture.py")
ROW = {layer: row for row, names in enumerate(layers.LAYERS) for layer in names}
#: Module -> what it imports, and whether by name.
IMPORTS = {module: list(layers.imports(path)) for module, path in layers.modules().items()}

SERVICE = f"{layers.PACKAGE}.service."
# Folders and modules of the service, from the lowest row to the highest. The folders' own packages hold no names.
SERVICE_ROWS = ["_errors _wire _spec _source _actors", "_weights", "engines", "replica"]
SERVICE_ROWS += ["_controller", "client", "_service", "_transforms _weight_sync"]
SERVICE_ROW = {part: row for row, parts in enumerate(SERVICE_ROWS) for part in parts.split()}
#: Parts of one row that may import each other.
TOGETHER = [{"_errors", "_wire", "_spec", "_actors"}]


def wrong_imports() -> list[str]:
    """What modules import that they must not."""
    wrong = []
    for module, targets in IMPORTS.items():
        own = layers.layer_of(module)
        for target, by_name in targets:
            other = layers.layer_of(target)
            if other in (own, "") or own == "":
                continue
            inside = other not in layers.LAYERS[0] and target != f"{layers.PACKAGE}.{other}"
            wrong += [f"{module} loads {target} by name: only the root package does"] * by_name
            wrong += [f"{module} imports {target}: up or across"] * (ROW[other] >= ROW[own])
            wrong += [f"{module} reaches into {target}"] * inside
    return wrong


@pytest.mark.smoke
def test_imports_go_down_and_through_the_package() -> None:
    assert {layers.layer_of(module) for module in IMPORTS} - {""} == set(ROW)
    assert wrong_imports() == []


def test_imports_within_the_service_go_down() -> None:
    wrong = []
    for module in [name for name in IMPORTS if name.startswith(SERVICE)]:
        own = module.removeprefix(SERVICE).split(".")[0]
        for target in [name for name, _ in IMPORTS[module] if name.startswith(SERVICE)]:
            part = target.removeprefix(SERVICE).split(".")[0]
            allowed = part == own or any({part, own} <= both for both in TOGETHER)
            up = not allowed and SERVICE_ROW[part] >= SERVICE_ROW[own]
            wrong += [f"{module} imports {target}: up or across"] * up
    assert wrong == []


def circle(graph: Mapping[str, set[str]]) -> set[str]:
    """The modules of a circle, empty if there is none. A package's own modules import one another while it loads."""
    others = {module: {x for x in targets if not f"{module}.".startswith(f"{x}.")} for module, targets in graph.items()}
    try:
        TopologicalSorter(others).prepare()
    except CycleError as error:
        return set(error.args[1])
    return set()


def test_no_circles() -> None:
    graph = {name: {x for x, by_name in to if not by_name and x in IMPORTS} for name, to in IMPORTS.items()}
    assert circle(graph) == set()
    assert circle({"p.a": {"p.b"}, "p.b": {"p.c"}, "p.c": {"p.a"}}) == {"p.a", "p.b", "p.c"}
    assert circle({"p": {"p.a"}, "p.a": {"p.b", "p"}, "p.b": set()}) == set()


def test_an_import_of_a_private_module_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text(
        "from torchrl_llm_kl.losses import PolicyLoss\n"
        "def later():\n    from torchrl_llm_kl.scoring._run import x\n    import torchrl_llm_kl.head\n"
        "import_module('torchrl_llm_kl.service')\n"
    )
    by_name = {"head": False, "losses": False, "scoring._run": False, "service": True}
    assert sorted(layers.imports(file)) == [(f"torchrl_llm_kl.{name}", flag) for name, flag in by_name.items()]


def test_the_page_has_the_table_of_today() -> None:
    page = layers.PAGE.read_text(encoding="utf-8")
    rows = [row.rsplit("|", 3)[0] for row in layers.table().splitlines()]  # without sizes, which change with every line
    assert all(row in page for row in rows), "run `make docs`"
