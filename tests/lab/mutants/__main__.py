"""Change one thing at a time in the source, and see whether a test fails: ``python -m mutants``."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from project import PROJECT

from . import record
from .catalogue import PACKAGE, Target, targets
from .equivalent import EQUIVALENT
from .forks import OUT_OF_TIME
from .mutations import Mutant, dropped, mutants_of
from .runner import Job, Outcome, Tests, with_tests

#: How many tests a record lists for a mutant.
MOST_NAMES = 16


@dataclass(frozen=True)
class Case:
    """A mutant of a file."""

    target: Target
    mutant: Mutant

    @property
    def key(self) -> record.Key:
        """What is changed where."""
        return record.Key(self.target.file, self.mutant.function, self.mutant.before, self.mutant.after)

    @property
    def equivalent(self) -> bool:
        """Whether it is listed as such."""
        return (self.target.file, self.mutant.function, self.mutant.after) in EQUIVALENT


def main(
    only: Annotated[list[str] | None, typer.Option(help="Files with this in their path, or that match it.")] = None,
    whole: Annotated[
        bool,
        typer.Option("--all", help="Files of every layer, not those with formulas alone, and the tests of all units."),
    ] = False,
    per_function: Annotated[int | None, typer.Option(min=1, help="No more than this of each function.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="No more mutants than this, chosen at random.")] = None,
    seed: Annotated[int, typer.Option(help="Of what is chosen at random.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="How many run at once.")] = os.cpu_count() or 1,
    equivalent: Annotated[bool, typer.Option(help="Run only those that are listed as equivalent.")] = False,
    write: Annotated[Path | None, typer.Option("--record", help="Write which tests fail for each mutant.")] = None,
    compare: Annotated[Path | None, typer.Option(help="Run what such a file says is noticed; is it still?")] = None,
) -> None:
    """Exit code 1 if a mutant survives that is not listed in equivalent.json; with --compare, if one survives that did not."""
    console = Console(file=sys.stdout)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # forks end then too
    before = set(record.killed(record.read(compare))) if compare else None
    known = [target for target in targets(PROJECT) if whole or only or before or target.maths]
    known = [target for target in known if not only or any(_matches(target.file, pattern) for pattern in only)]
    if before is not None:
        known = [target for target in known if any(key.file == target.file for key in before)]
    if not known:
        console.print(f"No such file. There are {', '.join(target.file for target in targets(PROJECT))}")
        raise typer.Exit(2)
    cases = [case for target in known for case in _cases(target)]
    if before is None:
        run = [case for case in cases if case.equivalent == equivalent]
        run = _few(run, per_function, seed) if per_function else run
        chosen = set(random.Random(seed).sample(run, min(len(run), limit or len(run))))
        run = [case for case in run if case in chosen]
    else:
        run = list({case.key: case for case in cases if case.key in before}.values())
    started = time.monotonic()
    patterns = ["units"] if whole else sorted({target.tests for target in known})

    def then(tests: Tests) -> dict[Case, Outcome]:
        _measure(console, tests, jobs)
        return _tried(console, tests, run, jobs, every=write is not None)

    outcomes = with_tests(PROJECT, PACKAGE, patterns, [target.file for target in known], then)
    tried = {case: outcome for case, outcome in outcomes.items() if outcome.known}
    survivors = [case for case, outcome in tried.items() if not outcome.killers]
    console.print(_table(cases, tried))
    slow = sum(OUT_OF_TIME in outcome.killers for outcome in tried.values())
    unlisted = [case for case in survivors if not case.equivalent]
    console.print(
        f"\n{len(tried)} mutants, {len(tried) - len(survivors)} caught ({slow} by the time limit), {len(survivors)} survived "
        f"({len(unlisted)} not listed) in {time.monotonic() - started:.0f} s"
    )
    if write is not None:
        found = {case.key: _noticed(case, outcome) for case, outcome in tried.items()}
        record.write(write, found)
    if before is not None:
        raise typer.Exit(_lost(console, before, {case.key: outcome for case, outcome in tried.items()}, known))
    raise typer.Exit(int(bool(unlisted) or _stale(console, cases, tried, equivalent)))


def _matches(file: str, pattern: str) -> bool:
    return pattern in file or fnmatch(file, pattern)


def _cases(target: Target) -> list[Case]:
    text = (PROJECT / PACKAGE / target.file).read_text()
    found = mutants_of(text, graph=target.graph)
    found += dropped(text, {".".join(x.function.split(".")[:n]) for x in found for n in (1, 2, 3)})
    return [Case(target, mutant) for mutant in found]


def _noticed(case: Case, outcome: Outcome) -> list[str] | str:
    """As a record has it: the tests' names without the layer's folder, which the file tells."""
    if outcome.killers:
        names = [name.removeprefix(f"units/{case.target.file.split('/')[0]}/") for name in outcome.killers]
        return names if len(names) <= MOST_NAMES else [*names[:MOST_NAMES], f"and {len(names) - MOST_NAMES} more"]
    if case.equivalent:
        return record.EQUIVALENT
    return record.SURVIVED if outcome.tests else record.UNCALLED


def _few(cases: Sequence[Case], count: int, seed: int) -> list[Case]:
    """Some of each function; the same ones whatever happens to other functions."""
    by_function: dict[tuple[str, str], dict[record.Key, Case]] = {}
    for case in cases:
        by_function.setdefault(case.key[:2], {}).setdefault(case.key, case)
    return [
        case
        for place, found in by_function.items()
        for case in random.Random(f"{seed} {place}").sample(list(found.values()), min(count, len(found)))
    ]


def _measure(console: Console, tests: Tests, jobs: int) -> None:
    for name in tests.broken:
        console.print(escape(f"cannot be collected: {name}"), style="red", highlight=False, soft_wrap=True)
    with _progress(console) as progress:
        task = progress.add_task("unchanged", total=None)
        for count, total, failed in tests.measure(jobs):
            for name in failed:
                console.print(escape(f"fails without any change: {name}"), style="red", highlight=False, soft_wrap=True)
            progress.update(task, completed=count, total=total, refresh=True)


def _tried(console: Console, tests: Tests, run: Sequence[Case], jobs: int, *, every: bool) -> dict[Case, Outcome]:
    outcomes: dict[Case, Outcome] = {}
    cases = {Job(case.target.file, case.mutant, case.target.tests): case for case in run}
    survived = 0
    with _progress(console) as progress:
        task = progress.add_task("mutants", total=len(cases))
        for job, outcome in tests.run(cases, jobs, every=every):
            case = cases[job]
            outcomes[case] = outcome
            if outcome.known and not outcome.killers:
                survived += 1
                _show(console, case, outcome)
            progress.update(
                task, advance=1, description=f"{case.target.file}, {survived} survived so far", refresh=True
            )
    return outcomes


def _show(console: Console, case: Case, outcome: Outcome) -> None:
    where, mutant = f"{case.target.file}:{case.mutant.line}", case.mutant
    title = f"[bold]{where}[/] {mutant.function} ({mutant.kind}, {outcome.tests} tests)"
    console.print(title, highlight=False, soft_wrap=True)
    console.print(escape(f"  - {mutant.before}\n  + {mutant.after}\n"), highlight=False, soft_wrap=True)


def _lost(console: Console, before: set[record.Key], now: dict[record.Key, Outcome], known: Sequence[Target]) -> int:
    """Exit code 1 if a mutant survives that was noticed."""
    files = {target.file for target in known}
    lost = [key for key in sorted(before) if key in now and not now[key].killers]
    gone = [key for key in sorted(before) if key not in now and key.file in files]
    for title, keys in (("no longer noticed", lost), ("not there any more", gone)):
        console.print(f"\n{len(keys)} {title}")
        for key in keys:
            text = f"{key.file} {key.function}\n  - {key.before}\n  + {key.after}"
            console.print(escape(text), highlight=False, soft_wrap=True)
    return int(bool(lost))


def _stale(console: Console, cases: Sequence[Case], tried: dict[Case, Outcome], equivalent: bool) -> bool:
    """Whether equivalent.json lists what is no mutant, or what a test notices."""
    files, known = {case.target.file for case in cases}, {(*case.key[:2], case.key.after) for case in cases}
    stale = [key for key in EQUIVALENT if key[0] in files and key not in known]
    stale += [(*case.key[:2], case.key.after) for case in tried if equivalent and tried[case].killers]
    for key in stale:
        message = f"\nequivalent.json lists what is no mutant, or not equivalent: {key}"
        console.print(escape(message), highlight=False, soft_wrap=True)
    return bool(stale)


def _progress(console: Console) -> Progress:
    # No thread of its own: processes are forked meanwhile.
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    return Progress(*columns, console=console, auto_refresh=False)


def _table(cases: Sequence[Case], outcomes: dict[Case, Outcome]) -> Table:
    table = Table("file", *(), title="Mutants")
    for column in ("caught", "survived", "equivalent", "not run"):
        table.add_column(column, justify="right")
    for file in dict.fromkeys(case.target.file for case in cases):
        own = [case for case in cases if case.target.file == file]
        tried = [outcomes[case] for case in own if case in outcomes]
        listed = sum(case.equivalent and case not in outcomes for case in own)
        survived = sum(not outcome.killers for outcome in tried)
        numbers = (len(tried) - survived, survived, listed, len(own) - len(tried) - listed)
        table.add_row(file, *(str(number) if number else "" for number in numbers))
    return table


if __name__ == "__main__":
    typer.run(main)
