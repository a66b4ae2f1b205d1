"""Settings of other libraries: their names there and here, with their defaults and what becomes of them.

One table for each library, ``elsewhere/*.csv``: for the hints of error messages, the translations (``algorithms.from_trl``) and
``docs/elsewhere.md``. Read from TRL 1.16.0, Trinity-RFT 0.6.0, verl 0.9.1, prime-rl 0.8, NeMo-RL 0.6 and slime 0.3.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from types import MappingProxyType
from typing import Literal, get_args

Library = Literal["TRL", "Trinity-RFT", "verl", "prime-rl", "NeMo-RL", "slime"]
#: Where a setting goes: ``override``: an argument of make_algorithm; ``sampling``: the distribution that tokens are drawn from;
#: ``outside``: the loop around the loss; ``refused``: nowhere.
Place = Literal["override", "sampling", "outside", "refused"]


@dataclass(frozen=True)
class Foreign:
    """A setting of another library.

    ``name`` is its path there; one that ends in ``.*`` stands for all below it. ``here`` is what it is called in this package,
    ``note`` what to do with it or why there is none.
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


def read_table(path: str) -> Iterator[dict[str, str]]:
    """The lines of a table of this package, as column -> text."""
    return csv.DictReader(files("torchrl_llm_kl").joinpath(path).read_text(encoding="utf-8").splitlines())


def _read(library: Library) -> Iterator[tuple[str, Foreign]]:
    """The trainers that have a setting, and the setting: each line of the library's table."""
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
#: What to do with some of transformers' TrainingArguments; all of them belong to the loop.
TRAINING: Mapping[str, Foreign] = MappingProxyType({row.name: row for own, row in _TRL if not own})
#: Trinity-RFT's section ``algorithm`` and the other sections; verl's settings, by their path in its configuration;
#: prime-rl's, NeMo-RL's and slime's.
TRINITY, VERL, PRIME, NEMO, SLIME = (
    MappingProxyType({row.name: row for _, row in _read(library)}) for library in get_args(Library)[1:]
)
#: All settings of all libraries.
FOREIGN = tuple(row for rows in (*TRL.values(), TRAINING, TRINITY, VERL, PRIME, NEMO, SLIME) for row in rows.values())


def find_row(rows: Mapping[str, Foreign], name: str) -> Foreign | None:
    """The row of a setting, or of the nearest section that stands for all below it; None for an unknown one."""
    if name in rows:
        return rows[name]
    parts = name.split(".")
    sections = (".".join([*parts[:length], "*"]) for length in range(len(parts), 0, -1))
    return next((rows[section] for section in sections if section in rows), None)


def foreign_hint(name: str, known: Iterable[str] = ()) -> str:
    """The end of a message about an unknown name: what it is called here, if another library has it; else empty.

    ``known`` are the names that would be accepted: of several, those are said first.

    Example:
        >>> foreign_hint("kl_loss_coef")
        " verl's 'kl_loss_coef' is 'kl_loss_coeff' of make_algorithm."
    """
    if name == "temperature":
        return " A setting of the sampler: options=ScoreOptions(Sampling(temperature=...)) of PolicyLoss and make_algorithm."
    accepted = set(known)
    said = []
    for library in ("TRL", "Trinity-RFT", "verl"):
        rows = [row for row in FOREIGN if row.library == library and row.leaf == name]
        if not any(row.here for row in rows):
            if rows:
                what = "belongs to the loop around the loss" if rows[0].place == "outside" else "has no counterpart"
                said.append(f" {library}'s {name!r} {what}: {rows[0].note}.")
            continue
        places: dict[str, list[Foreign]] = {}
        named = [row for row in rows if row.here]
        for row in sorted(named, key=lambda row: (row.here == name, row.here not in accepted)):
            places.setdefault(row.here, []).append(row)
        (here, (first, *_)), *others = places.items()
        if here == name:  # under its own name everywhere: not for this algorithm
            continue
        more = [f"{', '.join(row.section for row in same)}: {other!r}" for other, same in others if same[0].section]
        of = " of make_algorithm" if here.isidentifier() and here.islower() and here not in accepted else " here"
        also = f" ({'; '.join(more)})" if more else ""
        note = f"{', ' if first.note.startswith('and ') else ': '}{first.note}" if first.note else ""
        said.append(f" {library}'s {name!r} is {here!r}{of}{also}{note}.")
    return "".join(said)
