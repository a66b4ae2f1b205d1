"""Change one thing at a time in the source, and see whether a test fails: ``python -m mutants``."""

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Collection
from fnmatch import fnmatch
from typing import Annotated

import typer

from project import PROJECT

from . import record
from .record import Key
from .runner import OUT_OF_TIME, Job, Outcome, Tests, with_tests


def main(
    only: Annotated[list[str] | None, typer.Option(help="Files with this in their path, or that match it.")] = None,
    whole: Annotated[bool, typer.Option("--all", help="Files of every layer, and the tests of all units.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="How many run at once.")] = os.cpu_count() or 1,
    equivalent: Annotated[bool, typer.Option(help="Run only those that are listed as equivalent.")] = False,
) -> None:
    """Exit code 1 if a mutant survives that is not listed in equivalent.json, or if that file is out of date."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the forks end too
    known = [target for target in record.targets() if whole or only or target.maths]
    known = [x for x in known if not only or any(pattern in x.file or fnmatch(x.file, pattern) for pattern in only)]
    if not known:
        print(f"No such file. There are {', '.join(target.file for target in record.targets())}")
        raise typer.Exit(2)
    places = {target.file: target for target in known}
    mutants = {key: mutant for target in known for key, mutant in target.mutants().items()}
    same = {key for key in mutants if (key.file, key.function, key.after) in record.equivalents()}
    keys = [key for key in mutants if (key in same) == equivalent]
    started = time.monotonic()

    def then(tests: Tests) -> dict[Key, Outcome]:
        for name in [*tests.broken, *tests.measure(jobs)]:
            print(f"fails without any change: {name}", file=sys.stderr)
        todo = {Job(key.file, mutants[key], places[key.file].tests): key for key in keys}
        found: dict[Key, Outcome] = {}
        for job, outcome in tests.run(todo, jobs):
            key = todo[job]
            found |= {key: outcome} if outcome.known else {}
            if outcome.known and not outcome.killer:
                place = f"\n{key.file}:{job.mutant.line} {key.function}"
                print(f"{place}\n  - {key.before}\n  + {key.after} ({outcome.tests} tests)", file=sys.stderr)
            print(f"\r{len(found)} of {len(todo)}, {key.file} ", end="", file=sys.stderr, flush=True)
        return found

    patterns = ["units"] if whole else sorted({target.tests for target in known})
    tried = with_tests(PROJECT, record.PACKAGE, patterns, list(places), then)
    lost = [key for key, outcome in tried.items() if not outcome.killer]
    _table(mutants, tried, same)
    unlisted, slow = len(set(lost) - same), sum(outcome.killer == OUT_OF_TIME for outcome in tried.values())
    print(
        f"\n{len(tried)} mutants, {len(tried) - len(lost)} caught ({slow} by the time limit), {len(lost)} survived "
        f"({unlisted} not listed) in {time.monotonic() - started:.0f} s"
    )
    wrong = [x for x in record.equivalents() if x[0] in places and x not in {(*key[:2], key.after) for key in mutants}]
    wrong += [(*key[:2], key.after) for key in tried if equivalent and key not in lost]
    for line in wrong:
        print(f"\nequivalent.json lists what is not a mutant, or not equivalent: {line}")
    raise typer.Exit(int(bool(unlisted or wrong)))


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
