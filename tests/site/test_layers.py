"""Imports only go down the layers, through each layer's package. Some counts must not grow.

No code decides by the wording of an error's message: errors have types and fields.
"""

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from project import script

layers = script("docs/build_architecture.py")
ROW = {layer: row for row, names in enumerate(layers.LAYERS) for layer in names}
#: Module -> the modules it imports, and whether it names what it imports.
IMPORTS = {module: list(layers.imports(path)) for module, path in layers.modules().items()}

#: Layers below the root package, which exports no name of the last row.
EXPORTED = set(ROW) - set(layers.LAYERS[-1])

SERVICE = f"{layers.PACKAGE}.service."
# Folders and modules of the service, from the lowest row to the highest. The folders' own packages hold no names.
SERVICE_ROWS = ["_errors", "_spec", "_messages", "engines", "_core _keeper", "_replica", "_remote", "_service"]
SERVICE_ROWS += ["_transforms _weight_sync"]
SERVICE_ROW = {part: row for row, parts in enumerate(SERVICE_ROWS) for part in parts.split()}


@pytest.mark.smoke
def test_imports_go_down_and_through_the_package() -> None:
    assert {layers.layer_of(module) for module in IMPORTS} - {""} == set(ROW)
    wrong = []
    for module, targets in IMPORTS.items():
        own = layers.layer_of(module)
        for target, by_name in targets:
            other = layers.layer_of(target)
            # The root loads the layers that it exports, so it is above them.
            wrong += [f"{module} imports the root"] * (target == layers.PACKAGE and own in EXPORTED)
            if other in (own, "") or own == "":
                continue
            inside = other not in layers.LAYERS[0] and target != f"{layers.PACKAGE}.{other}"
            wrong += [f"{module} loads {target} by name: only the root package does"] * by_name
            wrong += [f"{module} imports {target}: up or across"] * (ROW[other] >= ROW[own])
            wrong += [f"{module} reaches into {target}"] * inside
    assert wrong == []


def test_imports_within_the_service_go_down() -> None:
    wrong = []
    for module in [name for name in IMPORTS if name.startswith(SERVICE)]:
        own = module.removeprefix(SERVICE).split(".")[0]
        for target in [name for name, _ in IMPORTS[module] if name.startswith(SERVICE)]:
            part = target.removeprefix(SERVICE).split(".")[0]
            up = part != own and SERVICE_ROW[part] >= SERVICE_ROW[own]
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


# ------------------------------------------------------------------ counts: a ceiling goes up only with a reason
PATHS = [path for path in sorted(layers.ROOT.rglob("*.py*")) if path.suffix != ".pyc"]
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in PATHS}
NODES = [(path, node) for path, tree in TREES.items() for node in ast.walk(tree)]

#: Functions with more than twelve parameters, and how many. The first three have torchrl's and five of ours; an objective's
#: signature has all that it computes with.
MANY = {"RetrieveKL.__init__": 24, "KLRewardTransform.__init__": 19, "RetrieveLogProb.__init__": 14}
MANY |= {"rec": 13}
#: The files with private names of other libraries; two derive from classes of torchrl.
PRIVATE = {"_private.py", "ragged/_tensordict.py", "transforms/_base.py", "service/_weight_sync.py"}
LIBRARIES = {"torch", "torchrl", "tensordict", "transformers", "peft", "ray"}
#: Names of named tuples, of Python, and of the tables in torch modules, which never changed.
COMMON = {"_replace", "_asdict", "_make", "_fields", "_exit"}
COMMON |= {"_modules", "_buffers", "_parameters", "_forward_hooks", "_forward_pre_hooks"}


@pytest.mark.parametrize(("text", "most"), [("Any", 410), ("dict[str, Any]", 20)])
def test_untyped_values_stay_rare(text: str, most: int) -> None:
    written = [ast.unparse(node) for _, node in NODES if isinstance(node, (ast.Name, ast.Subscript))]
    assert written.count(text) <= most


def test_functions_have_at_most_twelve_parameters() -> None:
    """``self`` does not count."""
    owners = {id(each): node.name for _, node in NODES if isinstance(node, ast.ClassDef) for each in node.body}
    for node in [node for _, node in NODES if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]:
        name, given = f"{owners.get(id(node), '')}.{node.name}".strip("."), node.args
        named = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
        total = len(named) + bool(given.vararg) + bool(given.kwarg) - (named[:1] in (["self"], ["cls"]))
        assert total <= MANY.get(name, 12), name
    assert max(MANY.values()) <= 24


