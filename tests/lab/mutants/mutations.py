"""Small wrong changes to the source of numerical code."""

import ast
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

_ARITHMETIC = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*")}
_COMPARISONS: dict[type[ast.cmpop], tuple[str, ...]] = {ast.Lt: ("<", "<=", ">"), ast.LtE: ("<=", "<", ">=")}
_COMPARISONS |= {ast.Gt: (">", ">=", "<"), ast.GtE: (">=", ">", "<="), ast.Eq: ("==", "!="), ast.NotEq: ("!=", "==")}
_COMPARISONS |= {ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is")}
_WORDS = """
    low/high pos/neg min/max minimum/maximum amin/amax any/all mean/sum below/above chosen/rejected won/lost right/wrong
    good/bad unlikely/likely usual/expert rising/falling peak/valley warmup/decay up/down
"""
_OTHER_WORD = {a: b for pair in _WORDS.split() for a, b in (pair.split("/"), pair.split("/")[::-1])}
_TWINS = ("min", "max", "amin", "amax", "minimum", "maximum", "mean", "sum", "any", "all")
_ELEMENTWISE = re.compile(
    "exp|log|abs|square|sqrt|rsqrt|relu|sigmoid|logsigmoid|expm1|log1p|floor|round|cos|bounded_exp|nan_to_num"
)
#: Parameters that may come with a graph.
_CARRIERS = {"log_prob", "ratio", "log_ratio", "value", "entropy", "kl", "pairs", "logit"}
_NO_NUMBERS = ("shape", "dtype", "device", "ndim")
_SKIPPED = (ast.Import, ast.ImportFrom, ast.Raise, ast.JoinedStr, ast.Assert, ast.arguments)
_ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Constant, ast.Subscript, ast.Tuple, ast.List, ast.Dict)


# ------------------------------------------------------------------ the text
Edit = tuple[int, int, str]  # bytes from the first to the second number become the text


class Source:
    """A file's text, addressed in bytes as ``ast`` does."""

    def __init__(self, text: str) -> None:
        self.raw, self.tree = text.encode(), ast.parse(text)
        self._starts = [0]
        for line in self.raw.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def span(self, node: ast.AST) -> tuple[int, int]:
        """The first byte, and the byte after the last one."""
        first, last = self._starts[node.lineno - 1], self._starts[node.end_lineno - 1]
        return first + node.col_offset, last + node.end_col_offset

    def text(self, node: ast.AST) -> str:
        """The source text of a node, without parentheses around it."""
        return self.raw[slice(*self.span(node))].decode()

    def operand(self, node: ast.AST) -> str:
        """The source text of a node, in parentheses where it may need them in another place."""
        return self.text(node) if isinstance(node, _ATOMS) else f"({self.text(node)})"

    def replace(self, node: ast.AST, text: str) -> Edit:
        """The edit that replaces a whole node."""
        return *self.span(node), text

    def operator(self, left: ast.AST, right: ast.AST, old: str, new: str) -> Iterator[Edit]:
        """The edit of the operator between two operands. None if it is not written as ``old``."""
        start, end = self.span(left)[1], self.span(right)[0]
        between = self.raw[start:end].decode()
        if between.count(old) == 1:
            yield start, end, between.replace(old, new)


@dataclass(frozen=True)
class Mutant:
    """A file with one change."""

    function: str  #: the name of the function, empty at the level of the module
    source: Source  #: the file without the change
    edit: Edit

    @property
    def text(self) -> str:
        """The whole file with the change."""
        start, end, text = self.edit
        return (self.source.raw[:start] + text.encode() + self.source.raw[end:]).decode()

    @property
    def line(self) -> int:
        """The number of the changed line, from 1."""
        return self.source.raw.count(b"\n", 0, self.edit[0]) + 1

    @property
    def before(self) -> str:
        """The line without the change. Several lines are joined."""
        return self._around(self.source.raw[slice(*self.edit[:2])].decode())

    @property
    def after(self) -> str:
        """The line with the change."""
        return self._around(self.edit[2])

    def _around(self, text: str) -> str:
        raw, (start, end, _) = self.source.raw, self.edit
        head, tail = raw[raw.rfind(b"\n", 0, start) + 1 : start], raw[end:].partition(b"\n")[0]
        return " ".join(f"{head.decode()}{text}{tail.decode()}".split())


def mutants_of(text: str, *, graph: bool = True) -> list[Mutant]:
    """All different changes to a file. ``graph``: whether a gradient goes through it.

    Docstrings, annotations, defaults, decorators, imports, messages, ``__all__``, ``check_*`` calls and, at the level of the
    module, all but numbers stay as they are.
    """
    source, found = Source(text), dict[str, Mutant]()
    for node, scope in _sites(source.tree, graph):
        for rule in _RULES:
            for edit in rule(node, scope, source):
                mutant = Mutant(scope.function, source, edit)
                if (changed := mutant.text) != text:
                    found.setdefault(changed, mutant)
    return list(found.values())


