"""The inspector's page: all numbers of a batch in one HTML file that opens without a network."""

from __future__ import annotations

import base64
import hashlib
import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path

import jinja2
import numpy as np
import torch
from markupsafe import Markup
from torch import Tensor

from torchrl_llm_kl._files import replacing
from torchrl_llm_kl.diagnostics._quantities import (
    COLUMNS,
    STEPS,
    Quantity,
    Side,
    match,
    position_bins,
    scale_of,
    step_of,
)
from torchrl_llm_kl.diagnostics._texts import TokenText, visible

#: How many of the worst tokens of the batch the page lists.
_WORST = 200
#: Byte planes of random mantissas hardly compress: a higher level costs time and gains nothing.
_LEVEL = 5
_NONE = "'none'"


@dataclass(frozen=True, eq=False)
class View:
    """What is shown: one batch or two, and the text of each token.

    Args:
        sides: one batch, or two to compare.
        names: what they are called.
        title: of the page.
        quantities: what tokens can be coloured by.
        texts: by token id.
    """

    sides: tuple[Side, ...]
    names: tuple[str, ...]
    title: str
    quantities: tuple[Quantity, ...]
    texts: dict[int, TokenText]


# ---------------------------------------------------------------------- the page


def write_page(view: View, path: Path) -> None:
    """Write the page, and then put it in the place of an earlier one. The numbers are streamed: it is never in memory."""
    page, style = _resource("_inspector.js") + _resource("_controls.js"), _resource("_inspector.css")
    script = f"{_resource('_parts.js')}(() => {{\n{page}}})();\n"
    index = {token: i for i, token in enumerate(view.texts)}
    document = _template("_inspector.html.jinja").stream(
        title=visible(view.title),
        policy=_policy(style, script),
        style=Markup(style),
        script=Markup(script),
        meta=_meta(view),
        ids=[_deflated(_ids(side, index)) for side in view.sides],
        rollouts=_rollouts(view),
    )
    replaced = path.is_file() or not path.exists()  # a device or a folder is not replaced
    with replacing(path) if replaced else nullcontext(path) as part:
        document.dump(str(part), encoding="utf-8")


def _policy(style: str, script: str | None = None) -> str:
    """The Content-Security-Policy: this script and this style alone, no requests, no markup from strings."""
    own = f"script-src {_hash(script) if script else _NONE}; style-src {_hash(style)}; img-src data:"
    rest = f"base-uri {_NONE}; form-action {_NONE}; require-trusted-types-for 'script'; trusted-types {_NONE}"
    return f"default-src {_NONE}; {own}; {rest}"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _resource(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def _template(name: str) -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_resource(name))


# ---------------------------------------------------------------------- the numbers


def _meta(view: View) -> dict[str, object]:
    """All but the numbers per token: what the list, the charts and the legend need at once."""
    width, bins = position_bins(view.sides)
    texts = list(view.texts.values())
    shown = {i: visible(token.text) for i, token in enumerate(texts) if not token.data}
    shown |= {i: token.text for i, token in enumerate(texts) if token.data}
    pairs = match(*view.sides) if len(view.sides) == 2 else None
    return {
        "names": [visible(name) for name in view.names],
        "columns": [(name, *COLUMNS[name]) for name in _stored(view)],
        "quantities": [
            {**asdict(quantity), "scale": 1 if quantity.kind == "category" else scale_of(quantity, view.sides)}
            for quantity in view.quantities
        ],
        "steps": STEPS,
        "tokenIds": list(view.texts),
        "texts": [token.text for token in texts],
        "shown": {i: text for i, text in shown.items() if text != texts[i].text},
        "bytes": {i: list(token.data) for i, token in enumerate(texts) if token.data},
        "special": [i for i, token in enumerate(texts) if token.special],
        "binWidth": width,
        "sides": [_side(side, view.quantities, width, bins) for side in view.sides],
        "pairs": pairs,
        "unpaired": 0 if pairs is None else view.sides[1].count - sum(row >= 0 for row in pairs),
    }


def _side(side: Side, quantities: Sequence[Quantity], width: int, bins: int) -> dict[str, object]:
    tokens, nothing = side.source.tokens, torch.full((side.count,), math.nan)
    scored = torch.bincount(side.rows[side.mask], minlength=side.count).float()
    numeric = [quantity for quantity in quantities if quantity.numeric]
    summaries = [summary for quantity in numeric for summary in side.summary(quantity)]
    places, turns = side.source.places.cpu(), side.source.turns.cpu()
    place_bins = places.div(width, rounding_mode="floor")
    turn_count = int(turns.max()) + 1 if turns.numel() else 0
    worst = {quantity.name: side.worst(quantity, _WORST) for quantity in numeric}
    return {
        "lengths": [int(n) for n in tokens.lengths.tolist()],
        "firsts": [int(row.long().argmax()) if row.any() else len(row) for row in tokens.like(side.mask).to_list()],
        "prompts": side.prompts,
        "parts": {visible(name): _floats(values) for name, values in side.parts.items()},
        "sampled": side.source.sampled,
        "stats": _floats(torch.stack([nothing if side.reward is None else side.reward, scored, *summaries])),
        "positions": {q.name: _floats(side.profile(q, place_bins, bins)) for q in numeric},
        "turns": {q.name: _floats(side.profile(q, turns, turn_count)) for q in numeric},
        "worst": {name: [[row, at] for row, at, _ in found] for name, found in worst.items()},
        "worstValues": {name: _floats(torch.tensor([v for *_, v in found])) for name, found in worst.items()},
    }


