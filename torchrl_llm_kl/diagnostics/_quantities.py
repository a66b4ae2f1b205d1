"""What the inspector shows: numbers per token to colour by; their means per rollout, position and turn; the worst tokens.

Shapes: ``S`` rollouts, ``N`` tokens of all rollouts together. Numbers are float32, and NaN where a token has none.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal, cast

import torch
from torch import Tensor

from torchrl_llm_kl.diagnostics._columns import TokenColumns
from torchrl_llm_kl.diagnostics._metrics import read_texts
from torchrl_llm_kl.estimators import k3

#: Columns that are shown for a token, with label and unit.
COLUMNS = {
    "log_prob": ("log-prob now", "nats"),
    "old_log_prob": ("log-prob old", "nats"),
    "sampler_log_prob": ("log-prob sampler", "nats"),
    "ref_log_prob": ("log-prob reference", "nats"),
    "entropy": ("entropy", "nats"),
    "kl": ("KL to the reference", "nats"),
    "kl_penalty": ("KL penalty", "nats"),
    "advantage": ("advantage", "reward"),
}
#: Steps of colour on each side of zero.
STEPS = 5
#: The share of numbers below the end of a colour scale.
_QUANTILE = 0.98
_BINS = 60
#: Ends of a scale, times a power of ten: a fifth of each is a round number.
_ROUND = (1, 1.5, 2, 3, 4, 5, 6, 8, 10)


@dataclass(frozen=True)
class Quantity:
    """What tokens are coloured by.

    Args:
        name: its name in arguments.
        label: its name on the page.
        unit: of its numbers.
        kind: ``"size"``: mostly above zero; ``"signed"``: either way; ``"row"``: one number per rollout; ``"category"``.
        of: the column it is, or two columns: the first minus the second.
        note: what it means.
        sizes: summaries average absolute values: a mean of signed log-ratios would cancel.
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
        """True if each token has its own number."""
        return bool(self.of)


@dataclass(frozen=True, eq=False)
class Side:
    """One batch, on the CPU, as the inspector shows it.

    Args:
        source: the columns that were read.
        clip_low, clip_high: the bounds of the ratio, as of the objective ``ppo``.
    """

    source: TokenColumns
    clip_low: float
    clip_high: float

    @cached_property
    def ids(self) -> Tensor:
        """Token ids; int64 ``[N]``."""
        return self.source.tokens.values.cpu().long()

    @cached_property
    def mask(self) -> Tensor:
        """True at the assistant's tokens; ``[N]``."""
        return self.source.mask.cpu()

    @cached_property
    def rows(self) -> Tensor:
        """The rollout of each token; ``[N]``."""
        return self.source.tokens.sequence_ids.cpu()

    @cached_property
    def offsets(self) -> list[int]:
        """Start of each rollout, then ``N``; ``S + 1``."""
        return [int(i) for i in self.source.tokens.offsets.tolist()]

    @property
    def count(self) -> int:
        """``S``."""
        return len(self.offsets) - 1

    @cached_property
    def estimated(self) -> bool:
        """True if the KL is estimated from the sampled tokens."""
        return "kl" not in self.source.columns

    @cached_property
    def columns(self) -> dict[str, Tensor]:
        """The columns as float32, NaN outside the mask, with k3's estimate where the exact KL is missing; ``[N]``."""
        given = {name: self.source.columns[name] for name in COLUMNS if name in self.source.columns}
        own = next((given[n] for n in ("log_prob", "old_log_prob", "sampler_log_prob") if n in given), None)
        if self.estimated and own is not None and "ref_log_prob" in given:
            given["kl"] = k3(own, given["ref_log_prob"])
        return {name: given[name].cpu().float().masked_fill(~self.mask, math.nan) for name in COLUMNS if name in given}

    @cached_property
    def reward(self) -> Tensor | None:
        """The outcome; float32 ``[S]``."""
        found = self.source.rows.get("reward")
        return None if found is None else found.cpu().float().reshape(self.count, -1).sum(-1)

    @cached_property
    def parts(self) -> dict[str, Tensor]:
        """The named rewards; float32 ``[S]``."""
        named = {name.partition("/")[2]: values for name, values in self.source.rows.items() if "/" in name}
        return {name: values.cpu().float().reshape(self.count, -1).sum(-1) for name, values in named.items()}

    @cached_property
    def prompts(self) -> list[int]:
        """Equal numbers for equal prompts, which are compared token by token if the batch does not name them; ``S``."""
        if self.source.prompts is not None:
            return [int(prompt) for prompt in self.source.prompts.tolist()]
        seen: dict[bytes, int] = {}
        return [seen.setdefault(key, len(seen)) for key in _keys(self, whole=False)]

    @cached_property
    def clipped(self) -> Tensor | None:
        """2 where PPO's clipping removes the gradient, 1 at other ratios beyond the bounds, else 0; uint8 ``[N]``."""
        now, old = self.columns.get("log_prob"), self.columns.get("old_log_prob", self.columns.get("sampler_log_prob"))
        if now is None or old is None:
            return None
        ratio = (now - old).exp()
        bounded = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        out = ((ratio != bounded) & ~ratio.isnan()).to(torch.uint8)
        advantage = self.columns.get("advantage")
        if advantage is not None:
            out[-advantage * bounded > -advantage * ratio] = 2
        return out

    def values(self, quantity: Quantity) -> Tensor | None:
        """A quantity's number per token; ``[N]``, or None if a column is missing."""
        if not quantity.of or not set(quantity.of) <= set(self.columns):
            return None
        first, *second = (self.columns[name] for name in quantity.of)
        return first - second[0] if second else first

    def numbers(self, quantity: Quantity) -> Tensor:
        """As :meth:`values`, NaN everywhere if a column is missing."""
        values = self.values(quantity)
        return torch.full(self.mask.shape, math.nan) if values is None else values

    def summary(self, quantity: Quantity) -> tuple[Tensor, Tensor]:
        """Mean and largest absolute number of each rollout; float32 ``[S]``, NaN without any."""
        values = self.numbers(quantity)
        known = ~values.isnan()
        rows, numbers = self.rows[known], values[known].double()
        largest = torch.full((self.count,), math.nan, dtype=torch.float64)
        largest.scatter_reduce_(0, rows, numbers.abs(), "amax", include_self=False)
        return _means(numbers, rows, self.count, quantity), largest.float()

    def profile(self, quantity: Quantity, index: Tensor, count: int) -> Tensor:
        """Mean over the tokens of each ``index [N]`` (a position or a turn); ``[count]``; -1 belongs to none."""
        values = self.numbers(quantity)
        known = ~values.isnan() & (index >= 0)
        return _means(values[known].double(), index[known], count, quantity)

    def worst(self, quantity: Quantity, count: int) -> list[tuple[int, int, float]]:
        """Rollout, position and number of the tokens of the largest absolute numbers, largest first."""
        values = self.numbers(quantity)
        sizes = values.abs().nan_to_num(nan=-1.0, posinf=math.inf)
        top = sizes.topk(min(count, int((sizes >= 0).sum()))).indices
        return [(int(self.rows[i]), int(i) - self.offsets[int(self.rows[i])], float(values[i])) for i in top]


