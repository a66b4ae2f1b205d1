"""No code decides by the wording of an error's message: errors have types and fields."""

import ast
from collections.abc import Iterator

from project import script

layers = script("docs/build_architecture.py")
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
        texts = {
            target.id
            for node in assigned
            if holds_message(node.value, errors, set())
            for target in node.targets
            if isinstance(target, ast.Name)
        }
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
    found = {
        path.relative_to(layers.ROOT).as_posix(): list(decisions(ast.parse(path.read_text(encoding="utf-8"))))
        for path in layers.modules().values()
    }
    assert {path: lines for path, lines in found.items() if lines and path not in UNTYPED} == {}


def test_each_form_of_a_decision_is_seen() -> None:
    body = [
        "'x' in str(error)",
        "str(error).lower().startswith('x')",
        "re.search('x', str(error))",
        "'x' in error.args[0]",
    ]
    body += ["text == 'x'", "str(other) == 'x'"]
    lines = "\n        ".join(["text = str(error)", *body, "f'{error}'.count('x')", "str(error).partition('. ')"])
    code = f"def f(other: ValueError):\n    try:\n        pass\n    except E as error:\n        {lines}\n"
    assert len(list(decisions(ast.parse(code)))) == len(body)
