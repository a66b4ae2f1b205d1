"""Calls of the user's functions, sync and async, each with a time-out and none able to stop the run."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any

import torch

#: Seconds beyond the time-outs of its calls after which an event loop counts as blocked.
_GRACE = 5.0


@dataclass(frozen=True)
class Failure:
    """The error of a call, in place of a value."""

    error: BaseException


@dataclass(frozen=True)
class Call:
    """A function and its arguments."""

    function: Callable[..., Any]
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)


class Caller:
    """Runs calls and returns a value or a :class:`Failure` for each, in order.

    Async functions run together in an event loop of this object's own thread, which works where a loop runs already and keeps
    the connections of async clients. Each sync call has a thread; a thread cannot be stopped: a call that takes too long is
    left behind.

    Args:
        timeout: seconds for each call from its start; None for no limit: sync functions then run in the caller's thread.
        workers: sync calls at a time (default one), and the most async calls at a time (default all).

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

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_loop": None}  # the copy makes its own

    def __call__(self, calls: Sequence[Call]) -> list[object]:
        """A result for each call."""
        later = [_is_async(call.function) for call in calls]
        begun = self._begin([call for call, waits in zip(calls, later, strict=True) if waits])
        direct = iter(self._run_sync([call for call, waits in zip(calls, later, strict=True) if not waits]))
        awaited = iter(self._end(begun))
        results = [next(awaited if waits else direct) for waits in later]
        # A sync function may return a coroutine, as `lambda ...: judge(...)` does.
        returned = [place for place, result in enumerate(results) if inspect.isawaitable(result)]
        more = self._end(self._begin([Call(_awaited, (results[place],)) for place in returned]))
        for place, result in zip(returned, more, strict=True):
            results[place] = result
        return results

    def _too_long(self) -> Failure:
        return Failure(TimeoutError(f"took longer than {self.timeout:g} s"))

    # ------------------------------------------------------------------ sync functions

    def _run_sync(self, calls: list[Call]) -> list[object]:
        workers = self.workers or 1
        if self.timeout is None and workers == 1:
            return [_result_of(call, (Exception, SystemExit)) for call in calls]  # generated code may call sys.exit
        results: list[object] = [None] * len(calls)
        todo = deque(enumerate(calls))
        running: dict[Future[object], tuple[int, float]] = {}  # place and time of its end at the latest
        while todo or running:
            while todo and len(running) < workers:
                place, call = todo.popleft()
                running[_in_thread(call)] = (
                    place,
                    time.monotonic() + (math.inf if self.timeout is None else self.timeout),
                )
            first = min(end for _, end in running.values())
            wait(running, None if self.timeout is None else first - time.monotonic(), return_when=FIRST_COMPLETED)
            for future, (place, end) in list(running.items()):
                if future.done() or time.monotonic() >= end:
                    results[place] = future.result() if future.done() else self._too_long()
                    del running[future]
        return results

    # ------------------------------------------------------------------ async functions

    def _begin(self, calls: list[Call]) -> list[Future[object]]:
        if calls and self._loop is None:
            self._loop = _start_loop(self)
        places, futures = asyncio.Semaphore(self.workers or max(1, len(calls))), [Future[object]() for _ in calls]
        for call, future in zip(calls, futures, strict=True):
            asyncio.run_coroutine_threadsafe(self._one(call, future, places), self._loop)  # type: ignore[arg-type]
        return futures

    async def _one(self, call: Call, future: Future[object], places: asyncio.Semaphore) -> None:
        async with places:
            task = asyncio.ensure_future(_guarded(call, future))
            await asyncio.wait({task}, timeout=self.timeout)
            if not future.done():
                future.set_result(self._too_long())
                task.cancel()

    def _end(self, futures: list[Future[object]]) -> list[object]:
        rounds = -(-len(futures) // (self.workers or max(1, len(futures))))
        if wait(futures, None if self.timeout is None else self.timeout * rounds + _GRACE).not_done:
            self._loop = None  # its thread is left behind
        blocked = Failure(TimeoutError("blocked the event loop: an async function must await, not sleep or compute"))
        return [future.result() if future.done() else blocked for future in futures]


def _result_of(call: Call, catch: tuple[type[BaseException], ...]) -> object:
    # A reward never needs a gradient, and the caller's grad mode does not reach its threads.
    try:
        with torch.no_grad():
            return call.function(*call.args, **call.kwargs)
    except catch as error:
        return Failure(error)


def _in_thread(call: Call) -> Future[object]:
    future, context = Future[object](), contextvars.copy_context()

    def work() -> None:
        future.set_result(
            context.run(_result_of, call, (BaseException,))
        )  # whatever it is, the caller waits for an end

    threading.Thread(target=work, daemon=True, name="reward").start()
    return future


def check_takes(function: object, what: str, *arguments: str) -> None:
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


def _is_async(function: object) -> bool:
    method = getattr(function, "__call__", None)  # noqa: B004  (an object with async __call__)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(method)


async def _awaited(value: Awaitable[object]) -> object:
    return await value


async def _guarded(call: Call, future: Future[object]) -> None:
    try:
        result = await call.function(*call.args, **call.kwargs)
    except BaseException as error:  # a cancellation too
        result = Failure(error)
    if not future.done():
        future.set_result(result)


def _start_loop(owner: object) -> asyncio.AbstractEventLoop:
    """An event loop in its own thread, which ends with its owner."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="async rewards").start()
    weakref.finalize(owner, loop.call_soon_threadsafe, loop.stop)
    return loop