def _stored(view: View) -> list[str]:
    return [name for name in COLUMNS if any(name in side.columns for side in view.sides)]


def _ids(side: Side, index: dict[int, int]) -> bytes:
    """Numbers in the page's vocabulary, 4 bytes each, byte planes one after the other."""
    known = torch.tensor(list(index))
    order = known.argsort()
    numbers = order[torch.searchsorted(known[order], side.ids)] if known.numel() else side.ids
    return _planes(numbers.numpy().astype("<u4"))


def _rollouts(view: View) -> Iterator[dict[str, object]]:
    """Each rollout of each batch, compressed by itself, so that a browser decodes the open one alone.

    A byte per token (1: the assistant's, 2: ratio beyond the bounds, 4: no gradient), then the numbers of the assistant's
    tokens as float32, column by column, byte planes one after the other.
    """
    names = _stored(view)
    for at, side in enumerate(view.sides):
        clipped = torch.zeros_like(side.ids, dtype=torch.uint8) if side.clipped is None else side.clipped
        flags = (side.mask.to(torch.uint8) + 2 * (clipped > 0) + 4 * (clipped > 1)).to(torch.uint8).numpy()
        nothing = torch.full(side.mask.shape, math.nan)
        numbers = torch.stack([side.columns.get(name, nothing) for name in names]) if names else nothing[None][:0]
        mask, matrix = side.mask.numpy(), numbers.numpy().astype("<f4")
        for row in range(side.count):
            part = slice(side.offsets[row], side.offsets[row + 1])
            columns = matrix[:, part][:, mask[part]]
            data = flags[part].tobytes() + b"".join(_planes(column) for column in columns)
            yield {"side": at, "row": row, "data": _deflated(data)}


def _planes(values: np.ndarray) -> bytes:
    return np.ascontiguousarray(values).view(np.uint8).reshape(-1, values.itemsize).T.tobytes()


def _deflated(data: bytes) -> str:
    engine = zlib.compressobj(_LEVEL, zlib.DEFLATED, -15)
    return base64.b64encode(engine.compress(data) + engine.flush()).decode()


def _floats(values: Tensor) -> str:
    return base64.b64encode(values.float().numpy().astype("<f4").tobytes()).decode()


# ---------------------------------------------------------------------- excerpts


@dataclass(frozen=True)
class ExcerptToken:
    """A token of an excerpt: what is shown, its colour step (None: no number), its number, and whether it is scored."""

    shown: str
    step: int | None
    value: float
    scored: bool


@dataclass(frozen=True)
class Excerpt:
    """The surroundings of a rollout's worst token."""

    row: int
    position: int
    facts: str
    tokens: tuple[ExcerptToken, ...]
    before: int
    after: int


def excerpts(view: View, quantity: Quantity, rollouts: int, around: int) -> list[Excerpt]:
    """The rollouts with the worst tokens, worst first, ``around`` tokens to each side.

    Args:
        view: what to show.
        quantity: one with numbers per token, unless there is none: then the first rollouts are shown.
        rollouts: how many.
        around: how many tokens to each side.
    """
    side, scale = view.sides[0], scale_of(quantity, view.sides) if quantity.numeric else 1.0
    values = side.numbers(quantity)
    sizes, largest = (x.nan_to_num(nan=-1.0, posinf=math.inf) for x in (values.abs(), side.summary(quantity)[1]))
    out = []
    for row in largest.sort(descending=True, stable=True).indices[:rollouts].tolist():
        start, end = side.offsets[row], side.offsets[row + 1]
        at = int(sizes[start:end].argmax()) if end > start else 0
        low, high = max(start, start + at - around), min(end, start + at + around + 1)
        tokens = []
        for value, token, scored in zip(*(x[low:high].tolist() for x in (values, side.ids, side.mask)), strict=True):
            text = view.texts[token]
            shown = text.text if text.data else visible(text.text)
            tokens.append(ExcerptToken(shown, step_of(value, scale), value, scored))
        out.append(Excerpt(row, at, _facts(side, quantity, row), tuple(tokens), low - start, end - high))
    return out


def _facts(side: Side, quantity: Quantity, row: int) -> str:
    scored = int(side.mask[side.offsets[row] : side.offsets[row + 1]].sum())
    facts = [] if side.reward is None else [f"reward {float(side.reward[row]):.3g}"]
    facts.append(f"{scored} tokens")
    if quantity.numeric:
        mean, largest = (float(part[row]) for part in side.summary(quantity))
        facts.append(f"{quantity.name} mean {mean:.3g}, largest {largest:.3g} {quantity.unit}")
    return ", ".join(facts)


def render_excerpt(view: View, quantity: Quantity, rollouts: int, around: int, note: str) -> str:
    """A static page of excerpts, without a script."""
    style = _resource("_inspector.css")
    return _template("_excerpt.html.jinja").render(
        title=visible(view.title),
        policy=_policy(style),
        style=Markup(style),
        quantity=quantity,
        excerpts=excerpts(view, quantity, rollouts, around),
        note=note,
    )