def dropped(text: str, functions: Collection[str]) -> list[Mutant]:
    """One change for each function that is neither nested nor in ``functions``: its result or its last step is missing."""
    source, found = Source(text), []
    for name, function in functions_of(source.tree, nested=False):
        last = function.body[-1]
        if name in functions or not isinstance(last, (ast.Return, ast.Expr, ast.Assign)):
            continue
        if isinstance(last.value, ast.Constant) or last.value is None:  # nothing, a text or `...`
            continue
        # A method that mentions super() is compiled in another way.
        kept = "super()" if "super()" in source.text(last) else ""
        nothing = f"return {kept and f'{kept} and '}None" if isinstance(last, ast.Return) else kept or "pass"
        found.append(Mutant(name, source, source.replace(last, nothing)))
    return found


# ------------------------------------------------------------------ names at a place, and which of them carry a gradient
@dataclass(frozen=True)
class Scope:
    """The names that a function can use."""

    function: str = ""
    names: frozenset[str] = frozenset()
    attributes: frozenset[str] = frozenset()
    carriers: frozenset[str] = frozenset()
    graph: bool = True


Sites = Iterator[tuple[ast.AST, Scope]]


def _sites(tree: ast.Module, graph: bool) -> Sites:
    """All nodes that may be changed, outermost first."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    local = {name for function in functions for node in ast.walk(function) for name in _bound(node)}
    names = {name for node in ast.walk(tree) for name in _bound(node, imports=True)} - local
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    scope = Scope(names=frozenset(names), attributes=frozenset(attributes), graph=graph)
    for statement in tree.body:
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            yield from _walk(statement, scope)
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            yield from ((x, scope) for x in _children(statement) if _number(x) is not None)


def functions_of(node: ast.AST, prefix: str = "", *, nested: bool = True) -> Iterator[tuple[str, ast.FunctionDef]]:
    """All functions and methods with their names as in :class:`Scope`. ``nested`` includes those inside others."""
    for child in ast.iter_child_nodes(node):
        inner = f"{prefix}{child.name}." if isinstance(child, (ast.FunctionDef, ast.ClassDef)) else prefix
        if isinstance(child, ast.FunctionDef):
            yield prefix + child.name, child
        if nested or not isinstance(child, ast.FunctionDef):
            yield from functions_of(child, inner, nested=nested)


def _walk(node: ast.AST, scope: Scope) -> Sites:
    value = node.value if isinstance(node, ast.Expr) else node
    text = isinstance(value, ast.Constant) and isinstance(value.value, str)
    check = called(value).startswith("check_") or called(value) in ("warn", "isinstance", "len", "type")
    if isinstance(node, _SKIPPED) or text or check:
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
        yield from [node.value] if node.value else ()
    elif not (isinstance(node, ast.UnaryOp) and isinstance(_number(node.operand), int)):  # an index, not an amount
        yield from ast.iter_child_nodes(node)


def _scope_of(node: ast.FunctionDef | ast.ClassDef, outer: Scope) -> Scope:
    name = f"{outer.function}.{node.name}" if outer.function else node.name
    if isinstance(node, ast.ClassDef):
        return replace(outer, function=name)
    bound = {name for child in ast.walk(node) for name in _bound(child)}
    graph = outer.graph and not any("no_grad" in ast.dump(decorator) for decorator in node.decorator_list)
    found = {arg.arg for arg in (*node.args.args, *node.args.kwonlyargs)} & _CARRIERS if graph else set()
    for child in ast.walk(node) if graph else ():
        if isinstance(child, ast.Assign) and _carries(child.value, found):
            found |= {name for target in child.targets for part in ast.walk(target) for name in _bound(part)}
    return replace(outer, function=name, names=outer.names | bound, carriers=frozenset(found), graph=graph)


def _bound(node: ast.AST, *, imports: bool = False) -> Iterator[str]:
    if isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif imports and isinstance(node, ast.alias):
        yield node.asname or node.name
    elif imports and isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name


def _carries(node: ast.AST, carriers: Collection[str]) -> bool:
    """Whether a gradient may flow from one of the names through the expression."""
    if isinstance(node, ast.Name):
        return node.id in carriers
    no_number = isinstance(node, ast.Attribute) and node.attr in _NO_NUMBERS
    if isinstance(node, (ast.Compare, ast.Dict)) or no_number or called(node) == "detach":
        return False
    return any(_carries(child, carriers) for child in ast.iter_child_nodes(node))


def called(node: ast.AST) -> str:
    """The last part of the name of the called function. Empty if the node is no call."""
    function = getattr(node, "func", None)
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _number(node: ast.AST) -> int | float | None:
    value = node.value if isinstance(node, ast.Constant) else None
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


# ------------------------------------------------------------------ the changes
def _signs(node: ast.AST, scope: Scope, source: Source) -> Iterator[Edit]:
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        yield from source.operator(node.left, node.right, *_ARITHMETIC[type(node.op)])
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
        yield source.replace(node, source.operand(node.operand))
    value = node.value if isinstance(node, (ast.Assign, ast.Return)) else None
    if isinstance(value, ast.BinOp) and type(value.op) in _ARITHMETIC and not source.text(value).startswith("-"):
        yield source.replace(value, f"-({source.text(value)})")


def _comparisons(node: ast.AST, scope: Scope, source: Source) -> Iterator[Edit]:
    if isinstance(node, ast.Compare):
        for left, right, operator in zip((node.left, *node.comparators), node.comparators, node.ops, strict=False):
            old, *others = _COMPARISONS.get(type(operator), ("",))
            for new in others:
                yield from source.operator(left, right, old, new)


def _logic(node: ast.AST, scope: Scope, source: Source) -> Iterator[Edit]:
    if isinstance(node, ast.BoolOp):
        words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            yield from source.operator(left, right, *words)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.Invert)):
        yield source.replace(node, source.operand(node.operand))
    elif isinstance(node, (ast.If, ast.IfExp)) and isinstance(node.test, (ast.Name, ast.Attribute, ast.Call)):
        yield source.replace(node.test, f"(not {source.text(node.test)})")
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield source.replace(node, str(not node.value))


def _names(node: ast.AST, scope: Scope, source: Source) -> Iterator[Edit]:
    if isinstance(node, ast.keyword) and node.arg in ("min", "max"):
        yield source.replace(node, f"{_OTHER_WORD[node.arg]}={source.text(node.value)}")
    if not isinstance(node, (ast.Name, ast.Attribute)) or not isinstance(node.ctx, ast.Load):
        return
    of_module = isinstance(node, ast.Name)
    name, known, always = (node.id, scope.names, ("min", "max")) if of_module else (node.attr, scope.attributes, _TWINS)
    other = "_".join(_OTHER_WORD.get(word, word) for word in name.split("_"))
    if other != name and (other in known or name in always):
        yield source.replace(node, source.text(node)[: -len(name)] + other)


def _masks(node: ast.AST, scope: Scope, source: Source) -> Iterator[Edit]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitAnd, ast.BitOr)):
        yield from (source.replace(node, source.operand(side)) for side in (node.left, node.right))
    if not isinstance(node, ast.Call):
        return
    if called(node) == "where" and len(node.args) == 3:
        branches = [branch for branch in node.args[1:] if not isinstance(branch, ast.Constant)]
        yield from (source.replace(node, source.operand(branch)) for branch in branches)
    if not called(node).endswith(("_as", "_like")):
        arguments = (*node.args, *(keyword.value for keyword in node.keywords))
        masks = [x for x in arguments if isinstance(x, ast.Name) and x.id == "mask"]
        yield from (source.replace(mask, "(mask | True)") for mask in masks)


def _gradients(node: ast.AST, scope: Scope, source: Source) -> Iterator[Edit]:
    if called(node) == "detach":
        yield source.replace(node, source.operand(node.func.value))
    if not scope.graph:
        return
    if called(node) == "LossTerm" and len(node.args) > 1:
        value: ast.AST | None = node.args[1]
    else:
        value = node.value if isinstance(node, (ast.Assign, ast.Return)) else None
    one = not isinstance(node, ast.Assign) or isinstance(node.targets[0], ast.Name)
    if isinstance(value, (ast.BinOp, ast.Call, ast.UnaryOp)) and one and _carries(value, scope.carriers):
        yield source.replace(value, f"({source.text(value)}).detach()")


def _constants(node: ast.AST, scope: Scope, source: Source) -> Iterator[Edit]:
    if (value := _number(node)) is not None:
        doubled = isinstance(value, float) and value != 0
        yield source.replace(node, repr(2 * value if doubled else value + 1))


def _functions(node: ast.AST, scope: Scope, source: Source) -> Iterator[Edit]:
    if not isinstance(node, ast.Call):
        return
    name, arguments = called(node), list(node.args)
    if isinstance(node.func, ast.Attribute) and source.text(node.func.value) not in ("torch", "math"):
        arguments.insert(0, node.func.value)
    if _ELEMENTWISE.fullmatch(name) and arguments:
        yield source.replace(node, source.operand(arguments[0]))
    elif name == "clamp":
        yield source.replace(node, source.operand(arguments[0]))
        if len(arguments) == 3:
            low, high = arguments[1:]
            yield source.span(low)[0], source.span(high)[1], f"{source.text(high)}, {source.text(low)}"
    elif name in ("masked_mean", "sequence_mean") and len(node.args) == 2:
        mask = source.operand(node.args[1])
        size = f"{mask}.sum()" if name == "masked_mean" else f"{mask}.sum(-1, keepdim=True)"
        yield source.replace(node, f"({source.text(node)} * {size})")


_RULES: tuple[Callable[[ast.AST, Scope, Source], Iterator[Edit]], ...] = (
    *(_signs, _comparisons, _logic, _names, _masks, _gradients, _constants, _functions),
)
