"""The numbers and texts of the inspector: colours of tokens, means per rollout, position and turn, and the worst tokens.

Shapes: ``S`` rollouts, ``N`` tokens of all rollouts. Numbers are float32, and NaN where a token has no number.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, cast

import torch
from torch import Tensor

from torchrl_llm_kl.diagnostics._catalog import read_texts
from torchrl_llm_kl.diagnostics._columns import COLUMNS, TokenColumns
from torchrl_llm_kl.estimators import k3
from torchrl_llm_kl.masks import BYTE_TOKEN, Tokenizer, byte_alphabet

#: Control and format characters, other line separators, tags and lone surrogates. They change how neighbouring text looks.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e"
    "\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\ud800-\udfff\U000e0000-\U000e0fff]"
)


@dataclass(frozen=True)
class TokenText:
    r"""The text of a token.

    Args:
        text: the text that the token adds. A part of a character is shown as its bytes, such as ``\xe2``.
        data: the bytes of a part of a character. Empty for other tokens.
        special: whether the token is a special token.
    """

    text: str
    data: bytes = b""
    special: bool = False


def escaped(text: str) -> str:
    r"""Escape characters that change how neighbouring text looks, such as a direction mark (``\u{202e}``)."""
    return _INVISIBLE.sub(lambda sign: f"\\u{{{ord(sign[0]):x}}}", text)


def visible(text: str) -> str:
    r"""Escape characters as :func:`escaped` does, and put a visible sign before newlines and tabs."""
    return escaped(text).replace("\n", "↵\n").replace("\t", "→\t")


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[TokenText]:
    """Convert single tokens to texts. Leading spaces are kept, which a decoder would strip from the start of a text.

    Args:
        tokenizer: a transformers tokenizer. Only ``convert_ids_to_tokens`` and ``decode`` are used.
        ids: any integers. An id that the tokenizer does not know is shown as its number.
    """
    special = {int(i) for i in getattr(tokenizer, "all_special_ids", ())}
    return [_token_text(tokenizer, i, i in special) for i in ids]


def _token_text(tokenizer: Any, token: int, special: bool) -> TokenText:
    try:
        (piece,) = tokenizer.convert_ids_to_tokens([token])
        text = tokenizer.decode([token])
    except (IndexError, KeyError, OverflowError, TypeError, ValueError):
        piece, text = None, ""
    if not isinstance(piece, str):
        return TokenText(f"⟨id {token}⟩", special=special)
    if special:
        return TokenText(piece, special=True)
    fallback, alphabet = BYTE_TOKEN.fullmatch(piece), byte_alphabet()
    data = None
    if fallback:  # SentencePiece's
        data = bytes([int(fallback[1], 16)])
    elif "\ufffd" in text and all(sign in alphabet for sign in piece):  # a byte-level BPE's
        data = bytes(alphabet[sign] for sign in piece)
    if data is not None:
        try:
            return TokenText(data.decode())
        except UnicodeDecodeError:
            return TokenText(data.decode(errors="backslashreplace"), data)
    return TokenText(" " + text if piece.startswith("▁") and not text.startswith(" ") else text or piece)


#: The number of colour steps on each side of zero.
STEPS = 5
#: The share of numbers below the end of a colour scale. A few outliers would otherwise make all other tokens pale.
_QUANTILE = 0.98
#: The largest number of bins in the chart by position.
_BINS = 60
#: The ends of a scale, times a power of ten. A fifth of each is a round number too, since there are five steps.
_ROUND = (1, 1.5, 2, 3, 4, 5, 6, 8, 10)


@dataclass(frozen=True)
class Quantity:
    """A quantity by which tokens are coloured.

    Args:
        name: its name in arguments.
        label: its name on the page.
        unit: the unit of its numbers.
        kind: ``"size"`` for numbers that are mostly positive, ``"signed"`` for numbers of either sign, ``"row"`` for one number
            per rollout, or ``"category"``.
        of: the name of its column, or of two columns. The second is subtracted from the first.
        note: its meaning.
        sizes: whether summaries average absolute values, since the mean of signed log-ratios would cancel.
    """

    name: str
    label: str
    unit: str
    kind: Literal["size", "signed", "row", "category"]
    of: tuple[str, ...] = ()
    note: str = ""
    sizes: bool = False

    @property
    def numeric(self) -> bool:
        """Whether each token has its own number."""
        return bool(self.of)


@dataclass(frozen=True, eq=False)
class Side:
    """One batch on the CPU, as the inspector shows it.

    Args:
        source: the columns of the batch.
        clip_low, clip_high: the clip range, as in the objective ``ppo``.
    """

    source: TokenColumns
    clip_low: float
    clip_high: float

    @cached_property
    def offsets(self) -> list[int]:
        """The start of each rollout, followed by ``N``. Has ``S + 1`` numbers."""
        return self.source.tokens.offsets.tolist()

    @property
    def count(self) -> int:
        """The number of rollouts, ``S``."""
        return len(self.offsets) - 1

    @cached_property
    def estimated(self) -> bool:
        """Whether the KL is estimated from the sampled tokens."""
        return "kl" not in self.source.columns

    @cached_property
    def columns(self) -> dict[str, Tensor]:
        """The columns as float32 ``[N]``, NaN outside the mask. The k3 estimate replaces a missing exact KL."""
        given = {name: self.source.columns[name] for name in COLUMNS if name in self.source.columns}
        own = next((given[n] for n in ("log_prob", "old_log_prob", "sampler_log_prob") if n in given), None)
        if self.estimated and own is not None and "ref_log_prob" in given:
            given["kl"] = k3(own, given["ref_log_prob"])
        return {name: given[name].float().masked_fill(~self.source.mask, math.nan) for name in COLUMNS if name in given}

    @property
    def reward(self) -> Tensor | None:
        """The outcome, ``[S]``."""
        return self.source.rows.get("reward")

    @cached_property
    def prompts(self) -> list[int]:
        """Equal numbers for equal prompts, one per rollout. Prompts are compared by tokens if the batch has no numbers."""
        if self.source.prompts is not None:
            return self.source.prompts.tolist()
        seen: dict[bytes, int] = {}
        return [seen.setdefault(key, len(seen)) for key in _keys(self, whole=False)]

    @cached_property
    def clipped(self) -> Tensor | None:
        """2 where PPO's clipping removes the gradient, 1 at other ratios beyond the bounds, 0 elsewhere. Uint8 ``[N]``."""
        now, old = self.columns.get("log_prob"), self.columns.get("old_log_prob", self.columns.get("sampler_log_prob"))
        if now is None or old is None:
            return None
        ratio = (now - old).exp()
        bounded = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        out = ((ratio != bounded) & ~ratio.isnan()).to(torch.uint8)
        advantage = self.columns.get("advantage")
        if advantage is not None:
            out[-advantage * bounded > -advantage * ratio] = 2  # PPO takes the larger loss, here a constant
        return out

    def values(self, quantity: Quantity) -> Tensor:
        """The numbers of a quantity per token, ``[N]``. All NaN if a column is missing."""
        if not quantity.of or not set(quantity.of) <= set(self.columns):
            return torch.full(self.source.mask.shape, math.nan)
        first, *second = (self.columns[name] for name in quantity.of)
        return first - second[0] if second else first

    def summary(self, quantity: Quantity) -> tuple[Tensor, Tensor]:
        """The mean and the largest absolute number of each rollout, float32 ``[S]``, NaN for a rollout without numbers."""
        values = self.values(quantity)
        known = ~values.isnan()
        rows, numbers = self.source.tokens.sequence_ids[known], values[known].double()
        largest = torch.full((self.count,), math.nan, dtype=torch.float64)
        largest.scatter_reduce_(0, rows, numbers.abs(), "amax", include_self=False)
        return _means_of(numbers, rows, self.count, quantity), largest.float()

    def profile(self, quantity: Quantity, index: Tensor, count: int) -> Tensor:
        """The mean over the tokens with each ``index [N]`` (a position or a turn), ``[count]``. Tokens with -1 are ignored."""
        values = self.values(quantity)
        known = ~values.isnan() & (index >= 0)
        return _means_of(values[known].double(), index[known], count, quantity)

    def worst(self, quantity: Quantity, count: int) -> list[tuple[int, int, float]]:
        """The rollout, position and number of the tokens with the largest absolute numbers, largest first."""
        values = self.values(quantity)
        sizes = values.abs().nan_to_num(nan=-1.0, posinf=math.inf)
        top = sizes.topk(min(count, int((sizes >= 0).sum()))).indices
        tokens = self.source.tokens
        columns = (tokens.sequence_ids[top], tokens.positions[top], values[top])
        return list(zip(*(column.tolist() for column in columns), strict=True))


