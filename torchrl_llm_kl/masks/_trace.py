"""Rendering a chat template so that it says which message and which ``{% generation %}`` block each character is of.

The idea: the template's syntax tree gets marker outputs at the start and end of every ``for`` body (and after every
assignment in a loop) that print the marker of the message the loop variable holds, if it holds one. Messages carry
their markers in extra keys. Neither the contents nor the template's own text are touched, so nothing that a message
says can move a border; and stripping the markers must give back the untouched rendering, or the trace is thrown away.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from torchrl_llm_kl.masks._prompt import prompt_is_fixed

__all__: list[str] = []

Span = tuple[int, int]

LOOP, SET, MARK = "loop", "set", "mark"
_OPEN, _CLOSE = "+", "-"
_KEY = "torchrl_llm_kl_{kind}_{action}"
_PRIVATE_USE = range(0x10FF00, 0x10FFFE, 2)


@dataclass(frozen=True)
class Trace:
    """A rendered text and the stretches of it that belong to messages and to generation blocks.

    Attributes:
        text: the rendering, markers removed.
        spans: ``(kind, message index, start, end)`` in closing order; the index is -1 for generation blocks.
        last_border: position of the last marker: what follows was written after the last message.
    """

    text: str
    spans: tuple[tuple[str, int, int, int], ...]
    last_border: int

    def of(self, kind: str, index: int = -1) -> list[Span]:
        """Spans of one kind and message that hold more than white space (generation blocks may be empty)."""
        return self._found.get((kind, index), [])

    @cached_property
    def _found(self) -> dict[tuple[str, int], list[Span]]:
        found: dict[tuple[str, int], list[Span]] = {}
        for kind, index, start, end in self.spans:
            if kind == MARK or self.text[start:end].strip():
                found.setdefault((kind, index), []).append((start, end))
        return found


@dataclass(frozen=True)
class Instrumented:
    """A template's syntax tree with markers, and what the tree says of the template.

    Attributes:
        tree: with markers.
        has_marks: whether the template has generation blocks of its own.
        prompt_is_fixed: whether the generation prompt stands behind the loop over the messages, whatever they say.
        loop_asks: whether that loop reads ``add_generation_prompt``.
    """

    tree: nodes.Template
    has_marks: bool
    prompt_is_fixed: bool
    loop_asks: bool


@lru_cache(maxsize=64)
def instrument(template: str) -> Instrumented:
    """Parses a chat template (transformers' dialect) and adds the markers."""
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    tree = environment.parse(template)
    has_marks = any(name.name == _key(MARK, _OPEN) for name in tree.find_all(nodes.Name))
    fixed, loop_asks = prompt_is_fixed(tree.body, marks=[_key(MARK, _OPEN)])
    tree.body = _mark_statements(tree.body, loop_target=None, in_loop=False)
    return Instrumented(tree.set_environment(environment), has_marks, fixed, loop_asks)  # type: ignore[arg-type]


def with_markers(
    messages: Sequence[Mapping[str, Any]], clean: str, *, turns: bool = True
) -> tuple[list[dict[str, Any]], dict[str, str], tuple[str, str]]:
    """Copies of the messages with marker keys, the template variables for generation blocks, the quote characters."""
    quotes = next(((chr(c), chr(c + 1)) for c in _PRIVATE_USE if chr(c) not in clean and chr(c + 1) not in clean), None)
    if quotes is None:
        raise ValueError("the conversation holds every private-use character from U+10FF00 on; remove some of them.")

    def marker(kind: str, action: str, index: int) -> str:
        return f"{quotes[0]}{kind}{action}{index}{quotes[1]}"

    def keys(index: int) -> dict[str, str]:
        return {_key(kind, a): marker(kind, a, index) for kind in (LOOP, SET) for a in (_OPEN, _CLOSE)}

    marked = [{**message, **(keys(i) if turns else {})} for i, message in enumerate(messages)]
    return marked, {_key(MARK, a): marker(MARK, a, 0) for a in (_OPEN, _CLOSE)}, quotes


def read_trace(marked_text: str, quotes: tuple[str, str]) -> Trace:
    """Takes the markers out of a rendering and pairs them up. Markers without a partner are ignored."""
    pattern = re.compile(f"{quotes[0]}([a-z]+)([+-])([0-9]+){quotes[1]}")
    pieces: list[str] = []
    length = position = 0
    opened: dict[tuple[str, int], list[int]] = {}
    spans: list[tuple[str, int, int, int]] = []
    last_border = 0
    for match in pattern.finditer(marked_text):
        pieces.append(marked_text[position : match.start()])
        length += len(pieces[-1])
        position = match.end()
        kind, action, index = match[1], match[2], -1 if match[1] == MARK else int(match[3])
        if action == _OPEN:
            opened.setdefault((kind, index), []).append(length)
        elif opened.get((kind, index)):
            spans.append((kind, index, opened[kind, index].pop(), length))
        if kind == LOOP:
            last_border = length
    pieces.append(marked_text[position:])
    return Trace("".join(pieces), tuple(spans), last_border)


def _key(kind: str, action: str) -> str:
    return _KEY.format(kind=kind, action="open" if action == _OPEN else "close")


def _emit(expression: nodes.Expr, lineno: int) -> nodes.Output:
    return nodes.Output([expression], lineno=lineno)


def _emit_message(variable: str, kind: str, action: str, lineno: int) -> nodes.Output:
    """``{{ variable[key] if variable is mapping else "" }}``: prints nothing unless that is a marked message."""
    name = nodes.Name(variable, "load", lineno=lineno)
    test = nodes.Test(name, "mapping", [], [], None, None, lineno=lineno)
    item = nodes.Getitem(name, nodes.Const(_key(kind, action), lineno=lineno), "load", lineno=lineno)
    return _emit(nodes.CondExpr(test, item, nodes.Const("", lineno=lineno), lineno=lineno), lineno)


class _GenerationBlock(Extension):
    """``{% generation %}...{% endgeneration %}`` as its body between two markers."""

    tags = {"generation"}  # noqa: RUF012 -- the base class declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        """Reads one block."""
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        start, end = (_emit(nodes.Name(_key(MARK, a), "load", lineno=lineno), lineno) for a in (_OPEN, _CLOSE))
        return nodes.Scope([start, *body, end], lineno=lineno)


def _mark_statements(statements: Iterable[nodes.Node], loop_target: str | None, in_loop: bool) -> list[nodes.Node]:
    """The statements with markers; ``loop_target`` is the innermost loop's variable, if it is a single name."""
    marked: list[nodes.Node] = []
    closing: list[nodes.Node] = []
    for node in statements:
        if isinstance(node, (nodes.Continue, nodes.Break)) and loop_target:
            marked.append(_emit_message(loop_target, LOOP, _CLOSE, node.lineno))
        marked.append(node)
        if isinstance(node, nodes.For):
            target = node.target.name if isinstance(node.target, nodes.Name) else None
            body = _mark_statements(node.body, target, True)
            if target:
                before, after = (_emit_message(target, LOOP, a, node.lineno) for a in (_OPEN, _CLOSE))
                body = [before, *body, after]
            node.body = body
            node.else_ = _mark_statements(node.else_, loop_target, in_loop)
        elif isinstance(node, nodes.Assign):
            if in_loop and isinstance(node.target, nodes.Name):
                marked.append(_emit_message(node.target.name, SET, _OPEN, node.lineno))
                closing.append(_emit_message(node.target.name, SET, _CLOSE, node.lineno))
        else:
            _mark_children(node, loop_target, in_loop)
    return marked + closing[::-1]


def _mark_children(node: nodes.Node, loop_target: str | None, in_loop: bool) -> None:
    is_macro = isinstance(node, (nodes.Macro, nodes.CallBlock))
    for field, value in node.iter_fields():
        if isinstance(value, list) and value and all(isinstance(item, nodes.Stmt) for item in value):
            setattr(node, field, _mark_statements(value, None if is_macro else loop_target, in_loop and not is_macro))
