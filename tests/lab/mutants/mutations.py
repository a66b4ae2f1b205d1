"""Small wrong changes to the source of numerical code."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from .scope import Scope, called, carries, functions_of, sites
from .source import Edit, Source

_ARITHMETIC = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*")}
_COMPARISONS: dict[type[ast.cmpop], tuple[str, tuple[str, ...]]] = {
    ast.Lt: ("<", ("<=", ">")),
    ast.LtE: ("<=", ("<", ">=")),
    ast.Gt: (">", (">=", "<")),
    ast.GtE: (">=", (">", "<=")),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: ("is not", ("is",)),
}
_WORDS = (
    ("low", "high"), ("pos", "neg"), ("min", "max"), ("minimum", "maximum"), ("amin", "amax"), ("any", "all"), ("mean", "sum"),
    ("below", "above"), ("chosen", "rejected"), ("won", "lost"), ("right", "wrong"), ("good", "bad"), ("unlikely", "likely"),
    ("usual", "expert"), ("rising", "falling"), ("peak", "valley"), ("warmup", "decay"), ("up", "down"),
)  # fmt: skip
_OTHER_WORD = {a: b for pair in _WORDS for a, b in (pair, pair[::-1])}
_TWINS = frozenset({"min", "max", "amin", "amax", "minimum", "maximum", "mean", "sum", "any", "all"})
_ELEMENTWISE = frozenset(
    {
        "exp",
        "log",
        "abs",
        "square",
        "sqrt",
        "rsqrt",
        "relu",
        "sigmoid",
        "logsigmoid",
        "expm1",
        "log1p",
        "floor",
        "round",
    }
    | {"cos", "bounded_exp", "nan_to_num"}
)


@dataclass(frozen=True)
class Mutant:
    """A file with one change.

    Args:
        kind: what sort of change.
        function: where, empty at the level of the module.
        line: of the file, from 1.
        before: the line, or the lines in one.
        after: the same with the change.
        source: the file without it.
        edit: the change.
    """

    kind: str
    function: str
    line: int
    before: str
    after: str
    source: Source
    edit: Edit

    @property
    def text(self) -> str:
        """The whole file with the change."""
        return self.source.applied(self.edit)


def _mutant(source: Source, edit: Edit, function: str) -> Mutant:
    return Mutant(edit.kind, function, source.line(edit), *source.lines(edit), source, edit)


def mutants_of(text: str, *, graph: bool = True) -> list[Mutant]:
    """Every change to a file, none twice; see :func:`~mutants.scope.sites` for what stays as it is."""
    source = Source(text)
    found: dict[str, Mutant] = {}
    for node, scope in sites(source.tree, graph=graph):
        for edit in _edits(node, scope, source):
            changed = source.applied(edit)
            if changed != text:
                found.setdefault(changed, _mutant(source, edit, scope.function))
    return list(found.values())


def dropped(text: str, functions: Collection[str]) -> list[Mutant]:
    """For each other function that is in no function, one change: its result is missing, or its last step."""
    source, found = Source(text), []
    for name, function in functions_of(source.tree, nested=False):
        last = function.body[-1]
        if name in functions or not isinstance(last, (ast.Return, ast.Expr, ast.Assign)):
            continue
        if isinstance(last.value, ast.Constant) or last.value is None:  # nothing, a text or `...`
            continue
        kept = (
            "super()" if "super()" in source.text(last) else ""
        )  # a method that mentions it is compiled in another way
        nothing = f"return {kept and f'{kept} and '}None" if isinstance(last, ast.Return) else kept or "pass"
        found.append(_mutant(source, source.replace("dropped", last, nothing), name))
    return found


def _edits(node: ast.AST, scope: Scope, source: Source) -> Iterator[Edit]:
    for rule in (_signs, _comparisons, _logic, _names, _masks, _clamps, _gradients, _constants, _functions):
        yield from rule(node, scope, source)


def _signs(node: ast.AST, scope: Scope, source: Source) -> Iterator[Edit]:
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        yield from source.operator("arithmetic", node.left, node.right, *_ARITHMETIC[type(node.op)])
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
        yield source.replace("sign", node, source.alone(node.operand))
    value = node.value if isinstance(node, (ast.Assign, ast.Return)) else None
    if isinstance(value, ast.BinOp) and type(value.op) in _ARITHMETIC and not source.text(value).startswith("-"):
        yield source.replace("sign", value, f"-({source.text(value)})")


def _comparisons(node: ast.AST, scope: Scope, source: Source) -> Iterator[Edit]:
    if not isinstance(node, ast.Compare):
        return
    sides = [node.left, *node.comparators]
    for left, right, operator in zip(sides, sides[1:], node.ops, strict=False):
        if type(operator) in _COMPARISONS:
            old, others = _COMPARISONS[type(operator)]
            for new in others:
                yield from source.operator("comparison", left, right, old, new)


def _logic(node: ast.AST, scope: Scope, source: Source) -> Iterator[Edit]:
    if isinstance(node, ast.BoolOp):
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            yield from source.operator("logic", left, right, old, new)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.Invert)):
        yield source.replace("logic", node, source.alone(node.operand))
    elif isinstance(node, (ast.If, ast.IfExp)) and isinstance(node.test, (ast.Name, ast.Attribute, ast.Call)):
        yield source.replace("logic", node.test, f"(not {source.text(node.test)})")
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield source.replace("logic", node, str(not node.value))


def _names(node: ast.AST, scope: Scope, source: Source) -> Iterator[Edit]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        other = _counterpart(node.id)
        if other in scope.names or (other != node.id and node.id in ("min", "max")):
            yield from _renamed(node, node.id, other, source)
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        other = _counterpart(node.attr)
        if other in scope.attributes or node.attr in _TWINS:
            yield from _renamed(node, node.attr, other, source)
    elif isinstance(node, ast.keyword) and node.arg in ("min", "max"):
        yield source.replace("swap", node, f"{_OTHER_WORD[node.arg]}={source.text(node.value)}")


def _counterpart(name: str) -> str:
    return "_".join(_OTHER_WORD.get(word, word) for word in name.split("_"))


def _renamed(node: ast.AST, name: str, other: str, source: Source) -> Iterator[Edit]:
    if other != name:
        yield source.replace("swap", node, source.text(node)[: -len(name)] + other)


def _masks(node: ast.AST, scope: Scope, source: Source) -> Iterator[Edit]:
    if called(node) == "where" and len(node.args) == 3:  # type: ignore[attr-defined]
        _, *branches = node.args  # type: ignore[attr-defined]
        for branch in branches:
            if not isinstance(branch, ast.Constant):
                yield source.replace("mask", node, source.alone(branch))
    elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitAnd, ast.BitOr)):
        yield source.replace("mask", node, source.alone(node.left))
        yield source.replace("mask", node, source.alone(node.right))
    if isinstance(node, ast.Call) and not called(node).endswith(("_as", "_like")):
        for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
            if isinstance(argument, ast.Name) and argument.id == "mask":
                yield source.replace("mask", argument, "(mask | True)")


def _clamps(node: ast.AST, scope: Scope, source: Source) -> Iterator[Edit]:
    if called(node) != "clamp":
        return
    function, bounds = node.func, list(node.args)  # type: ignore[attr-defined]
    clamped = function.value if isinstance(function, ast.Attribute) else bounds.pop(0)
    yield source.replace("clamp", node, source.alone(clamped))
    if len(bounds) == 2:
        low, high = (source.text(bound) for bound in bounds)
        yield Edit("clamp", source.span(bounds[0])[0], source.span(bounds[1])[1], f"{high}, {low}")


def _gradients(node: ast.AST, scope: Scope, source: Source) -> Iterator[Edit]:
    if called(node) == "detach":
        yield source.replace("detach", node, source.alone(node.func.value))  # type: ignore[attr-defined]
    if not scope.graph:
        return
    if called(node) == "LossTerm" and len(node.args) > 1:  # type: ignore[attr-defined]
        value: ast.AST | None = node.args[1]  # type: ignore[attr-defined]
    else:
        value = node.value if isinstance(node, (ast.Assign, ast.Return)) else None
    one = not isinstance(node, ast.Assign) or isinstance(node.targets[0], ast.Name)
    if isinstance(value, (ast.BinOp, ast.Call, ast.UnaryOp)) and one and carries(value, scope.carriers):
        yield source.replace("detach", value, f"({source.text(value)}).detach()")


def _constants(node: ast.AST, scope: Scope, source: Source) -> Iterator[Edit]:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        doubled = isinstance(node.value, float) and node.value != 0
        yield source.replace("constant", node, repr(2 * node.value if doubled else node.value + 1))


def _functions(node: ast.AST, scope: Scope, source: Source) -> Iterator[Edit]:
    if not isinstance(node, ast.Call):
        return
    name = called(node)
    if name in _ELEMENTWISE:
        method = isinstance(node.func, ast.Attribute) and source.text(node.func.value) not in ("torch", "math")
        argument = node.func.value if method else node.args[0] if node.args else None
        if argument is not None:
            yield source.replace("function", node, source.alone(argument))
    elif name in ("masked_mean", "sequence_mean") and len(node.args) == 2:
        mask = source.alone(node.args[1])
        size = f"{mask}.sum()" if name == "masked_mean" else f"{mask}.sum(-1, keepdim=True)"
        yield source.replace("function", node, f"({source.text(node)} * {size})")
