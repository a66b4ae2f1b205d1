"""Settings of other libraries, with their defaults and their counterparts in this package.

Each library has a table, ``elsewhere/*.csv``. It serves the hints in error messages, the translations
(``algorithms.from_trl``) and ``docs/elsewhere.md``. The releases are TRL 1.16.0, Trinity-RFT 0.6.0, verl 0.9.1, prime-rl 0.8,
NeMo-RL 0.6, slime 0.3 and torchrl 0.14.1.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from types import MappingProxyType
from typing import Literal, get_args

Library = Literal["TRL", "Trinity-RFT", "verl", "prime-rl", "NeMo-RL", "slime", "torchrl"]
#: What a setting becomes. ``override``: an argument of make_algorithm. ``sampling``: a setting of the sampling distribution.
#: ``outside``: a setting of the training loop. ``refused``: nothing, it has no counterpart.
Place = Literal["override", "sampling", "outside", "refused"]


@dataclass(frozen=True)
class Foreign:
    """A setting of another library.

    ``name`` is its path in that library. A path that ends in ``.*`` stands for all settings below it. ``here`` holds its paths
    in the arguments of ``make_algorithm``, separated by spaces (``objective_args.clip_low``), or another name in this package.
    ``note`` is advice, or the reason for a missing counterpart.
    """

    library: Library
    name: str
    default: object
    place: Place
    here: str = ""
    note: str = ""
    section: str = ""

    @property
    def leaf(self) -> str:
        """The last part of the path."""
        return self.name.rpartition(".")[2]

    @property
    def own_names(self) -> list[str]:
        """The last parts of its paths in this package."""
        return [path.rpartition(".")[2] for path in self.here.split()]

    def counterpart(self, accepted: Collection[str]) -> str:
        """Describe its names in this package and the argument that holds them: ``"'clip_low' of objective_args"``.

        ``accepted`` are the names that the caller's function accepts. For these no argument is mentioned.
        """
        names = " and ".join(map(repr, self.own_names))
        place = self.here.split()[0].rpartition(".")[0]
        if set(self.own_names) <= set(accepted) or not self.here.islower() or "[" in self.here:
            return f"{names} here"
        return f"{names} of {place or 'make_algorithm'}"


def read_table(path: str) -> Iterator[dict[str, str]]:
    """The rows of a CSV table of this package, as column -> text."""
    return csv.DictReader(files("torchrl_llm_kl").joinpath(path).read_text(encoding="utf-8").splitlines())


def _read(library: Library) -> Iterator[tuple[str, Foreign]]:
    """For each row of a library's table, the trainers that have the setting, and the setting."""
    for row in read_table(f"elsewhere/{library.partition('-')[0].lower()}.csv"):
        trainers, default = row.pop("trainers"), json.loads(row.pop("default"))
        yield trainers, Foreign(library, default=default, **row)  # type: ignore[arg-type]


_TRL = tuple(_read("TRL"))
#: TRL's settings by trainer, without transformers' TrainingArguments.
TRL: Mapping[str, Mapping[str, Foreign]] = {
    trainer: MappingProxyType(
        {row.name: replace(row, section=trainer.upper()) for own, row in _TRL if trainer in own.split()}
    )
    for trainer in dict.fromkeys(name for own, _ in _TRL for name in own.split())
}
#: Advice on some of transformers' TrainingArguments. All of these belong to the training loop.
TRAINING: Mapping[str, Foreign] = MappingProxyType({row.name: row for own, row in _TRL if not own})
#: The settings of the other libraries by their path in the library's configuration.
TRINITY, VERL, PRIME, NEMO, SLIME, TORCHRL = (
    MappingProxyType({row.name: row for _, row in _read(library)}) for library in get_args(Library)[1:]
)
#: All settings of all libraries.
FOREIGN = tuple(
    row for rows in (*TRL.values(), TRAINING, TRINITY, VERL, PRIME, NEMO, SLIME, TORCHRL) for row in rows.values()
)