def _means(numbers: Tensor, index: Tensor, count: int, quantity: Quantity) -> Tensor:
    numbers = numbers.abs() if quantity.sizes else numbers
    sums = torch.zeros(count, dtype=torch.float64).index_add(0, index, numbers)
    return (sums / torch.bincount(index, minlength=count)).float()  # 0 / 0 is NaN


def available(sides: Sequence[Side]) -> tuple[Quantity, ...]:
    """The quantities of ``quantities.ini`` that at least one batch has, the most telling first."""
    have = [set(side.columns) for side in sides]
    estimated = {side.estimated for side in sides if "kl" in side.columns}
    how = "exact or k3" if len(estimated) > 1 else "k3 estimate" if True in estimated else "exact"
    words = {"how": how, "low": 1 - sides[0].clip_low, "high": 1 + sides[0].clip_high}
    whole = {"reward": any(side.reward is not None for side in sides), "mask": True}
    whole["clipped"] = any(side.clipped is not None for side in sides)
    found = []
    for name, texts in read_texts("quantities.ini", dict[str, str]).items():
        choices = [tuple(choice.split(" - ")) for choice in texts.get("of", "").split(", ")]
        of = next((choice for choice in choices if any(names.issuperset(choice) for names in have)), ())
        if of or whole.get(name):
            label, note = (texts[key].format(**words) for key in ("label", "note"))
            kind = cast(Literal["size", "signed", "row", "category"], texts["kind"])
            found.append(Quantity(name, label, texts.get("unit", ""), kind, of, note, "sizes" in texts))
    return tuple(found)


def scale_of(quantity: Quantity, sides: Sequence[Side]) -> float:
    """Where the strongest colour starts: above 98 % of the absolute numbers, at a round number."""
    parts = [side.reward if quantity.kind == "row" else side.values(quantity) for side in sides]
    known = [part for part in parts if part is not None]
    numbers = torch.cat(known).abs() if known else torch.zeros(0)
    numbers = numbers[numbers.isfinite()].double().sort().values
    if numbers.numel() == 0 or not (top := float(numbers[math.ceil(_QUANTILE * (numbers.numel() - 1))])):
        return 1.0
    power = 10.0 ** math.floor(math.log10(top))
    return next(float(f"{factor * power:.3g}") for factor in _ROUND if factor * power >= top * (1 - 1e-6))


def step_of(value: float, scale: float) -> int | None:
    """The colour of a number: -5 to 5, 0 for less than a fifth of the scale; None for NaN."""
    if math.isnan(value):
        return None
    size = abs(value) / scale * STEPS
    return int(math.copysign(STEPS if size >= STEPS else math.floor(size), value))


def position_bins(sides: Sequence[Side]) -> tuple[int, int]:
    """Width and number of the bins over positions in the answers of all batches: at most 60."""
    longest = max((int(side.source.places.max()) + 1 for side in sides if side.ids.numel()), default=0)
    width = max(1, math.ceil(longest / _BINS))
    return width, math.ceil(longest / width)


def match(side: Side, other: Side) -> list[int]:
    """For each rollout its counterpart in the other batch, -1 for none.

    Rollouts of the same tokens belong together, then rollouts of the same prompt (what precedes the assistant's first token),
    in order.
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
    keys = []
    for start, end in pairwise(side.offsets):
        first = side.mask[start:end].nonzero()
        stop = start + int(first[0]) if len(first) and not whole else end
        keys.append(side.ids[start:stop].numpy().tobytes())
    return keys
