"""Calls of the user's functions, sync and async, each with a time-out and none able to stop the run."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Any

import torch

#: Seconds beyond the time-outs of its calls after which an event loop counts as blocked.
_GRACE = 5.0


@dataclass(frozen=True)
class Failure:
    """What a call ended with instead of a value."""

    error: BaseException


@dataclass(frozen=True)
class Call:
    """A function and its arguments."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class _Job:
    """A call under way."""

    call: Call
    result: Any = None
    done: bool = False
    started: float | None = None

    def run(self, catch: tuple[type[BaseException], ...]) -> Any:
        # A reward never needs a gradient, and the caller's grad mode does not reach its threads.
        try:
            with torch.no_grad():
                return self.call.function(*self.call.args, **self.call.kwargs)
        except catch as error:
            return Failure(error)

    def end(self, result: Any) -> None:
        self.result, self.done = result, True


class Caller:
    """Runs calls and returns a value or a :class:`Failure` for each, in order.

    Async functions run together in an event loop of this object's own thread, which works where a loop runs already and keeps
    the connections of async clients. Sync functions run one after another in a thread, or in several. A thread cannot be
    stopped: a sync call that takes too long is left behind, and another thread takes its place.

    Args:
        timeout: seconds for each call from its start; None for no limit: sync functions then run in the caller's thread.
        workers: threads for sync calls (default one), and the most async calls at a time (default all).

    Example:
        >>> caller = Caller(timeout=5.0)
        >>> async def later(x):
        ...     return -x
        >>> caller([Call(abs, (-2,)), Call(later, (3,)), Call(int, ("x",))])
        [2, -3, Failure(error=ValueError("invalid literal for int() with base 10: 'x'"))]
    """

    def __init__(self, timeout: float | None = 30.0, workers: int | None = None) -> None:
        self.timeout, self.workers = timeout, workers
        self._loop: asyncio.AbstractEventLoop | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loop": None}  # the copy makes its own

    def __call__(self, calls: Sequence[Call]) -> list[Any]:
        """A result for each call."""
        jobs = [_Job(call) for call in calls]
        later = [job for job in jobs if _is_async(job.call.function)]
        running = self._begin_async(later)
        self._run_sync([job for job in jobs if not _is_async(job.call.function)])
        self._end_async(later, running)
        # A sync function may return a coroutine, as `lambda ...: judge(...)` does.
        returned = [job for job in jobs if inspect.isawaitable(job.result)]
        if returned:
            again = [_Job(Call(_awaited, (job.result,))) for job in returned]
            self._end_async(again, self._begin_async(again))
            for job, other in zip(returned, again, strict=True):
                job.result = other.result
        return [job.result for job in jobs]

    def _too_long(self) -> Failure:
        return Failure(TimeoutError(f"took longer than {self.timeout:g} s"))

    # ------------------------------------------------------------------ sync functions

    def _run_sync(self, jobs: list[_Job]) -> None:
        if not jobs:
            return
        if self.timeout is None and (self.workers or 1) == 1:
            for job in jobs:
                job.end(job.run((Exception, SystemExit)))  # generated code may call sys.exit
            return
        todo, busy, changed = deque(jobs), set[_Job](), threading.Condition()

        def work() -> None:
            while True:
                with changed:
                    if not todo:
                        return
                    job = todo.popleft()
                    job.started = time.monotonic()
                    busy.add(job)
                result = job.run((BaseException,))  # whatever it is, the caller waits for an end
                with changed:
                    busy.discard(job)
                    if job.done:  # left behind: another thread has taken the place of this one
                        return
                    job.end(result)
                    changed.notify()

        def start() -> None:
            context = contextvars.copy_context()
            threading.Thread(target=context.run, args=(work,), daemon=True, name="reward").start()

        for _ in range(min(self.workers or 1, len(jobs))):
            start()
        with changed:
            while not all(job.done for job in jobs):
                wait = None
                if self.timeout is not None:
                    now = time.monotonic()
                    for job in [job for job in busy if now - (job.started or now) >= self.timeout]:
                        busy.discard(job)
                        job.end(self._too_long())
                        start()
                    wait = min(((job.started or now) + self.timeout - now for job in busy), default=self.timeout)
                    if all(job.done for job in jobs):
                        break
                changed.wait(wait)

    # ------------------------------------------------------------------ async functions

    def _begin_async(self, jobs: list[_Job]) -> Any:
        if not jobs:
            return None
        if self._loop is None:
            self._loop = _start_loop(self)
        return asyncio.run_coroutine_threadsafe(self._all(jobs), self._loop)

    async def _all(self, jobs: list[_Job]) -> None:
        places = asyncio.Semaphore(self.workers or len(jobs))

        async def one(job: _Job) -> None:
            async with places:
                task = asyncio.ensure_future(_guarded(job))
                await asyncio.wait({task}, timeout=self.timeout)
                if not job.done:
                    task.cancel()
                    job.end(self._too_long())

        await asyncio.gather(*(one(job) for job in jobs))

    def _end_async(self, jobs: list[_Job], running: Any) -> None:
        if running is None:
            return
        rounds = -(-len(jobs) // (self.workers or len(jobs)))
        try:
            running.result(None if self.timeout is None else self.timeout * rounds + _GRACE)
        except FutureTimeoutError:
            self._loop = None  # its thread is left behind
            error = TimeoutError("blocked the event loop: an async function must await, not sleep or compute")
            for job in jobs:
                if not job.done:
                    job.end(Failure(error))


def check_takes(function: Any, what: str, *arguments: str) -> None:
    """Raise a TypeError that begins with ``what`` unless ``function`` can be called with these positional arguments.

    Example:
        >>> check_takes(lambda answer: 1.0, "reward", "question", "answer", "metadata")
        Traceback (most recent call last):
        ...
        TypeError: reward is called with (question, answer, metadata), and the function given takes (answer).
    """
    if not callable(function):
        raise TypeError(f"{what} must be a function of ({', '.join(arguments)}), got {function!r:.60}.")
    try:
        signature = inspect.signature(function.forward if isinstance(function, torch.nn.Module) else function)
    except (TypeError, ValueError):  # some functions of C tell none
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        given = str(signature).partition(" -> ")[0]
        raise TypeError(
            f"{what} is called with ({', '.join(arguments)}), and the function given takes {given}."
        ) from error


def _is_async(function: Any) -> bool:
    return (
        inspect.iscoroutinefunction(function)
        or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004  (an object with async __call__)
        or function is _awaited
    )


async def _awaited(value: Any) -> Any:
    return await value


async def _guarded(job: _Job) -> None:
    try:
        result = await job.call.function(*job.call.args, **job.call.kwargs)
    except BaseException as error:  # a cancellation too
        result = Failure(error)
    if not job.done:
        job.end(result)


def _start_loop(owner: Any) -> asyncio.AbstractEventLoop:
    """An event loop in a thread of its own, which ends with its owner."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="async rewards").start()
    weakref.finalize(owner, loop.call_soon_threadsafe, loop.stop)
    return loop
