"""What is known at a place in the code: names, and which of them carry a gradient."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace

#: Parameters that may come with a graph.
CARRIERS = frozenset({"log_prob", "ratio", "log_ratio", "value", "entropy", "kl", "pairs", "logit"})
_SKIPPED = (ast.Import, ast.ImportFrom, ast.Raise, ast.JoinedStr, ast.Assert, ast.arguments)
_NO_NUMBERS = frozenset({"shape", "dtype", "device", "ndim"})


@dataclass(frozen=True)
class Scope:
    """Of a function."""

    function: str = ""
    names: frozenset[str] = frozenset()
    attributes: frozenset[str] = frozenset()
    carriers: frozenset[str] = frozenset()
    graph: bool = True


def sites(tree: ast.Module, *, graph: bool = True) -> Iterator[tuple[ast.AST, Scope]]:
    """All nodes that may be changed, outermost first.

    Left out are docstrings, annotations, defaults, decorators, imports, messages, ``__all__``, ``check_*`` calls and, at the
    level of the module, all but numbers.

    Args:
        tree: a module.
        graph: False if no gradient goes through it.
    """
    top = frozenset(name for node in ast.walk(tree) for name in _bound(node, imports=True))
    attributes = frozenset(node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    scope = Scope(names=top - _locals_only(tree), attributes=attributes, graph=graph)
    for statement in tree.body:
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            yield from _walk(statement, scope)
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            yield from ((x, scope) for x in _children(statement) if isinstance(x, ast.Constant) and _is_number(x))


def functions_of(node: ast.AST, prefix: str = "", *, nested: bool = True) -> Iterator[tuple[str, ast.FunctionDef]]:
    """All functions and methods, also those inside others, with their names as in :class:`Scope`."""
    for child in ast.iter_child_nodes(node):
        inner = f"{prefix}{child.name}." if isinstance(child, (ast.FunctionDef, ast.ClassDef)) else prefix
        if isinstance(child, ast.FunctionDef):
            yield prefix + child.name, child
        if nested or not isinstance(child, ast.FunctionDef):
            yield from functions_of(child, inner, nested=nested)


def _walk(node: ast.AST, scope: Scope) -> Iterator[tuple[ast.AST, Scope]]:
    if isinstance(node, _SKIPPED) or _is_text(node) or _is_check(node):
        return
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        inner = _scope_of(node, scope)
        for statement in node.body:
            yield from _walk(statement, inner)
        return
    yield node, scope
    if isinstance(node, ast.With) and any("no_grad" in ast.dump(item.context_expr) for item in node.items):
        scope = replace(scope, graph=False)
    for child in _children(node):
        yield from _walk(child, scope)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.AnnAssign):
        if node.value is not None:
            yield node.value
        return
    if _is_index(node):  # a place, not an amount
        return
    yield from ast.iter_child_nodes(node)


def _scope_of(node: ast.FunctionDef | ast.ClassDef, outer: Scope) -> Scope:
    name = f"{outer.function}.{node.name}" if outer.function else node.name
    if isinstance(node, ast.ClassDef):
        return replace(outer, function=name)
    bound = frozenset(name for child in ast.walk(node) for name in _bound(child))
    graph = outer.graph and not any("no_grad" in ast.dump(decorator) for decorator in node.decorator_list)
    carriers = _carriers(node) if graph else frozenset()
    return replace(outer, function=name, names=outer.names | bound, carriers=carriers, graph=graph)


def _bound(node: ast.AST, *, imports: bool = False) -> Iterator[str]:
    if isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif imports and isinstance(node, ast.alias):
        yield node.asname or node.name
    elif imports and isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name


def _locals_only(tree: ast.Module) -> frozenset[str]:
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return frozenset(name for function in functions for node in ast.walk(function) for name in _bound(node))


def _carriers(function: ast.FunctionDef) -> frozenset[str]:
    found = {arg.arg for arg in (*function.args.args, *function.args.kwonlyargs)} & CARRIERS
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and carries(node.value, frozenset(found)):
            found |= {name for target in node.targets for child in ast.walk(target) for name in _bound(child)}
    return frozenset(found)


def carries(node: ast.AST, carriers: frozenset[str]) -> bool:
    """Whether a gradient may flow from one of the names through the expression."""
    if isinstance(node, ast.Name):
        return node.id in carriers
    if isinstance(node, (ast.Compare, ast.Dict)) or (isinstance(node, ast.Attribute) and node.attr in _NO_NUMBERS):
        return False
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "detach":
        return False
    return any(carries(child, carriers) for child in ast.iter_child_nodes(node))


def called(node: ast.AST) -> str:
    """The last part of the name of what is called; empty for all but calls."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _is_check(node: ast.AST) -> bool:
    node = node.value if isinstance(node, ast.Expr) else node
    return called(node).startswith("check_") or called(node) in ("warn", "isinstance", "len", "type")


def _is_text(node: ast.AST) -> bool:
    node = node.value if isinstance(node, ast.Expr) else node
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_index(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant) and isinstance(node.operand.value, int)
    )


def _is_number(node: ast.Constant) -> bool:
    return isinstance(node.value, (int, float)) and not isinstance(node.value, bool)
