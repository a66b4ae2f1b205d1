"""Imports go one way: down the layers, through each layer's package, and never in a circle."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from scripts import script

layers = script("docs/build_architecture.py")
ROW = {layer: row for row, names in enumerate(layers.LAYERS) for layer in names}
BASE = layers.LAYERS[0]
MODULES = layers.modules()
imports = cache(layers.imports)

SERVICE = f"{layers.PACKAGE}.service."
# Folders and modules of the service, from the lowest row to the highest. The folders' own packages hold no names.
SERVICE_ROWS = [
    {"_errors", "_wire"},
    {"control", "_weights"},
    {"engines"},
    {"replica"},
    {"client"},
    {"_service"},
    {"_transforms", "_weight_sync"},
]
SERVICE_ROW = {part: row for row, parts in enumerate(SERVICE_ROWS) for part in parts}


def wrong_imports() -> list[str]:
    """What modules import that they must not."""
    wrong = []
    for module, path in MODULES.items():
        own = layers.layer_of(module)
        for target, by_name in imports(path):
            other = layers.layer_of(target)
            if other in (own, "") or own == "":
                continue
            if by_name:
                wrong.append(f"{module} loads {target} by name: only the root package does")
            if ROW[other] >= ROW[own]:
                wrong.append(f"{module} imports {target}: up or across")
            if other not in BASE and target != f"{layers.PACKAGE}.{other}":
                wrong.append(f"{module} reaches into {target}")
    return wrong


def test_imports_go_down_and_through_the_package() -> None:
    assert {layers.layer_of(module) for module in MODULES} - {""} == set(ROW)
    assert wrong_imports() == []


def test_imports_within_the_service_go_down() -> None:
    wrong = []
    for module in [name for name in MODULES if name.startswith(SERVICE)]:
        own = module.removeprefix(SERVICE).split(".")[0]
        for target in [name for name, _ in imports(MODULES[module]) if name.startswith(SERVICE)]:
            part = target.removeprefix(SERVICE).split(".")[0]
            same = part == own or {part, own} <= {"_errors", "_wire"} or {part, own} <= {"control", "_weights"}
            if not same and SERVICE_ROW[part] >= SERVICE_ROW[own]:
                wrong.append(f"{module} imports {target}: up or across")
    assert wrong == []


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """A circle of modules, empty if there is none. Importing a module runs the packages that hold it."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for target in sorted(graph.get(module, ())):
            # A package's own modules import one another while it loads: that is no circle.
            if module.startswith(f"{target}."):
                continue
            if found := visit(target, [*path, module]):
                return found
        done.add(module)
        return []

    return next((found for module in graph if (found := visit(module, []))), [])


def test_no_circles() -> None:
    graph = {
        module: {target for target, by_name in imports(path) if not by_name and target in MODULES} - {module}
        for module, path in MODULES.items()
    }
    assert circle(graph) == []
    assert circle({"p.a": {"p.b"}, "p.b": {"p.c"}, "p.c": {"p.a"}}) == ["p.a", "p.b", "p.c", "p.a"]
    assert circle({"p": {"p.a"}, "p.a": {"p.b"}, "p.b": set()}) == []


def test_an_import_of_a_private_module_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text(
        "from torchrl_llm_kl.losses import PolicyLoss\n"
        "def later():\n    from torchrl_llm_kl.scoring._run import x\n    import torchrl_llm_kl.head\n"
        "import_module('torchrl_llm_kl.service')\n"
    )
    assert sorted(layers.imports(file)) == [
        ("torchrl_llm_kl.head", False),
        ("torchrl_llm_kl.losses", False),
        ("torchrl_llm_kl.scoring._run", False),
        ("torchrl_llm_kl.service", True),
    ]


def test_the_page_has_the_table_of_today() -> None:
    page = layers.PAGE.read_text(encoding="utf-8")
    rows = [row.rsplit("|", 3)[0] for row in layers.table().splitlines()]  # without sizes, which change with every line
    assert all(row in page for row in rows), "run `make docs`"
