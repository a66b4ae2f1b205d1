"""Runs the tests that call a function against changes of it. Each change has its own fork, which imports nothing again."""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import resource
import signal
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import islice
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar

import pytest

from .loaded import Call, Loaded
from .mutations import Mutant

#: The most seconds of tests that are run for a change, for its own layer and for others.
_MOST = 120.0
_MEMORY = 6 * 2**30  # bytes that a fork may allocate
OUT_OF_TIME, CRASHED = "time limit", "the process ends before its tests"
_T = TypeVar("_T")
Send = Callable[[Any], None]


@dataclass(frozen=True)
class Job:
    """A change of a file."""

    file: str  #: below the package
    mutant: Mutant
    tests: str  #: pattern of files or a folder below ``tests``, whose tests should notice
    first: str = ""  #: the name of a test that noticed the change before


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job."""

    killer: str  #: a failing test, without parameters and ``tests/``, or another failure; empty if there is none
    known: bool  #: False if the change could not be made
    tests: int  #: the number of tests that call the changed function


@dataclass(frozen=True, eq=False)
class Test:
    """An item of pytest, with its duration and its calls without any change."""

    item: Any
    name: str
    seconds: float
    calls: frozenset[Call]


def with_tests(
    project: Path, package: str, tests: Sequence[str], files: Sequence[str], then: Callable[[Tests], _T]
) -> _T:
    """Collect tests (patterns of files or folders below ``tests``), and call ``then`` with them in the same process.

    The functions of ``files`` of the package are watched and changed.
    """
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # looking for plugins takes long
    _few_examples()
    loop = _Loop(project / package, files, then)
    options = ["-qq", "-s", "--assert=plain", "--tb=native", "-p", "no:cacheprovider", f"--rootdir={project}"]
    options += ["--continue-on-collection-errors", "-m", "not slow and not device"]
    paths = [str(path) for pattern in tests for path in sorted((project / "tests").glob(pattern))]
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        code = pytest.main([*options, *paths], plugins=[loop])
    if not loop.results:
        raise loop.error or RuntimeError(f"pytest ends with {code} before its tests")
    return loop.results[0]


class Tests:
    """The collected tests. This process is forked, so that it runs no test and no thread."""

    def __init__(self, session: pytest.Session, loaded: Loaded, broken: list[str]) -> None:
        self.loaded, self.broken, self._session = loaded, broken, session
        self.on_report: Callable[[Any], None] = lambda report: None  # called with the report of each test
        self._called: set[Call] = set()
        self._shared: dict[str, set[Call]] = defaultdict(set)
        self.unchanged: list[Test] = []
        self._by_call: dict[Call, list[Test]] = defaultdict(list)
        gc.collect()
        gc.freeze()  # forks share it

    def measure(self, jobs: int) -> Iterator[str]:
        """Run all tests without any change, file by file. Yields the names of failing tests, which are left out later."""
        files: dict[Path, list[Any]] = defaultdict(list)
        for item in self._session.items:
            files[item.path].append(item)
        works = ((items, lambda send, items=items: self._measured(items, send), 900.0) for items in files.values())
        for items, messages, failed in forked(works, jobs):
            if failed:
                yield f"{items[0].path.name}: {failed}"
            for item, (seconds, calls, passed) in zip(items, messages, strict=False):
                if passed:
                    self.unchanged.append(Test(item, _name(item.nodeid), seconds, calls))
                else:
                    yield item.nodeid
        order = {item.nodeid: index for index, item in enumerate(self._session.items)}
        self.unchanged.sort(key=lambda test: order[test.item.nodeid])
        for test in self.unchanged:
            for call in test.calls:
                self._by_call[call].append(test)

    def run(self, changes: Iterable[Job], jobs: int) -> Iterator[tuple[Job, Outcome]]:
        """Yield the outcomes in the order in which the jobs end."""
        for job, messages, failed in forked(map(self._work, changes), jobs):
            killer = failed if messages in ([], [""]) else messages[-1]
            yield job, Outcome(killer, messages != [""], len(self.calling(job)))

    def calling(self, job: Job) -> list[Test]:
        """The tests that call the changed function. Outside functions, the tests that call any function of the file."""
        place = (job.file, job.mutant.function)
        if place in self.loaded.functions:
            return self._by_call[place]
        return [test for test in self.unchanged if any(file == job.file for file, _ in test.calls)] or self.unchanged

    def _work(self, job: Job) -> Work:
        found = self.calling(job)
        own, others = ([test for test in found if fnmatch(test.name, f"{job.tests}*") == x] for x in (True, False))
        first = (test for test in found if test.name == job.first)
        tests = list(dict.fromkeys([*first, *_chosen(own), *_chosen(others)]))
        return job, lambda send: self._tried(job, tests, send), 5 + sum(map(_limit, tests))

    # In a fork.

    def _tried(self, job: Job, tests: Sequence[Test], send: Send) -> None:
        if not self.loaded.apply(job.file, job.mutant):
            send("")
            return
        failed: list[str] = []
        self.on_report = lambda report: failed.append(_name(report.nodeid)) if report.failed else None
        signal.signal(signal.SIGVTALRM, _out_of_time)
        for test, following in zip(tests, [*tests[1:], None], strict=False):
            signal.setitimer(signal.ITIMER_VIRTUAL, _limit(test))
            self._session.config.hook.pytest_runtest_protocol(item=test.item, nextitem=following and following.item)
            if failed:
                send(failed[0])
                return

    def _measured(self, items: list[Any], send: Send) -> None:
        self._called = self.loaded.watch()
        for item, following in zip(items, [*items[1:], None], strict=True):
            failed, started = list[Any](), time.process_time()
            self.on_report = lambda report, failed=failed: failed.append(report) if report.failed else None
            self._called.clear()
            self._session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            calls = self._called.union(*(self._shared[name] for name in getattr(item, "fixturenames", ())))
            send((time.process_time() - started, frozenset(calls), not failed))

    @contextmanager
    def shared(self, fixture: str) -> Iterator[None]:
        """Count the calls of this fixture for each test that uses it."""
        before = set(self._called)
        self._called.clear()
        yield
        self._shared[fixture] |= self._called
        self._called |= before


def _out_of_time(*_: Any) -> None:
    raise TimeoutError


def _limit(test: Test) -> float:
    return 5 + 5 * test.seconds


def _name(nodeid: str) -> str:
    return nodeid.removeprefix("tests/").split("[")[0]


def _chosen(tests: Sequence[Test]) -> list[Test]:
    """At least one test, and as many as fit into ``_MOST`` seconds: one of each name first, then those with few calls."""
    count: Counter[str] = Counter()
    ranked = []
    for test in tests:
        ranked.append((count[test.name], len(test.calls), test))
        count[test.name] += 1
    chosen: list[Test] = []
    for *_, test in sorted(ranked, key=lambda row: row[:2]):
        if not chosen or sum(each.seconds for each in chosen) + test.seconds <= _MOST:
            chosen.append(test)
    return chosen


def _few_examples() -> None:
    from hypothesis import Phase, settings

    phases = (Phase.explicit, Phase.generate)  # any failing example will do, so that none is made smaller
    how: dict[str, Any] = {"max_examples": 10, "derandomize": True, "database": None, "deadline": None}
    settings.register_profile("mutants", **how, phases=phases)
    settings.load_profile("mutants")


class _Loop:
    """Replaces pytest's own loop over the tests."""

    def __init__(self, package: Path, files: Sequence[str], then: Callable[[Tests], Any]) -> None:
        self._package, self._files, self._then = package, files, then
        self._tests: Tests | None = None
        self._broken: list[str] = []
        self.results: list[Any] = []
        self.error: BaseException | None = None

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._broken.append(f"{report.nodeid}: {str(report.longrepr)[-500:]}")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for plugin in session.config.pluginmanager.get_plugins():
            if hasattr(plugin, "BUDGETS"):  # a test that becomes slow by a change does not notice it
                plugin.BUDGETS = dict.fromkeys(plugin.BUDGETS, math.inf)
        try:
            self._tests = Tests(session, Loaded(self._package, self._files), self._broken)
            self.results.append(self._then(self._tests))
        except BaseException as error:
            self.error = error
        return True

    def pytest_runtest_logreport(self, report: Any) -> None:
        if self._tests:
            self._tests.on_report(report)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        alone = self._tests is None or fixturedef.scope == "function"
        with nullcontext() if alone else self._tests.shared(fixturedef.argname):
            return (yield)


