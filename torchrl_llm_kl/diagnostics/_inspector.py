"""Look at the tokens of a batch: on a page, in a notebook, in a terminal."""

from __future__ import annotations

import html as html_
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tensordict import TensorDictBase
from typing_extensions import Unpack

from torchrl_llm_kl._numerics import check_range
from torchrl_llm_kl._registry import install_hint
from torchrl_llm_kl.diagnostics._columns import Reading, TokenColumns, check_reading, read_columns
from torchrl_llm_kl.diagnostics._page import Excerpt, View, _resource, excerpts, render_excerpt, write_page
from torchrl_llm_kl.diagnostics._quantities import STEPS, Quantity, Side, available, scale_of
from torchrl_llm_kl.diagnostics._texts import token_texts, visible
from torchrl_llm_kl.masks import Tokenizer

if TYPE_CHECKING:
    from rich.console import Console, Group

_INK = "#f4f5f7"


class Inspection:
    """What :func:`inspect_tokens` has read. A notebook shows the worst rollouts of it; so does :meth:`print` in a terminal.

    Args:
        view: what is shown.
        path: where the page was written, or None.

    Example:
        >>> from torchrl_llm_kl import Ragged
        >>> from torchrl_llm_kl.diagnostics import TokenColumns, inspect_tokens
        >>> columns = TokenColumns(Ragged.from_list([torch.tensor([1, 2, 3])]), torch.tensor([False, True, True]))
        >>> columns.columns["entropy"] = torch.tensor([0.0, 0.5, 2.0])
        >>> class Letters:
        ...     def convert_ids_to_tokens(self, ids): return [chr(96 + i) for i in ids]
        ...     def decode(self, ids): return "".join(chr(96 + i) for i in ids)
        >>> inspection = inspect_tokens(columns, Letters(), html=None)
        >>> inspection.quantities
        ('entropy', 'mask')
        >>> inspection.worst("entropy", 1)
        [(0, 2, 2.0)]
    """

    def __init__(self, view: View, path: Path | None = None) -> None:
        self._view = view
        self.path = path

    @property
    def quantities(self) -> tuple[str, ...]:
        """What the tokens can be coloured by, the most telling first."""
        return tuple(quantity.name for quantity in self._view.quantities)

    def worst(self, quantity: str | None = None, count: int = 20) -> list[tuple[int, int, float]]:
        """The tokens of the largest absolute numbers: rollout, position in it, number; largest first."""
        return self._view.sides[0].worst(self._quantity(quantity), count)

    def write(self, html: str | Path) -> Path:
        """Write the page, and return where it is."""
        path = Path(html)
        write_page(self._view, path)
        self.path = path
        return path

    def print(
        self, quantity: str | None = None, *, rollouts: int = 3, around: int = 60, console: Console | None = None
    ) -> None:
        """Print the worst rollouts with coloured tokens.

        Args:
            quantity: one of :attr:`quantities`; default: the first.

        Keyword Args:
            rollouts: how many.
            around: how many tokens to each side of the worst one.
            console: a ``rich.console.Console``.

        Raises:
            ImportError: if rich is not installed, which the extra ``cli`` brings.
            KeyError: if the batch does not have this quantity.
        """
        rendered = render_terminal(self._view, self._quantity(quantity), rollouts, around)
        from rich.console import Console

        (console or Console()).print(rendered)

    def __rich__(self) -> Group:
        return render_terminal(self._view, self._view.quantities[0], 3, 60)

    def __repr__(self) -> str:
        where = "not written" if self.path is None else str(self.path)
        rollouts = " and ".join(str(side.count) for side in self._view.sides)
        return f"Inspection({rollouts} rollouts, {where})"

    def _repr_html_(self) -> str:
        note = "" if self.path is None else f"All rollouts: {self.path}"
        page = render_excerpt(self._view, self._view.quantities[0], 3, 120, note)
        frame = 'sandbox="" width="100%" height="420" style="border: 0" title="The worst rollouts"'
        return f'<iframe {frame} srcdoc="{html_.escape(page)}"></iframe>'

    def _quantity(self, name: str | None) -> Quantity:
        if name is None:
            return self._view.quantities[0]
        for quantity in self._view.quantities:
            if quantity.name == name:
                return quantity
        raise KeyError(f"no quantity {name!r} in this batch: expected one of {list(self.quantities)}.")


