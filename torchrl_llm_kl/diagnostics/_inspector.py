"""The tokens of a batch on a page, in a notebook and in a terminal.

The page is a single HTML file with all numbers. It needs no network.
"""

from __future__ import annotations

import base64
import hashlib
import html as html_
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2
import numpy as np
import torch
from markupsafe import Markup
from tensordict import TensorDictBase
from torch import Tensor
from typing_extensions import Unpack

from torchrl_llm_kl._files import replacing
from torchrl_llm_kl._numerics import check_range
from torchrl_llm_kl._registry import install_hint
from torchrl_llm_kl.diagnostics._columns import COLUMNS, Reading, TokenColumns, read_columns
from torchrl_llm_kl.diagnostics._quantities import (
    STEPS,
    Quantity,
    Side,
    TokenText,
    available,
    pair_rollouts,
    position_bins,
    scale_of,
    step_of,
    token_texts,
    visible,
)
from torchrl_llm_kl.masks import Tokenizer

if TYPE_CHECKING:
    from rich.console import Console, Group


#: The number of worst tokens that the page lists.
_WORST = 200
#: Random mantissas hardly compress, so a higher compression level costs time for nothing.
_LEVEL = 5


# ---------------------------------------------------------------------- the page


def _policy(style: str, script: str) -> str:
    """The Content-Security-Policy. It allows only this script and this style, no requests, and no markup from strings."""
    return (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" if text else "'none'"


def _resource(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def _page_template(name: str) -> jinja2.Template:
    strict = jinja2.StrictUndefined
    environment = jinja2.Environment(autoescape=True, undefined=strict, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_resource(name))


# ---------------------------------------------------------------------- the numbers


def _meta(view: Inspection) -> dict[str, object]:
    """The data of the list, the charts and the legend: everything except the numbers per token."""
    width, bins = position_bins(view.sides)
    texts = list(view.texts.values())
    shown = {i: visible(token.text) for i, token in enumerate(texts) if not token.data}
    shown |= {i: token.text for i, token in enumerate(texts) if token.data}
    pairs = pair_rollouts(*view.sides) if len(view.sides) == 2 else None
    return {
        "names": [visible(name) for name in view.names],
        "columns": [(name, COLUMNS[name].label, COLUMNS[name].unit) for name in _column_names(view)],
        "quantities": [{**asdict(quantity), "scale": scale_of(quantity, view.sides)} for quantity in view.choices],
        "steps": STEPS,
        "tokenIds": list(view.texts),
        "texts": [token.text for token in texts],
        "shown": {i: text for i, text in shown.items() if text != texts[i].text},
        "bytes": {i: list(token.data) for i, token in enumerate(texts) if token.data},
        "special": [i for i, token in enumerate(texts) if token.special],
        "binWidth": width,
        "sides": [_side(side, view.choices, width, bins) for side in view.sides],
        "pairs": pairs,
        "unpaired": 0 if pairs is None else view.sides[1].count - sum(row >= 0 for row in pairs),
    }


def _side(side: Side, quantities: Sequence[Quantity], width: int, bins: int) -> dict[str, object]:
    tokens, mask = side.source.tokens, side.source.mask
    reward = torch.full((side.count,), math.nan) if side.reward is None else side.reward.float()
    scored = tokens.like(mask.float()).sum()
    numeric = [quantity for quantity in quantities if quantity.numeric]
    summaries = [summary for quantity in numeric for summary in side.summary(quantity)]
    turns, place_bins = side.source.turns, side.source.places.div(width, rounding_mode="floor")
    turn_count = int(turns.max()) + 1 if turns.numel() else 0
    worst = {quantity.name: side.worst(quantity, _WORST) for quantity in numeric}
    return {
        "lengths": tokens.lengths.tolist(),
        "firsts": [int(row.long().argmax()) if row.any() else len(row) for row in tokens.like(mask).to_list()],
        "prompts": side.prompts,
        "parts": {visible(name[7:]): _floats(x) for name, x in side.source.rows.items() if name.startswith("reward/")},
        "sampled": side.source.sampled,
        "stats": _floats(torch.stack([reward, scored, *summaries])),
        "positions": {q.name: _floats(side.profile(q, place_bins, bins)) for q in numeric},
        "turns": {q.name: _floats(side.profile(q, turns, turn_count)) for q in numeric},
        "worst": {name: [[row, at] for row, at, _ in places] for name, places in worst.items()},
        "worstValues": {name: _floats(torch.tensor([v for *_, v in places])) for name, places in worst.items()},
    }


def _column_names(view: Inspection) -> list[str]:
    return [name for name in COLUMNS if any(name in side.columns for side in view.sides)]


def _rollouts(view: Inspection) -> Iterator[dict[str, object]]:
    """Yield the numbers of each rollout. Each is compressed separately, so that a browser decodes only the open one.

    The data starts with a byte per token (1: the assistant's, 2: ratio beyond the bounds, 4: no gradient). Then come the
    numbers of the assistant's tokens as float32, column by column, each split into its byte planes.
    """
    names = _column_names(view)
    for at, side in enumerate(view.sides):
        mask = side.source.mask
        clipped = torch.zeros_like(mask, dtype=torch.uint8) if side.clipped is None else side.clipped
        flags = (mask.to(torch.uint8) + 2 * (clipped > 0) + 4 * (clipped > 1)).to(torch.uint8).numpy()
        nothing = torch.full(mask.shape, math.nan)
        matrix = np.array([side.columns.get(name, nothing).numpy() for name in names], "<f4").reshape(-1, len(mask))
        for row, (start, end) in enumerate(pairwise(side.offsets)):
            columns = matrix[:, start:end][:, mask[start:end].numpy()]
            data = flags[start:end].tobytes() + b"".join(map(_planes, columns))
            yield {"side": at, "row": row, "data": _deflated(data)}


def _planes(values: np.ndarray) -> bytes:
    """Store the first bytes of all numbers, then the second bytes, and so on: these planes compress better."""
    return np.ascontiguousarray(values).view(np.uint8).reshape(-1, values.itemsize).T.tobytes()


def _deflated(data: bytes) -> str:
    engine = zlib.compressobj(_LEVEL, zlib.DEFLATED, -15)  # raw deflate without a header
    return base64.b64encode(engine.compress(data) + engine.flush()).decode()


def _floats(values: Tensor) -> str:
    return base64.b64encode(values.float().numpy().astype("<f4").tobytes()).decode()


# ---------------------------------------------------------------------- excerpts


@dataclass(frozen=True)
class ExcerptToken:
    """A token of an excerpt: its text, the step of its colour (None without a number), its number, and whether it is scored."""

    shown: str
    step: int | None
    value: float
    scored: bool


@dataclass(frozen=True)
class Excerpt:
    """The tokens around a rollout's worst token."""

    row: int
    facts: str
    tokens: tuple[ExcerptToken, ...]
    before: int
    after: int


def excerpts(view: Inspection, quantity: Quantity, rollouts: int, around: int) -> list[Excerpt]:
    """Excerpts of the rollouts with the worst tokens, worst first.

    Args:
        view: the content.
        quantity: the quantity that orders and colours the tokens. Without numbers per token, the first rollouts are shown.
        rollouts: the number of rollouts.
        around: the number of tokens on each side of the worst token.
    """
    side, scale = view.sides[0], scale_of(quantity, view.sides) if quantity.numeric else 1.0
    values = side.values(quantity)
    columns = (values, side.source.tokens.values, side.source.mask)
    sizes, largest = (x.nan_to_num(nan=-1.0, posinf=math.inf) for x in (values.abs(), side.summary(quantity)[1]))
    out = []
    for row in largest.sort(descending=True, stable=True).indices[:rollouts].tolist():
        start, end = side.offsets[row], side.offsets[row + 1]
        at = int(sizes[start:end].argmax()) if end > start else 0
        low, high = max(start, start + at - around), min(end, start + at + around + 1)
        tokens = []
        for value, token, scored in zip(*(column[low:high].tolist() for column in columns), strict=True):
            text = view.texts[token]
            shown = text.text if text.data else visible(text.text)
            tokens.append(ExcerptToken(shown, step_of(value, scale), value, scored))
        out.append(Excerpt(row, _facts(side, quantity, row), tuple(tokens), low - start, end - high))
    return out


def _facts(side: Side, quantity: Quantity, row: int) -> str:
    scored = int(side.source.mask[side.offsets[row] : side.offsets[row + 1]].sum())
    facts = [] if side.reward is None else [f"reward {float(side.reward[row]):.3g}"]
    facts.append(f"{scored} tokens")
    if quantity.numeric:
        mean, largest = (float(part[row]) for part in side.summary(quantity))
        facts.append(f"{quantity.name} mean {mean:.3g}, largest {largest:.3g} {quantity.unit}")
    return ", ".join(facts)


_INK = "#f4f5f7"


@dataclass(eq=False, repr=False)
class Inspection:
    """The result of :func:`inspect_tokens`. A notebook displays its worst rollouts, and :meth:`print` prints them.

    Args:
        sides: one batch, or two batches to compare.
        names: the names of the batches.
        title: the title of the page.
        choices: the quantities by which tokens can be coloured, the most useful first.
        texts: the text of each token id, in ascending order of the ids.
        path: the path of the written page, or None.

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

    sides: tuple[Side, ...]
    names: tuple[str, ...]
    title: str
    choices: tuple[Quantity, ...]
    texts: dict[int, TokenText]
    path: Path | None = None

    @property
    def quantities(self) -> tuple[str, ...]:
        """The names of the quantities by which tokens can be coloured, the most useful first."""
        return tuple(quantity.name for quantity in self.choices)

    def worst(self, quantity: str | None = None, count: int = 20) -> list[tuple[int, int, float]]:
        """The rollout, position and number of the tokens with the largest absolute numbers, largest first."""
        return self.sides[0].worst(self._quantity(quantity), count)

    def write(self, html: str | Path) -> Path:
        """Write the page and return its path. An earlier page is replaced only when the new one is complete."""
        page, style = _resource("_inspector.js") + _resource("_controls.js"), _resource("_inspector.css")
        script = f"{_resource('_parts.js')}(() => {{\n{page}}})();\n"
        token_ids = [side.source.tokens.values.numpy() for side in self.sides]
        # Streamed, so that not all numbers are in memory at once.
        document = _page_template("_inspector.html.jinja").stream(
            title=visible(self.title),
            policy=_policy(style, script),
            style=Markup(style),
            script=Markup(script),
            meta=_meta(self),
            ids=[_deflated(_planes(np.searchsorted([*self.texts], each).astype("<u4"))) for each in token_ids],
            rollouts=_rollouts(self),
        )
        path = Path(html)
        with replacing(path) as part:
            document.dump(str(part), encoding="utf-8")
        self.path = path
        return path

    def print(
        self, quantity: str | None = None, *, rollouts: int = 3, around: int = 60, console: Console | None = None
    ) -> None:
        """Print the worst rollouts with coloured tokens.

        Args:
            quantity: one of :attr:`quantities`. Default: the first one.

        Keyword Args:
            rollouts: the number of rollouts.
            around: the number of tokens on each side of the worst token.
            console: a ``rich.console.Console``.

        Raises:
            ImportError: if rich is not installed. The extra ``cli`` installs it.
            KeyError: if the batch does not have this quantity.
        """
        rendered = render_terminal(self, self._quantity(quantity), rollouts, around)
        from rich.console import Console

        (console or Console()).print(rendered)

    def __rich__(self) -> Group:
        return render_terminal(self, self.choices[0], 3, 60)

    def __repr__(self) -> str:
        where = "not written" if self.path is None else str(self.path)
        rollouts = " and ".join(str(side.count) for side in self.sides)
        return f"Inspection({rollouts} rollouts, {where})"

    def _repr_html_(self) -> str:
        style, quantity = _resource("_inspector.css"), self.choices[0]
        page = _page_template("_excerpt.html.jinja").render(
            title=visible(self.title),
            policy=_policy(style, script=""),
            style=Markup(style),
            quantity=quantity,
            excerpts=excerpts(self, quantity, 3, 120),
            note="" if self.path is None else f"All rollouts: {self.path}",
        )
        # The sandbox blocks scripts, since tokens are untrusted text.
        frame = 'sandbox="" width="100%" height="420" style="border: 0" title="The worst rollouts"'
        return f'<iframe {frame} srcdoc="{html_.escape(page)}"></iframe>'

    def _quantity(self, name: str | None) -> Quantity:
        return self.choices[0] if name is None else {each.name: each for each in self.choices}[name]


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
    """Write the tokens of a batch with their numbers to an HTML page.

    The page opens in a browser without a network. It sorts rollouts by reward, KL, length or mismatch. It colours tokens by KL,
    log-ratio, entropy, advantage, reward, mask or clipping. It lists the worst tokens and plots the KL by position and by turn.
    Its numbers equal the tensors, as float32, at the assistant's tokens. The exact KL needs both models. Otherwise the page
    shows the k3 estimate if the reference's log-probs are known.

    Args:
        batch: rollouts, or their columns (:func:`~torchrl_llm_kl.diagnostics.read_columns`).
        tokenizer: converts ids to text with ``convert_ids_to_tokens`` and ``decode``.
        html: the path of the page. None writes no page. See :meth:`Inspection.write`.

    Keyword Args:
        other: a second batch to show beside the first, from another step or another run. Rollouts with equal tokens are paired
            first, then rollouts with equal prompts, in order. The arguments below apply to both. Pass columns if the models
            differ.
        names: the names of the two batches on the page.
        title: the title of the page.
        clip_low: as in the objective ``ppo``, a token with a negative advantage is clipped if its ratio is below
            ``1 - clip_low``.
        clip_high: a token with a positive advantage is clipped if its ratio is above ``1 + clip_high``.
        **reading: arguments of :func:`~torchrl_llm_kl.diagnostics.read_columns`, such as ``policy`` and ``reference``.

    Returns:
        An :class:`Inspection`. A notebook displays an excerpt of it, and its ``print()`` prints one in a terminal.

    Raises:
        KeyError: if the data has no tokens.
        ValueError: if the assistant's tokens cannot be separated from the prompt, or the clip range is invalid.
        TypeError: if columns are given together with arguments of ``read_columns``.

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
    sides = []
    for data in (batch, other):
        if isinstance(data, TokenColumns) and reading:
            raise TypeError(f"columns are already read: pass {sorted(reading)} to read_columns.")
        if data is not None:
            columns = data if isinstance(data, TokenColumns) else read_columns(data, **reading)
            sides.append(Side(columns, clip_low, clip_high))
    used = sorted({token for side in sides for token in side.source.tokens.values.unique().tolist()})
    texts = dict(zip(used, token_texts(tokenizer, used), strict=True))
    inspection = Inspection(tuple(sides), names[: len(sides)], title, available(sides), texts)
    if html is not None:
        inspection.write(html)
    return inspection


# ---------------------------------------------------------------------- in a terminal


def render_terminal(view: Inspection, quantity: Quantity, rollouts: int, around: int) -> Group:
    """Render the excerpts for rich.

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
    """Yield the texts of an excerpt with their styles."""
    if excerpt.before:
        yield f"[{excerpt.before} before] ", "dim italic"
    for token in excerpt.tokens:
        yield token.shown, "dim" if not token.scored else f"{_INK} on {colours[token.step]}" if token.step else ""
    if excerpt.after:
        yield f" [{excerpt.after} after]", "dim italic"


def _legend(view: Inspection, quantity: Quantity, colours: Mapping[int, str]) -> Iterator[tuple[str, str]]:
    yield visible(view.title), "bold"
    yield f"  {visible(quantity.label)}\n", ""
    if quantity.numeric:
        scale = scale_of(quantity, view.sides)
        for step in range(-STEPS if quantity.kind == "signed" else 1, STEPS + 1):
            yield f" {step * scale / STEPS:.2g} ", f"{_INK} on {colours[step]}" if step else ""
        yield f" {quantity.unit}", "dim"


def _colours() -> dict[int, str]:
    """The dark palette of the page's style sheet, by step of colour."""
    shades = re.findall(r"--([wc])(\d): light-dark\(#\w+, (#\w+)\)", _resource("_inspector.css"))
    return {int(number) * (1 if side == "w" else -1): colour for side, number, colour in shades}