# ------------------------------------------------------------------ forks
#: A key, a function that receives a function to send messages to this process, and a limit in seconds of the processor.
Work = tuple[Any, Callable[[Send], None], float]


def forked(works: Iterable[Work], jobs: int) -> Iterator[tuple[Any, list[Any], str]]:
    """Yield the key of each work, its messages, and the reason of an early end. At most ``jobs`` run at once."""
    context, waiting = multiprocessing.get_context("fork"), iter(works)
    running: dict[Any, tuple[Any, Any, list[Any]]] = {}
    try:
        while True:
            for key, run, seconds in islice(waiting, jobs - len(running)):
                receive, send = context.Pipe(duplex=False)
                process = context.Process(target=_child, args=(run, seconds, send), daemon=True)
                process.start()
                send.close()
                running[receive] = key, process, []
            if not running:
                return
            for receive in wait(list(running)):
                key, process, messages = running[receive]
                try:
                    messages.append(receive.recv())
                except EOFError:
                    process.join()
                    del running[receive]
                    ends = {0: "", -signal.SIGXCPU: OUT_OF_TIME, -signal.SIGALRM: OUT_OF_TIME}
                    yield key, messages, ends.get(process.exitcode, CRASHED)
    finally:
        for _, process, _ in running.values():
            process.kill()


def _child(run: Callable[[Send], None], seconds: float, send: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + _MEMORY, size + _MEMORY))
    used = time.process_time()
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used + seconds), resource.RLIM_INFINITY))
    signal.setitimer(signal.ITIMER_REAL, 300 + 20 * seconds)  # long, since the machine may be busy
    code = 1
    try:
        run(send.send)
        code = 0
    finally:
        send.close()
        os._exit(code)
