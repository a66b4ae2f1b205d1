"""Puts changed code into a package that is already loaded, so that its modules are not imported again for each change."""

import ast
import gc
import importlib
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from .mutations import Mutant, functions_of

#: A file, and a function in it at any depth.
Call = tuple[str, str]


class Loaded:
    """The functions of some files, as a module, a class, a registry or a decorator holds them."""

    def __init__(self, package: Path, files: Iterable[str]) -> None:
        """``package`` is a folder that is on the path, ``files`` are below it."""
        names = {file: ".".join((package.name, *Path(file).with_suffix("").parts)) for file in files}
        self._package = package.name
        self._modules = {file: importlib.import_module(name.removesuffix(".__init__")) for file, name in names.items()}
        for file, module in self._modules.items():
            if Path(str(module.__file__)) != package / file:
                raise RuntimeError(f"{module.__name__} is {module.__file__}, not in {package}")
        self.texts = {file: Path(str(module.__file__)).read_text() for file, module in self._modules.items()}
        texts = self.texts.items()
        self.functions: set[Call] = {(file, name) for file, text in texts for name, _ in functions_of(ast.parse(text))}
        self._functions: dict[tuple[str, int, str], list[FunctionType]] = defaultdict(list)
        for found in gc.get_objects():
            if type(found) is FunctionType:  # isinstance would ask objects that warn
                self._functions[_place(found.__code__)].append(found)

    def apply(self, file: str, mutant: Mutant) -> bool:
        """Change the loaded code. False if the change has no effect there (a branch for type checkers, other closure cells)."""
        changed = [(function, code) for function, code in self._changes(file, mutant.text) if function.__code__ != code]
        if any(len(function.__code__.co_freevars) != len(code.co_freevars) for function, code in changed):
            return False
        constant = self._constant(file, mutant)
        for function, code in changed:
            function.__code__ = code
        return bool(changed) or constant

    def watch(self) -> set[Call]:
        """Collect the functions that are called from now on."""
        called: set[Call] = set()
        for file, text in self.texts.items():
            tree = ast.parse(text)
            for name, function in list(functions_of(tree)):
                probe = ast.parse(f"__called__(({file!r}, {name!r}))").body[0]
                for part in ast.walk(probe):
                    if hasattr(part, "lineno"):
                        ast.copy_location(part, function.body[0])
                function.body.insert(0, probe)
            vars(self._modules[file])["__called__"] = called.add
            for loaded, code in self._changes(file, tree):
                loaded.__code__ = code
        return called

    def _changes(self, file: str, changed: str | ast.Module) -> Iterator[tuple[FunctionType, CodeType]]:
        name = str(self._modules[file].__file__)
        old, new = (compile(x, name, "exec", dont_inherit=True) for x in (self.texts[file], changed))
        for before, after in _pairs(old, new):
            for function in self._functions.get(_place(before), ()):
                yield function, after

    def _constant(self, file: str, mutant: Mutant) -> bool:
        """Change a named value of a module or a class, also where it was imported or is a default."""
        module: Any = self._modules[file]
        owner: Any = module
        for part in mutant.function.split(".") if mutant.function else ():
            owner = getattr(owner, part, None)
        if not isinstance(owner, (type, ModuleType)):
            return False
        body = [node for node in ast.walk(ast.parse(mutant.text)) if isinstance(node, (ast.Assign, ast.AnnAssign))]
        node = next((n for n in body if n.lineno <= mutant.line <= (n.end_lineno or 0) and n.value), None)
        target = node and (node.target if isinstance(node, ast.AnnAssign) else node.targets[0])
        if node is None or not isinstance(target, ast.Name):
            return False
        value = eval(compile(ast.Expression(node.value), file, "eval"), vars(module))
        if isinstance(owner, type):
            _set_default(owner, target.id, value)
        else:
            old = vars(module)[target.id]
            for other in [m for name, m in sys.modules.items() if name.split(".")[0] == self._package]:
                if vars(other).get(target.id) is old:
                    setattr(other, target.id, value)
        return True


def _place(code: CodeType) -> tuple[str, int, str]:
    return code.co_filename, code.co_firstlineno, code.co_name


def _pairs(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """Pairs of code before and after a change, with the functions that are defined in it."""
    yield old, new
    olds, news = ([x for x in code.co_consts if isinstance(x, CodeType)] for code in (old, new))
    if len(olds) == len(news):
        for before, after in zip(olds, news, strict=True):
            yield from _pairs(before, after)


def _set_default(owner: type, name: str, value: object) -> None:
    """Set an attribute of a class, and the default of a dataclass' argument."""
    type.__setattr__(owner, name, value)
    for function in (vars(owner).get("__init__"), vars(owner).get("__new__")):
        if isinstance(function, FunctionType) and function.__defaults__:
            code = function.__code__
            names = code.co_varnames[: code.co_argcount][-len(function.__defaults__) :]
            pairs = zip(names, function.__defaults__, strict=True)
            function.__defaults__ = tuple(value if key == name else old for key, old in pairs)