def _means_of(numbers: Tensor, index: Tensor, count: int, quantity: Quantity) -> Tensor:
    numbers = numbers.abs() if quantity.sizes else numbers
    sums = torch.zeros(count, dtype=torch.float64).index_add(0, index, numbers)
    return (sums / torch.bincount(index, minlength=count)).float()  # 0 / 0 is NaN


def available(sides: Sequence[Side]) -> tuple[Quantity, ...]:
    """The quantities of ``quantities.ini`` that at least one batch has, the most useful first."""
    have = [set(side.columns) for side in sides]
    estimated = {side.estimated for side in sides if "kl" in side.columns}
    how = "exact or k3" if len(estimated) > 1 else "k3 estimate" if True in estimated else "exact"
    words = {"how": how, "low": 1 - sides[0].clip_low, "high": 1 + sides[0].clip_high}
    whole = {"reward": any(side.reward is not None for side in sides), "mask": True}
    whole["clipped"] = any(side.clipped is not None for side in sides)
    quantities = []
    for name, texts in read_texts("quantities.ini", dict[str, str]).items():
        choices = [tuple(choice.split(" - ")) for choice in texts.get("of", "").split(", ")]
        of = next((choice for choice in choices if any(names.issuperset(choice) for names in have)), ())
        if of or whole.get(name):
            label, note = (texts[key].format(**words) for key in ("label", "note"))
            kind = cast(Literal["size", "signed", "row", "category"], texts["kind"])
            quantities.append(Quantity(name, label, texts.get("unit", ""), kind, of, note, "sizes" in texts))
    return tuple(quantities)


