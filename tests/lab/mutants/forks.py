"""Work in forks of this process: what it has imported they need not import again."""

from __future__ import annotations

import math
import multiprocessing
import os
import resource
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

OUT_OF_TIME = "time limit"
CRASHED = "the process ends before its tests"
_MEMORY = 6 * 2**30  # bytes that a fork may take beside what it has


class MoreTime(float):
    """A message of work that takes so many seconds more."""


def allow(seconds: float) -> None:
    """Let this process use the processor for so long, from now on; it ends when it takes more."""
    times = os.times()
    limit = math.ceil(times.user + times.system + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


@dataclass(frozen=True, eq=False)
class Work:
    """What a fork does.

    Args:
        key: what it is about.
        run: called with a function that sends a message to this process.
        limit: seconds that it may use the processor; it is ended, too, when it takes much longer than that.
    """

    key: Any
    run: Callable[[Callable[[Any], None]], None]
    limit: float


@dataclass
class Done:
    """Of a work.

    Args:
        messages: all that were sent.
        failed: why it did not come to its end; empty if it did.
    """

    messages: list[Any] = field(default_factory=list)
    failed: str = ""


def forked(works: Iterable[Work], jobs: int) -> Iterator[tuple[Any, Done]]:
    """Keys and what became of them, as many at once as there are jobs."""
    context = multiprocessing.get_context("fork")
    waiting = deque(works)
    running: dict[Connection, tuple[Work, Any, float, Done]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                work = waiting.popleft()
                receive, send = context.Pipe(duplex=False)
                process = context.Process(target=_child, args=(work, send), daemon=True)
                process.start()
                send.close()
                running[receive] = (work, process, time.monotonic() + _patience(work.limit), Done())
            ready = wait(list(running), timeout=0.2)
            for receive, (work, process, deadline, done) in list(running.items()):
                ended = False
                if receive in ready:
                    ended, more = _received(receive, done)
                    running[receive] = (work, process, deadline + more, done)
                elif time.monotonic() > deadline:
                    done.failed, ended = OUT_OF_TIME, True
                if ended:
                    process.join(5 if done.failed == CRASHED else 0)
                    _end(process)
                    if process.exitcode == -signal.SIGXCPU:
                        done.failed = OUT_OF_TIME
                    receive.close()
                    del running[receive]
                    yield work.key, done
    finally:
        for _, process, *_rest in running.values():
            _end(process)


def _patience(seconds: float) -> float:
    """How long a process may take on a machine that has other work."""
    return 300 + 20 * seconds


def _child(work: Work, send: Connection) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + _MEMORY, size + _MEMORY))
    allow(work.limit)
    try:
        work.run(send.send)
        send.send(None)
    finally:
        send.close()
        os._exit(0)


def _received(receive: Connection, done: Done) -> tuple[bool, float]:
    """One message: whether it was the last, and the time that it asks for."""
    try:
        message = receive.recv()
    except EOFError:
        done.failed = CRASHED  # or OUT_OF_TIME, as the exit code tells
        return True, 0.0
    if message is None:
        return True, 0.0
    if isinstance(message, MoreTime):
        return False, _patience(message)
    done.messages.append(message)
    return False, 0.0


def _end(process: Any) -> None:
    if process.is_alive():
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            process.kill()
    process.join()
