"""Run tests against changed copies of a package, each in a process of its own."""

from __future__ import annotations

import compileall
import importlib
import io
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

OUT_OF_TIME = "takes more than"


@dataclass(frozen=True)
class Stage:
    """Test files that run together, below ``tests``.

    Args:
        paths: of the files.
        words: run only tests in whose name one of these begins after something other than a letter; empty for all.
    """

    paths: tuple[str, ...]
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Job:
    """A file, and what should notice if it is wrong.

    Args:
        file: relative to the project.
        text: what it holds instead; None for the file as it is.
        stages: run one after the other, up to the first test that fails.
        limit: seconds, after which it counts as noticed.
    """

    file: str
    text: str | None
    stages: tuple[Stage, ...]
    limit: float


@dataclass(frozen=True)
class Outcome:
    """Of a job.

    Args:
        caught_by: a test, or what else went wrong; empty if all tests passed.
        seconds: how long it took.
        output: of the tests.
    """

    caught_by: str
    seconds: float
    output: str


class Sandbox:
    """A copy of the package for each job that runs, and one of ``tests`` for all. The project itself is never written to.

    Processes are forked from this one: what it has imported they need not import again. It must not have imported the
    package, nor have threads.

    Args:
        project: a folder with the package, ``tests`` and ``pyproject.toml``.
        package: the name of its folder.
        jobs: how many run at once.
        unchanged: parts of the package that no job changes, and that import none that a job changes: imported once.
    """

    def __init__(self, project: Path, package: str, jobs: int, unchanged: Sequence[str] = ()) -> None:
        if package in sys.modules:
            raise RuntimeError(f"{package} is imported already: every copy of it would be that one")
        self._project, self._package, self._jobs, self._unchanged = project.resolve(), package, jobs, unchanged

    def __enter__(self) -> Sandbox:
        self._folder = tempfile.TemporaryDirectory(prefix="mutants-")
        self._top = Path(self._folder.name).resolve()
        ignored = shutil.ignore_patterns("__pycache__")
        for name, target in (("tests", "tests"), (self._package, f"src/{self._package}")):
            shutil.copytree(self._project / name, self._top / target, ignore=ignored)
        shutil.copy2(self._project / "pyproject.toml", self._top)
        with redirect_stdout(io.StringIO()):
            compileall.compile_dir(self._top / "src", quiet=2)
        for slot in range(self._jobs):
            shutil.copytree(self._top / "src", self._src(slot))
        own = {self._project, self._project / "tests" / "lab"}
        sys.path[:] = [str(self._top / "src"), *(path for path in sys.path if path and Path(path).resolve() not in own)]
        for name in self._unchanged:
            importlib.import_module(name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._folder.cleanup()

    def read(self, file: str) -> str:
        """The text of a file of the package, as it was when the copy was made."""
        return (self._top / "src" / file).read_text()

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Outcome]]:
        """Outcomes, in the order in which they are there."""
        fork = multiprocessing.get_context("fork")
        waiting, free = deque(jobs), list(range(self._jobs))
        running: dict[Connection, tuple[Job, int, Any, float]] = {}
        try:
            while waiting or running:
                while waiting and free:
                    job, slot = waiting.popleft(), free.pop()
                    self._write(slot, job.file, job.text)
                    receive, send = fork.Pipe(duplex=False)
                    process = fork.Process(target=self._child, args=(job, slot, send), daemon=True)
                    process.start()
                    send.close()
                    running[receive] = (job, slot, process, time.monotonic())
                ready = wait(list(running), timeout=0.2)
                for receive, (job, slot, process, started) in list(running.items()):
                    seconds = time.monotonic() - started
                    if receive not in ready and seconds < job.limit:
                        continue
                    caught_by = _received(receive) if receive in ready else f"{OUT_OF_TIME} {job.limit:.0f} s"
                    _end(process)
                    self._write(slot, job.file, None)
                    del running[receive]
                    free.append(slot)
                    yield job, Outcome(caught_by, seconds, self._log(slot).read_text(errors="replace"))
        finally:
            for *_, process, _started in running.values():
                _end(process)

    def _src(self, slot: int) -> Path:
        return self._top / "slots" / str(slot) / "src"

    def _log(self, slot: int) -> Path:
        return self._top / "slots" / str(slot) / "output"

    def _write(self, slot: int, file: str, text: str | None) -> None:
        """None: as it was."""
        path = self._src(slot) / file
        # A cached compilation is recognised by second and size: a sign that was flipped has the same.
        cached = Path(importlib.util.cache_from_source(str(path)))
        cached.unlink(missing_ok=True)
        path.write_text(self.read(file) if text is None else text)

    def _child(self, job: Job, slot: int, send: Connection) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        log = os.open(self._log(slot), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(self._top)
        sys.path[0] = str(self._src(slot))
        if self._package in sys.modules:  # what is not imported yet comes from this copy
            sys.modules[self._package].__path__ = [str(self._src(slot) / self._package)]
        os.environ["PYTHONPATH"] = str(self._src(slot))
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # looking for plugins takes longer than most tests
        sys.dont_write_bytecode = job.text is not None
        importlib.invalidate_caches()
        path = self._src(slot) / job.file
        name = ".".join(Path(job.file).with_suffix("").parts).removesuffix(".__init__")
        send.send(_import_failure(name, path) or _first_failure(job.stages, self._top))


def _import_failure(name: str, path: Path) -> str:
    try:
        found = importlib.import_module(name).__file__
    except Exception as error:
        return f"import: {type(error).__name__}"
    if found is None or Path(found) != path:
        raise RuntimeError(f"{name} was imported from {found}, not from {path}")
    return ""


def _first_failure(stages: Sequence[Stage], top: Path) -> str:
    _few_examples()
    options = ["-x", "-q", "--no-header", "--tb=short", "-p", "no:cacheprovider", f"--rootdir={top}"]
    for stage in stages:
        watch = _Watch(stage.words)
        paths = [str(top / "tests" / path) for path in stage.paths]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            code = pytest.main([*options, "-m", "not slow and not gpu", *paths], plugins=[watch])
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return watch.failed or f"pytest ends with {code}"
    return ""


def _few_examples() -> None:
    if "hypothesis" not in sys.modules:
        return
    from hypothesis import Phase, settings

    settings.register_profile(
        "mutants",
        max_examples=10,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.explicit, Phase.generate),  # that it fails is enough: no search for the smallest example
    )
    settings.load_profile("mutants")


class _Watch:
    """Chooses tests by name, and remembers the first that failed."""

    def __init__(self, words: tuple[str, ...]) -> None:
        self._wanted, self.failed = re.compile("|".join(rf"(?<![a-zA-Z]){word}" for word in words)), ""

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if self._wanted.search(item.name)]

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = f"{report.nodeid} (import)"


def _received(receive: Connection) -> str:
    try:
        return str(receive.recv())
    except EOFError:
        return "the process ends before its tests"


def _end(process: Any) -> None:
    if process.is_alive():
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            process.kill()
    process.join()