def private_names(path: Path, tree: ast.AST, own: set[str]) -> Iterator[str]:
    """Private names in a file that the package does not define."""
    for node in ast.walk(tree):
        found = []
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") != "self":
            found = [node.attr]  # attributes of self belong to this package or to a base class
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LIBRARIES:
            found = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            found = [str(each.value) for each in node.args[1:2] if isinstance(each, ast.Constant)]
        private = [x for x in found if x[0] == "_" and x[1:2] != "_" and x not in own]
        yield from (f"{path.relative_to(layers.ROOT)}: {x}" for x in private)


def test_private_names_of_other_libraries_are_in_one_file() -> None:
    """A private name belongs to another library if the package neither defines nor sets it."""
    nodes = [node for _, node in NODES]
    own = COMMON | {x.name for x in nodes if isinstance(x, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))}
    stored = [x for x in nodes if isinstance(x, (ast.Name, ast.Attribute)) and isinstance(x.ctx, ast.Store)]
    own |= {x.id if isinstance(x, ast.Name) else x.attr for x in stored}
    files = {path: tree for path, tree in TREES.items() if path.relative_to(layers.ROOT).as_posix() not in PRIVATE}
    assert [name for path, tree in files.items() for name in private_names(path, tree, own)] == []
    tried = "from torch._ops import f\nx._of_a_library, getattr(x, '_other'), x._replace(), x.__dict__, x.own"
    names = [each.partition(": ")[2] for each in private_names(layers.ROOT / "x.py", ast.parse(tried), own)]
    assert sorted(names) == ["_of_a_library", "_ops", "_other"]


# ------------------------------------------------------------------ messages of errors
#: Methods that search. Shortening a message for people (``partition``, ``rstrip``) is allowed.
SEARCHES = {"startswith", "endswith", "find", "index", "count", "search", "match", "fullmatch", "findall", "sub"}
#: Modules that read messages of other libraries, which have no type for this error.
UNTYPED = {"datasets/_saved.py", "scoring/_wrapping.py", "service/_errors.py"}


def errors_in(function: ast.AST) -> set[str]:
    """Variables that hold errors: from ``except ... as name``, and parameters annotated as an error."""
    names = {node.name for node in ast.walk(function) if isinstance(node, ast.ExceptHandler) and node.name}
    for node in ast.walk(function):
        if isinstance(node, ast.arg) and node.annotation is not None:
            kind = ast.unparse(node.annotation)
            names |= {node.arg} if kind.endswith(("Error", "Exception")) else set()
    return names


def holds_message(node: ast.AST, errors: set[str], texts: set[str]) -> bool:
    """Whether an expression is an error's message. An f-string that shows the message does not count."""
    if isinstance(node, ast.JoinedStr):
        return False
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("str", "repr"):
        return any(isinstance(each, ast.Name) and each.id in errors for each in node.args)
    if isinstance(node, ast.Attribute) and node.attr == "args" and isinstance(node.value, ast.Name):
        return node.value.id in errors
    if isinstance(node, ast.Name):
        return node.id in texts
    return any(holds_message(child, errors, texts) for child in ast.iter_child_nodes(node))


def decisions(tree: ast.AST) -> Iterator[str]:
    """Comparisons with messages, and searches in them."""
    for function in [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]:
        errors = errors_in(function)
        assigned = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
        targets = [target for node in assigned if holds_message(node.value, errors, set()) for target in node.targets]
        texts = {target.id for target in targets if isinstance(target, ast.Name)}
        for node in ast.walk(function):
            if isinstance(node, ast.Compare):
                parts = [node.left, *node.comparators]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SEARCHES:
                parts = [node.func.value, *node.args]
            else:
                continue
            if any(holds_message(part, errors, texts) for part in parts):
                yield f"line {node.lineno}: {ast.unparse(node)}"


def test_no_code_decides_by_a_message() -> None:
    found = {path.relative_to(layers.ROOT).as_posix(): list(decisions(tree)) for path, tree in TREES.items()}
    assert {path: lines for path, lines in found.items() if lines and path not in UNTYPED} == {}


def test_each_form_of_a_decision_is_seen() -> None:
    body = ["'x' in str(error)", "str(error).lower().startswith('x')", "re.search('x', str(error))"]
    body += ["'x' in error.args[0]", "text == 'x'", "str(other) == 'x'"]
    lines = "\n        ".join(["text = str(error)", *body, "f'{error}'.count('x')", "str(error).partition('. ')"])
    code = f"def f(other: ValueError):\n    try:\n        pass\n    except E as error:\n        {lines}\n"
    assert len(list(decisions(ast.parse(code)))) == len(body)