def inspect_tokens(
    batch: TensorDictBase | TokenColumns,
    tokenizer: Tokenizer,
    html: str | Path | None = "rollouts.html",
    *,
    other: TensorDictBase | TokenColumns | None = None,
    names: tuple[str, str] = ("A", "B"),
    title: str = "Rollouts",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    **reading: Unpack[Reading],
) -> Inspection:
    """Write the tokens of a batch, with all that is known of each, to one HTML page.

    The page opens in a browser without a network: rollouts sorted by reward, KL, length or mismatch; tokens coloured by KL,
    log-ratios, entropy, advantage, reward, mask or clipping; the worst tokens; KL by position and by turn. Its numbers equal
    the tensors, as float32, at the assistant's tokens. The exact KL needs both models; else it is k3's estimate where
    a reference's log-probs are known.

    Args:
        batch: rollouts, or their columns (:func:`~torchrl_llm_kl.diagnostics.read_columns`).
        tokenizer: turns ids into text: has ``convert_ids_to_tokens`` and ``decode``.
        html: where the page is written; None: nowhere, see :meth:`Inspection.write`.

    Keyword Args:
        other: a second batch to show beside the first: another step or another run. Rollouts of equal tokens belong together,
            then rollouts of equal prompts, in order. The arguments below read both; pass columns where the models differ.
        names: what the two are called on the page.
        title: of the page.
        clip_low: a token is clipped as in the objective ``ppo``: its ratio is below ``1 - clip_low`` with a negative advantage,
        clip_high: or above ``1 + clip_high`` with a positive one.
        **reading: arguments of :func:`~torchrl_llm_kl.diagnostics.read_columns`, such as ``policy`` and ``reference``.

    Returns:
        An :class:`Inspection`: a notebook shows an excerpt of it, ``print()`` does in a terminal.

    Raises:
        KeyError: if the data holds no tokens.
        ValueError: if the assistant's tokens cannot be told from the prompt, or the clip range is not one.
        TypeError: if the tokenizer is none, or columns are given with arguments that say how a batch is read.

    Example:
        >>> from torchrl_llm_kl import Ragged
        >>> from torchrl_llm_kl.diagnostics import TokenColumns
        >>> class Letters:
        ...     def convert_ids_to_tokens(self, ids): return [chr(96 + i) for i in ids]
        ...     def decode(self, ids): return "".join(chr(96 + i) for i in ids)
        >>> columns = TokenColumns(
        ...     Ragged.from_list([torch.tensor([1, 2, 3])]),
        ...     torch.tensor([False, True, True]),
        ...     {"log_prob": torch.tensor([0.0, -1.0, -2.0]), "ref_log_prob": torch.tensor([0.0, -1.0, -1.0])},
        ... )
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     inspection = inspect_tokens(columns, Letters(), f"{folder}/rollouts.html")
        ...     inspection.path.read_text().count("<script>")
        1
        >>> inspection.worst("kl", 1)  # k3 of -2 against -1: e - 2
        [(0, 2, 0.7182...)]
    """
    check_range(0.0, 1.0, clip_low=clip_low)
    check_range(0.0, clip_high=clip_high)
    for method in ("convert_ids_to_tokens", "decode"):
        if not callable(getattr(tokenizer, method, None)):
            raise TypeError(f"expected a tokenizer with {method!r}, found {type(tokenizer).__name__}.")
    check_reading(reading)
    given = {name: value for name, value in reading.items() if value not in (None, 1.0, "full")}
    sides = []
    for data in (batch, other):
        if isinstance(data, TokenColumns):
            if given:
                raise TypeError(
                    f"{sorted(given)} set how a batch is read, but columns were given: pass them to read_columns."
                )
            sides.append(Side(data, clip_low, clip_high))
        elif data is not None:
            sides.append(Side(read_columns(data, **reading), clip_low, clip_high))
    used = sorted({token for side in sides for token in side.ids.unique().tolist()})
    texts = dict(zip(used, token_texts(tokenizer, used), strict=True))
    view = View(tuple(sides), tuple(names[: len(sides)]), title, available(sides), texts)
    inspection = Inspection(view)
    if html is not None:
        inspection.write(html)
    return inspection


# ---------------------------------------------------------------------- in a terminal


def render_terminal(view: View, quantity: Quantity, rollouts: int, around: int) -> Group:
    """The excerpts as something that rich prints.

    Raises:
        ImportError: if rich is not installed.
    """
    try:
        from rich.console import Group
        from rich.text import Text
    except ImportError as error:
        raise ImportError(f"rich is not installed: {install_hint('cli')}, or open the HTML page.") from error
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
