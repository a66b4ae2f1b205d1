"""The inspector in a terminal: the worst rollouts with coloured tokens, through ``rich``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from torchrl_llm_kl.diagnostics._page import Excerpt, View, _resource, excerpts
from torchrl_llm_kl.diagnostics._quantities import STEPS, Quantity, scale_of
from torchrl_llm_kl.diagnostics._texts import visible

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text

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
        raise ImportError(
            "rich is not installed: `pip install 'torchrl-llm-kl[cli]'`, or open the HTML page."
        ) from error
    colours = _colours()
    parts: list[Any] = [_legend(view, quantity, colours, Text)]
    for excerpt in excerpts(view, quantity, rollouts, around):
        parts += [Text(f"\nrollout {excerpt.row}", style="bold").append(f"  {excerpt.facts}", style="not bold dim")]
        parts.append(_tokens(excerpt, colours, Text))
    return Group(*parts)


def _tokens(excerpt: Excerpt, colours: dict[int, str], text: type[Text]) -> Text:
    out = text(overflow="fold")
    if excerpt.before:
        out.append(f"[{excerpt.before} before] ", style="dim italic")
    for token in excerpt.tokens:
        if not token.scored:
            out.append(token.shown, style="dim")
        elif token.step:
            out.append(token.shown, style=f"{_INK} on {colours[token.step]}")
        else:
            out.append(token.shown)
    if excerpt.after:
        out.append(f" [{excerpt.after} after]", style="dim italic")
    return out


def _legend(view: View, quantity: Quantity, colours: dict[int, str], text: type[Text]) -> Text:
    out = text(visible(view.title), style="bold").append(f"  {visible(quantity.label)}\n", style="not bold")
    if quantity.numeric:
        scale = scale_of(quantity, view.sides)
        steps = range(-STEPS if quantity.kind == "signed" else 1, STEPS + 1)
        for step in steps:
            edge = step * scale / STEPS
            out.append(f" {edge:.2g} ", style=f"not bold {_INK} on {colours[step]}" if step else "not bold")
        out.append(f" {quantity.unit}", style="not bold dim")
    return out


def _colours() -> dict[int, str]:
    """The dark palette of the page's style sheet, by step."""
    found = re.findall(r"--([wc])(\d): light-dark\(#\w+, (#\w+)\)", _resource("_inspector.css"))
    return {int(number) * (1 if side == "w" else -1): colour for side, number, colour in found}