@dataclass(frozen=True)
class Choice:
    """One of the few values of a setting.

    Args:
        here: its name in this package.
        overrides: the arguments of ``make_algorithm`` that it sets, by path.
        passed: settings that take effect with this value -> their paths here. An empty path means the path in the setting's
            row.
        note: advice.
    """

    here: str
    overrides: Mapping[str, object]
    passed: Mapping[str, str]
    note: str


def _choices() -> dict[tuple[str, ...], dict[str, Choice]]:
    choices: dict[tuple[str, ...], dict[str, Choice]] = {}
    for row in read_table("elsewhere/choices.csv"):
        overrides = json.loads(row["overrides"] or "{}")
        passed = {theirs: own for theirs, _, own in (pair.partition("=") for pair in row["passed"].split())}
        same = choices.setdefault((row["library"], row["trainer"], row["setting"]), {})
        same[row["value"]] = Choice(row["here"], overrides, passed, row["note"])
    return choices


#: Library, trainer and setting -> value -> its counterpart.
CHOICES = _choices()


def find_row(rows: Mapping[str, Foreign], name: str) -> Foreign | None:
    """The row of a setting, or of the nearest section that stands for it. None for an unknown setting."""
    if name in rows:
        return rows[name]
    parts = name.split(".")
    sections = (".".join([*parts[:length], "*"]) for length in range(len(parts), 0, -1))
    return next((rows[section] for section in sections if section in rows), None)


def foreign_value(field: str, name: object) -> str:
    """Return the end of a message about an unknown objective or advantage that another library has: its name here.

    Example:
        >>> foreign_value("advantage", "grpo_passk")
        " verl's 'grpo_passk' is 'pass_at_k' here."
    """
    for (library, *_), choices in CHOICES.items():
        own = choices[name].overrides.get(field) if isinstance(name, str) and name in choices else None
        if own is not None:
            return f" {library}'s {name!r} is {own!r} here."
    return ""


#: The libraries whose names error messages explain. The other libraries share most names with these.
_HINTED: tuple[Library, ...] = ("TRL", "Trinity-RFT", "verl", "prime-rl", "torchrl")


def foreign_hint(name: str, known: Iterable[str] = ()) -> str:
    """Return the end of a message about an unknown setting that another library has: its name here.

    ``known`` are the names that the caller accepts. If a library has several settings of this name, counterparts among
    ``known`` come first. The hint is empty if no library has the name.

    Example:
        >>> foreign_hint("kl_loss_coef")
        " verl's 'kl_loss_coef' is 'kl_loss_coeff' of make_algorithm."
        >>> foreign_hint("clip_range", ["clip_low", "clip_high"])
        " Trinity-RFT's 'clip_range' is 'clip_low' and 'clip_high' here."
    """
    if name == "temperature":
        return " It belongs to the sampling distribution: pass options=ScoreOptions(Sampling(temperature=...))."
    accepted = set(known)
    by_library = (
        (library, [row for row in FOREIGN if row.library == library and row.leaf == name]) for library in _HINTED
    )
    return "".join(_hint(library, name, rows, accepted) for library, rows in by_library if rows)


def _hint(library: Library, name: str, rows: Sequence[Foreign], accepted: set[str]) -> str:
    """One sentence about the settings of a library with this name. Empty if the name is the same here."""
    named = [row for row in rows if row.here]
    if not named:
        what = "belongs to the loop around the loss" if rows[0].place == "outside" else "has no counterpart"
        return f" {library}'s {name!r} {what}: {rows[0].note}."
    by_counterpart: dict[str, list[Foreign]] = {}
    for row in sorted(named, key=lambda row: (row.own_names == [name], not accepted.issuperset(row.own_names))):
        by_counterpart.setdefault(row.here, []).append(row)
    (first, *_), *others = by_counterpart.values()
    if first.own_names == [name]:
        # The name is the same here and belongs to another objective or advantage. There is nothing to translate.
        return ""
    more = [f"{', '.join(row.section for row in same)}: {same[0].counterpart(accepted)}" for same in others]
    also = f" ({'; '.join(more)})" if more and others[0][0].section else ""
    note = f"{', ' if first.note.startswith('and ') else ': '}{first.note}" if first.note else ""
    return f" {library}'s {name!r} is {first.counterpart(accepted)}{also}{note}."
