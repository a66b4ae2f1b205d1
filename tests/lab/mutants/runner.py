"""Run the tests that call a function against changes of it, each change in a process of its own."""

from __future__ import annotations

import gc
import math
import os
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

import pytest

from .forks import Done, MoreTime, Work, allow, forked
from .loaded import Loaded
from .mutations import Mutant

#: Seconds of tests that are run against a change to see all that fail.
_SOME = 1.0
#: Seconds of more tests, up to the first that fails, if none of those does: where all that fail are asked for, and where not.
_MORE = {True: 8.0, False: 120.0}
_T = TypeVar("_T")


@dataclass(frozen=True)
class Job:
    """A change of a file.

    Args:
        file: below the package.
        mutant: the change.
        tests: files or a folder of those that should notice, below ``tests``; a pattern.
    """

    file: str
    mutant: Mutant
    tests: str


@dataclass(frozen=True)
class Outcome:
    """Of a job.

    Args:
        killers: tests that fail, without their parameters and ``tests/``; or what else went wrong.
        known: False if the change could not be made.
        tests: how many tests call what is changed.
    """

    killers: tuple[str, ...]
    known: bool
    tests: int


@dataclass(frozen=True, eq=False)
class Test:
    """An item of pytest as it runs without any change."""

    item: Any
    name: str
    seconds: float
    calls: frozenset[tuple[str, str]]


def with_tests(
    project: Path, package: str, tests: Sequence[str], files: Sequence[str], then: Callable[[Tests], _T]
) -> _T:
    """Collect tests, and call a function with them in the same process.

    Args:
        project: a folder with the package, ``tests`` and ``pyproject.toml``.
        package: the name of its folder.
        tests: patterns of files or folders, below ``tests``.
        files: of the package, whose functions are watched and changed.
        then: what to do.
    """
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # looking for plugins takes long
    _few_examples()
    plugin = _Loop(project / package, files, then)
    options = ["-qq", "-s", "--assert=plain", "--tb=native", "-p", "no:cacheprovider", f"--rootdir={project}"]
    options += ["--continue-on-collection-errors"]
    paths = [str(path) for pattern in tests for path in sorted((project / "tests").glob(pattern))]
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        code = pytest.main([*options, "-m", "not slow and not gpu", *paths], plugins=[plugin])
    if plugin.error:
        raise plugin.error
    if plugin.result is None:
        raise RuntimeError(f"pytest ends with {code} before its tests")
    return plugin.result


