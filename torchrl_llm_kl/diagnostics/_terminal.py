"""The inspector in a terminal: the worst rollouts with coloured tokens, through ``rich``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from torchrl_llm_kl.diagnostics._page import Excerpt, View, _resource, excerpts
from torchrl_llm_kl.diagnostics._quantities import STEPS, Quantity, scale_of
from torchrl_llm_kl.diagnostics._texts import visible

if TYPE_CHECKING:
    from rich.console import Group

_INK = "#f4f5f7"


def render_terminal(view: View, quantity: Quantity, rollouts: int, around: int) -> Group:
    """The excerpts as something that rich prints.

    Raises:
        ImportError: if rich is not installed.
    """
    try:
        from rich.console import Group
        from rich.text import Text
    except ImportError as error:
        advice = "`pip install 'torchrl-llm-kl[cli]'`, or open the HTML page"
        raise ImportError(f"rich is not installed: {advice}.") from error
    colours = _colours()
    parts = [Text.assemble(*_legend(view, quantity, colours))]
    for excerpt in excerpts(view, quantity, rollouts, around):
        parts.append(Text.assemble((f"\nrollout {excerpt.row}", "bold"), (f"  {excerpt.facts}", "dim")))
        parts.append(Text.assemble(*_tokens(excerpt, colours), overflow="fold"))
    return Group(*parts)


def _tokens(excerpt: Excerpt, colours: Mapping[int, str]) -> Iterator[tuple[str, str]]:
    """Texts with their styles."""
    if excerpt.before:
        yield f"[{excerpt.before} before] ", "dim italic"
    for token in excerpt.tokens:
        yield token.shown, "dim" if not token.scored else f"{_INK} on {colours[token.step]}" if token.step else ""
    if excerpt.after:
        yield f" [{excerpt.after} after]", "dim italic"


def _legend(view: View, quantity: Quantity, colours: Mapping[int, str]) -> Iterator[tuple[str, str]]:
    yield visible(view.title), "bold"
    yield f"  {visible(quantity.label)}\n", ""
    if quantity.numeric:
        scale = scale_of(quantity, view.sides)
        for step in range(-STEPS if quantity.kind == "signed" else 1, STEPS + 1):
            yield f" {step * scale / STEPS:.2g} ", f"{_INK} on {colours[step]}" if step else ""
        yield f" {quantity.unit}", "dim"


def _colours() -> dict[int, str]:
    """The dark palette of the page's style sheet, by step."""
    found = re.findall(r"--([wc])(\d): light-dark\(#\w+, (#\w+)\)", _resource("_inspector.css"))
    return {int(number) * (1 if side == "w" else -1): colour for side, number, colour in found}
