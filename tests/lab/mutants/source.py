"""Source text by syntax nodes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Constant, ast.Subscript, ast.Tuple, ast.List, ast.Dict)


@dataclass(frozen=True)
class Edit:
    """Bytes ``start`` to ``end`` become ``text``."""

    kind: str
    start: int
    end: int
    text: str


class Source:
    """A file's text, addressed in bytes as ``ast`` does."""

    def __init__(self, text: str) -> None:
        self.raw = text.encode()
        self.tree = ast.parse(text)
        self._starts = [0]
        for line in self.raw.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def span(self, node: ast.AST) -> tuple[int, int]:
        """First byte, and the one behind the last."""
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def _at(self, line: int, column: int) -> int:
        return self._starts[line - 1] + column

    def text(self, node: ast.AST) -> str:
        """As it is written, without parentheses around it."""
        start, end = self.span(node)
        return self.raw[start:end].decode()

    def alone(self, node: ast.AST) -> str:
        """As it is written, in parentheses where it may need them in another place."""
        return self.text(node) if isinstance(node, ATOMS) else f"({self.text(node)})"

    def replace(self, kind: str, node: ast.AST, text: str) -> Edit:
        """The whole node."""
        return Edit(kind, *self.span(node), text)

    def operator(self, kind: str, left: ast.AST, right: ast.AST, old: str, new: str) -> Iterator[Edit]:
        """What stands between two operands. Nothing if it is written in another way than ``old``."""
        start, end = self.span(left)[1], self.span(right)[0]
        between = self.raw[start:end].decode()
        if between.count(old) == 1:
            yield Edit(kind, start, end, between.replace(old, new))

    def applied(self, edit: Edit) -> str:
        """The whole text with the change."""
        return (self.raw[: edit.start] + edit.text.encode() + self.raw[edit.end :]).decode()

    def line(self, edit: Edit) -> int:
        """Where it is, from 1."""
        return self.raw.count(b"\n", 0, edit.start) + 1

    def lines(self, edit: Edit) -> tuple[str, str]:
        """The lines around a change, before and after, on one line each."""
        start = self.raw.rfind(b"\n", 0, edit.start) + 1
        end = self.raw.find(b"\n", edit.end)
        end = len(self.raw) if end < 0 else end
        head, tail = self.raw[start : edit.start].decode(), self.raw[edit.end : end].decode()
        old = self.raw[edit.start : edit.end].decode()
        return " ".join(f"{head}{old}{tail}".split()), " ".join(f"{head}{edit.text}{tail}".split())
