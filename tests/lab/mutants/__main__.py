"""Change one thing at a time in the source, and see whether a test fails: ``python -m mutants``."""

import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated

import typer

from project import PROJECT

from . import record
from .record import Key
from .runner import OUT_OF_TIME, Job, Outcome, Tests, with_tests

_WRITTEN = 20  # outcomes between two writes of the record, so that an interrupted run keeps them


def main(
    only: Annotated[list[str] | None, typer.Option(help="Files with this in their path, or that match it.")] = None,
    whole: Annotated[bool, typer.Option("--all", help="Files of every layer, and the tests of all units.")] = False,
    per_function: Annotated[int | None, typer.Option(min=1, help="Most of each function, with --record's.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="How many run at once.")] = os.cpu_count() or 1,
    equivalent: Annotated[bool, typer.Option(help="Run only those that are listed as equivalent.")] = False,
    write: Annotated[Path | None, typer.Option("--record", help="Write which test fails for each mutant.")] = None,
    compare: Annotated[Path | None, typer.Option(help="Run what such a file says is noticed; is it still?")] = None,
) -> None:
    """End with exit code 1 if a mutant survives that equivalent.json does not list, or that --compare lists as noticed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # forks end then too
    before = {key: test for key, test in record.read(compare).items() if record.noticed(test)} if compare else {}
    known = [target for target in record.targets() if whole or only or compare or target.maths]
    known = [x for x in known if not only or any(pattern in x.file or fnmatch(x.file, pattern) for pattern in only)]
    known = [x for x in known if not compare or any(key.file == x.file for key in before)]
    if not known:
        print(f"No such file. There are {', '.join(target.file for target in record.targets())}")
        raise typer.Exit(2)
    places = {target.file: target for target in known}
    mutants = {key: mutant for target in known for key, mutant in target.mutants().items()}
    same = {key for key in mutants if (key.file, key.function, key.after) in record.equivalents()}
    keys = [key for key in mutants if (key in before if compare else (key in same) == equivalent)]
    if not compare:
        there = Counter(key[:2] for key in record.read(write) if key in mutants) if write and write.exists() else {}
        keys = _few(keys, per_function, there)
    started = time.monotonic()

    def then(tests: Tests) -> dict[Key, Outcome]:
        for name in [*tests.broken, *tests.measure(jobs)]:
            print(f"this test fails without any change: {name}", file=sys.stderr)
        todo = {Job(key.file, mutants[key], places[key.file].tests, before.get(key, "")): key for key in keys}
        found: dict[Key, Outcome] = {}
        for job, outcome in tests.run(todo, jobs):
            key = todo[job]
            found |= {key: outcome} if outcome.known else {}
            if outcome.known and not outcome.killer:
                print(f"{_shown(key, job.mutant.line)} ({outcome.tests} tests)", file=sys.stderr)
            print(f"\r{len(found)} of {len(todo)}, {key.file} ", end="", file=sys.stderr, flush=True)
            if len(found) % _WRITTEN == 0:
                keep(found)
        return found

    every = {key for target in record.targets() for key in target.mutants()} if write else set()

    def keep(found: Mapping[Key, Outcome]) -> None:
        if write:
            record.write(write, {key: _entry(key, outcome, key in same) for key, outcome in found.items()}, every)

    patterns = ["units"] if whole else sorted({target.tests for target in known})
    tried = with_tests(PROJECT, record.PACKAGE, patterns, list(places), then)
    lost = [key for key, outcome in tried.items() if not outcome.killer]
    _table(mutants, tried, same)
    unlisted, slow = len(set(lost) - same), sum(outcome.killer == OUT_OF_TIME for outcome in tried.values())
    print(
        f"\n{len(tried)} mutants, {len(tried) - len(lost)} caught ({slow} by the time limit), {len(lost)} survived "
        f"({unlisted} not listed) in {time.monotonic() - started:.0f} s"
    )
    keep(tried)
    if compare:
        gone = [key for key in sorted(before) if key not in tried and key.file in places]
        for title, each in (("no longer noticed", lost), ("no longer mutants", gone)):
            print(f"\n{len(each)} {title}", *map(_shown, each), sep="\n")
        raise typer.Exit(int(bool(lost)))
    wrong = [x for x in record.equivalents() if x[0] in places and x not in {(*key[:2], key.after) for key in mutants}]
    wrong += [(*key[:2], key.after) for key in tried if equivalent and key not in lost]
    for line in wrong:
        print(f"\nequivalent.json lists a change that is no mutant, or is not equivalent: {line}")
    raise typer.Exit(int(bool(unlisted or wrong)))


def _few(keys: list[Key], count: int | None, there: Mapping[tuple[str, str], int]) -> list[Key]:
    """Up to ``count`` mutants of each function, minus those in ``there``. The choice does not depend on other functions."""
    if count is None:
        return keys
    found: dict[tuple[str, str], list[Key]] = {}
    for key in keys:
        found.setdefault(key[:2], []).append(key)
    most = {place: min(max(count - there.get(place, 0), 0), len(own)) for place, own in found.items()}
    some = (random.Random(f"0 {place}").sample(own, most[place]) for place, own in found.items())
    return [key for own in some for key in own]


def _entry(key: Key, outcome: Outcome, same: bool) -> str:
    """The entry of a record: the test that fails, without the layer's folder, or the reason why none fails."""
    if outcome.killer:
        return outcome.killer.removeprefix(f"units/{key.file.split('/')[0]}/")
    return record.EQUIVALENT if same else record.SURVIVED if outcome.tests else record.UNCALLED


def _shown(key: Key, line: object = "") -> str:
    return f"\n{key.file}:{line} {key.function}\n  - {key.before}\n  + {key.after}"


def _table(mutants: Collection[Key], tried: dict[Key, Outcome], same: set[Key]) -> None:
    count: dict[str, Counter[str]] = {}
    for key in mutants:
        what = "equivalent" if key in same else "not run"
        if key in tried:
            what = "caught" if tried[key].killer else "survived"
        count.setdefault(key.file, Counter())[what] += 1
    names = ("caught", "survived", "equivalent", "not run")
    print(f"\n{'':40}", *(f"{name:>10}" for name in names))
    for file, found in count.items():
        print(f"{file:40}", *(f"{found[name] or '':>10}" for name in names))


if __name__ == "__main__":
    typer.run(main)
