"""Where a chat template asks for an answer, and whether the messages have a say in how it asks.

Most templates write their generation prompt behind the loop over the messages, and always the same one: what stands
behind the whole conversation is then the prompt of every turn, and need not be rendered turn by turn. This is read off
the syntax tree. Whatever a statement sets is held to depend on all that the statement reads, so an error is a "no".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jinja2 import nodes

__all__: list[str] = []

# A namespace is how a loop hands on what it has seen: the sandbox refuses to change a list or a dict.
_SAID = frozenset({"messages", "namespace"})
_ASKED = frozenset({"add_generation_prompt"})


def prompt_is_fixed(body: Sequence[nodes.Node], *, marks: Iterable[str]) -> tuple[bool, bool]:
    """How a template asks for an answer.

    Args:
        body: the statements at its top level.
        marks: variables that stand for ``{% generation %}`` blocks.

    Returns:
        Whether all that is written behind the loop over the messages is independent of them and holds no block; and, of
        use in that case only, whether the loop itself reads ``add_generation_prompt``.
    """
    last = max(_dependents(body, _SAID.union(marks)), default=-1)
    return last >= 0 and isinstance(body[last], nodes.For), last in _dependents(body, _ASKED)


def _dependents(body: Sequence[nodes.Node], names: frozenset[str]) -> set[int]:
    """The statements that read one of the names, or a name that another such statement sets."""
    reads = [_names(statement, read=True) for statement in body]
    dependents: set[int] = set()
    while found := {k for k, read in enumerate(reads) if read & names} - dependents:
        dependents |= found
        names = names.union(*(_names(body[k], read=False) for k in found))
    return dependents


def _names(statement: nodes.Node, *, read: bool) -> set[str]:
    """The names that a statement reads, or those that it sets."""
    found: Any = nodes.Scope([statement]).find_all((nodes.Name, nodes.NSRef, nodes.Macro))
    return {node.name for node in found if (isinstance(node, nodes.Name) and node.ctx == "load") == read}