def scale_of(quantity: Quantity, sides: Sequence[Side]) -> float:
    """The number at which the strongest colour starts. It is round, and above 98 % of the absolute numbers."""
    parts = [side.reward if quantity.kind == "row" else side.values(quantity) for side in sides]
    numbers = torch.cat([torch.zeros(0), *(part for part in parts if part is not None)]).abs()
    numbers = numbers[numbers.isfinite()].double().sort().values
    top = float(numbers[math.ceil(_QUANTILE * (numbers.numel() - 1))]) if numbers.numel() else 0.0
    if top == 0:
        return 1.0
    # Rounding may put `top` just above a round number, hence the tolerance.
    power = 10.0 ** math.floor(math.log10(top))
    return next(float(f"{factor * power:.3g}") for factor in _ROUND if factor * power >= top * (1 - 1e-6))


def step_of(value: float, scale: float) -> int | None:
    """The colour step of a number, from -5 to 5. 0 is less than a fifth of the scale. None for NaN."""
    if math.isnan(value):
        return None
    size = abs(value) / scale * STEPS
    return int(math.copysign(STEPS if size >= STEPS else math.floor(size), value))


def position_bins(sides: Sequence[Side]) -> tuple[int, int]:
    """The width and number of the bins over positions in the answers of all batches."""
    longest = max((int(side.source.places.max()) + 1 for side in sides if side.source.mask.numel()), default=0)
    width = max(1, math.ceil(longest / _BINS))
    return width, math.ceil(longest / width)


def pair_rollouts(side: Side, other: Side) -> list[int]:
    """Pair each rollout with a rollout of the other batch. Returns its number, or -1 for no partner.

    Rollouts with the same tokens are paired first. Then rollouts with the same prompt (the tokens before the assistant's first
    token) are paired in order.
    """
    counterparts = [-1] * side.count
    taken: set[int] = set()
    for whole in (True, False):
        waiting: dict[bytes, list[int]] = defaultdict(list)
        for row, key in enumerate(_keys(other, whole=whole)):
            if row not in taken:
                waiting[key].append(row)
        for row, key in enumerate(_keys(side, whole=whole)):
            if counterparts[row] < 0 and waiting[key]:
                counterparts[row] = waiting[key].pop(0)
                taken.add(counterparts[row])
    return counterparts


def _keys(side: Side, *, whole: bool) -> list[bytes]:
    """The tokens of each rollout, or only its prompt, as bytes that can be compared."""
    keys = []
    for start, end in pairwise(side.offsets):
        first = side.source.mask[start:end].nonzero()
        stop = start + int(first[0]) if len(first) and not whole else end
        keys.append(side.source.tokens.values[start:stop].numpy().tobytes())
    return keys