class Tests:
    """Of some folders. No test runs in this process, and no thread: it is forked.

    Args:
        session: of pytest.
        loaded: the functions that are changed.
        broken: what could not be collected, and why.
    """

    def __init__(self, session: pytest.Session, loaded: Loaded, broken: list[str]) -> None:
        self.loaded, self.broken = loaded, broken
        self._session = session
        self._heard: Callable[[Any], None] = lambda report: None
        self._called: set[tuple[str, str]] = set()
        self._shared: dict[str, set[tuple[str, str]]] = defaultdict(set)
        self.unchanged: list[Test] = []
        gc.collect()
        gc.freeze()  # forks share it
        self._by_call: dict[tuple[str, str], list[Test]] = defaultdict(list)

    def measure(self, jobs: int) -> Iterator[tuple[int, int, list[str]]]:
        """Run all as they are: how many of how many files are done, and the tests that fail, which are left out."""
        files: dict[Path, list[Any]] = defaultdict(list)
        for item in self._session.items:
            files[item.path].append(item)
        works = [Work(path, _bound(self._measured, items), 900.0) for path, items in files.items()]
        for count, (path, done) in enumerate(forked(works, jobs), 1):
            failed = [f"{path.name}: {done.failed}"] if done.failed else []
            items = {item.nodeid: item for item in files[path]}
            for message in done.messages:
                nodeid, seconds, calls, passed = message
                if passed:
                    self.unchanged.append(Test(items[nodeid], _name(nodeid), seconds, calls))
                else:
                    failed.append(nodeid)
            yield count, len(works), failed
        order = {item.nodeid: index for index, item in enumerate(self._session.items)}
        self.unchanged.sort(key=lambda test: order[test.item.nodeid])
        for test in self.unchanged:
            for call in test.calls:
                self._by_call[call].append(test)

    def run(self, changes: Iterable[Job], jobs: int, *, every: bool) -> Iterator[tuple[Job, Outcome]]:
        """Outcomes, in the order in which they are there; with all tests that fail, or the first of them."""
        yield from (
            self._outcome(job, done) for job, done in forked(map(lambda j: self._work(j, every), changes), jobs)
        )

    def calling(self, job: Job) -> list[Test]:
        """The tests that run what is changed: a function, or anything in the file of what is none, if there is something."""
        place = (job.file, job.mutant.function)
        if place in self.loaded.functions:
            return self._by_call[place]
        return [test for test in self.unchanged if any(file == job.file for file, _ in test.calls)] or self.unchanged

    def _work(self, job: Job, every: bool) -> Work:
        found = self.calling(job)
        own = [test for test in found if fnmatch(test.name, f"{job.tests}*")]
        some = _chosen(own, _SOME)
        chosen, belong = set(some), set(own)
        rest = _chosen([test for test in own if test not in chosen], _MORE[every])
        rest += _chosen([test for test in found if test not in belong], _MORE[every])
        return Work(job, lambda send: self._tried(job, some, rest, every, send), _limit(some))

    def _outcome(self, job: Job, done: Done) -> tuple[Job, Outcome]:
        known = "unknown" not in done.messages
        killers = {message for message in done.messages if message != "unknown"}
        if done.failed and not killers:
            killers = {done.failed}
        return job, Outcome(tuple(sorted(killers)), known, len(self.calling(job)))

    # In a fork.

    def _tried(self, job: Job, some: list[Test], rest: list[Test], every: bool, send: Callable[[Any], None]) -> None:
        if not self.loaded.apply(job.file, job.mutant):
            send("unknown")
            return
        failed: set[str] = set()

        def heard(report: Any) -> None:
            if report.failed and (name := _name(report.nodeid)) not in failed:
                failed.add(name)
                send(name)

        self._heard = heard
        seen: dict[str, int] = defaultdict(int)
        rounds: list[list[Test]] = [[], [], []]  # the first of each name, a few more, all others
        for test in some:
            rounds[0 if seen[test.name] == 0 else 1 if seen[test.name] < 4 else 2].append(test)
            seen[test.name] += 1
        for tests in rounds:
            self._protocol([test for test in tests if test.name not in failed], lambda: bool(failed) and not every)
            if failed and not every:
                return
        if not failed:
            more = _limit(rest)
            send(MoreTime(more))
            allow(more)
            self._protocol(rest, lambda: bool(failed))

    def _measured(self, items: list[Any], send: Callable[[Any], None]) -> None:
        self._called = self.loaded.watch()
        for item, following in zip(items, [*items[1:], None], strict=True):
            passed, started = True, time.process_time()

            def heard(report: Any) -> None:
                nonlocal passed
                passed = passed and not report.failed

            self._heard = heard
            self._called.clear()
            self._session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            fixtures = getattr(item, "fixturenames", ())
            calls = self._called.union(*(self._shared[name] for name in fixtures))
            send((item.nodeid, time.process_time() - started, frozenset(calls), passed))

    def _protocol(self, tests: Sequence[Test], enough: Callable[[], bool]) -> None:
        for index, test in enumerate(tests):
            following = tests[index + 1].item if index + 1 < len(tests) else None
            self._session.config.hook.pytest_runtest_protocol(item=test.item, nextitem=following)
            if enough():
                return

    def heard(self, report: Any) -> None:
        """Of a test that runs here."""
        self._heard(report)

    def fixture(self, fixture: Any) -> Iterator[None]:
        """What it calls counts for every test that uses it, if several share it."""
        if fixture.scope == "function":
            yield
            return
        before = set(self._called)
        self._called.clear()
        yield
        self._shared[fixture.argname] |= self._called
        self._called |= before


def _bound(function: Callable[[_T, Any], None], argument: _T) -> Callable[[Any], None]:
    return lambda send: function(argument, send)


def _limit(tests: Sequence[Test]) -> float:
    return 5 + 5 * sum(test.seconds for test in tests)


def _name(nodeid: str) -> str:
    return nodeid.removeprefix("tests/").split("[")[0]


def _chosen(tests: Sequence[Test], seconds: float) -> list[Test]:
    """As many as fit into some seconds, at least one, in their order: first one of each name, and those that call least."""
    count: dict[str, int] = defaultdict(int)
    ranked = []
    for test in tests:
        ranked.append(((count[test.name], len(test.calls)), test))
        count[test.name] += 1
    ranked.sort(key=lambda pair: pair[0])
    chosen, total = set(), 0.0
    for _, test in ranked:
        if not chosen or total + test.seconds <= seconds:
            chosen.add(test)
            total += test.seconds
    return [test for test in tests if test in chosen]


def _few_examples() -> None:
    try:
        from hypothesis import Phase, settings
    except ImportError:
        return
    settings.register_profile(
        "mutants",
        max_examples=10,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.explicit, Phase.generate),  # that it fails is enough: no search for the smallest example
    )
    settings.load_profile("mutants")


class _Loop:
    """In the place of pytest's own loop over the tests."""

    def __init__(self, package: Path, files: Sequence[str], then: Callable[[Tests], Any]) -> None:
        self._package, self._files, self._then = package, files, then
        self._tests: Tests | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self._broken: list[str] = []

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._broken.append(f"{report.nodeid}: {str(report.longrepr)[-500:]}")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for plugin in session.config.pluginmanager.get_plugins():
            if hasattr(plugin, "BUDGETS"):  # a change may make a test slow: that is not what it is about
                plugin.BUDGETS = dict.fromkeys(plugin.BUDGETS, math.inf)
        try:
            self._tests = Tests(session, Loaded(self._package, self._files), self._broken)
            self.result = self._then(self._tests)
        except BaseException as error:
            self.error = error
        return True

    def pytest_runtest_logreport(self, report: Any) -> None:
        if self._tests:
            self._tests.heard(report)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        if self._tests is None:
            return (yield)
        steps = self._tests.fixture(fixturedef)
        next(steps)
        result = yield
        next(steps, None)
        return result
