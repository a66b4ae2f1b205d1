"""Runs the user's functions, sync and async. Each call has a time-out, and no call can stop the run."""

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

#: Seconds after the time-outs of its calls until an event loop counts as blocked.
_GRACE = 5.0


@dataclass(frozen=True)
class Failure:
    """The error of a call, returned in place of a value."""

    error: BaseException


@dataclass(frozen=True)
class Call:
    """A function and its arguments."""

    function: Callable[..., Any]
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)


class Caller:
    """Runs calls and returns a value or a :class:`Failure` for each, in order.

    Async functions run concurrently in an event loop, in a thread that belongs to this object. This also works in a program
    that already runs a loop, and async clients keep their connections between calls. Each sync call has its own thread. Python
    cannot stop a thread, so a call that takes too long keeps running, and its result is ignored.

    Args:
        timeout: seconds for each call, from its start. None: no limit. If there is also only one worker, sync functions run
            in the thread that calls this object.
        workers: the number of concurrent sync calls (default one) and of concurrent async calls (default all).

    Example:
        >>> caller = Caller(timeout=5.0)
        >>> async def later(x):
        ...     return -x
        >>> caller([Call(abs, (-2,)), Call(later, (3,)), Call(int, ("x",))])
        [2, -3, Failure(error=ValueError("invalid literal for int() with base 10: 'x'"))]
    """

    def __init__(self, timeout: float | None = 30.0, workers: int | None = None) -> None:
        self.timeout, self.workers = timeout, workers
        self._loop: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_loop": None}  # a loop cannot be pickled: the copy starts its own

    def __call__(self, calls: Sequence[Call]) -> list[object]:
        """A result for each call."""
        results = self._run(calls)
        begun = [result for result in results if isinstance(result, Future)]
        rounds = -(-len(begun) // (self.workers or max(1, len(begun))))
        if wait(begun, None if self.timeout is None else self.timeout * rounds + _GRACE).not_done:
            # A call computes or sleeps in the loop, which no other call can enter: the next calls get a new loop.
            self._loop = None
        blocked = Failure(TimeoutError("blocked the event loop: an async function must await, not sleep or compute"))
        ended = {future: future.result() if future.done() else blocked for future in begun}
        return [ended[result] if isinstance(result, Future) else result for result in results]

    def _too_long(self) -> Failure:
        return Failure(TimeoutError(f"took longer than {self.timeout:g} s"))

    def _run(self, calls: Sequence[Call]) -> list[object]:
        """Call the functions. The result of an async function is a future of the event loop."""
        workers = self.workers or 1
        if self.timeout is None and workers == 1:  # SystemExit too: code of the model may call sys.exit
            return [self._begun(_result_of(call, (Exception, SystemExit))) for call in calls]
        limit = math.inf if self.timeout is None else self.timeout
        results: list[object] = [None] * len(calls)
        todo = deque(enumerate(calls))
        running: dict[Future[object], tuple[int, float]] = {}  # future -> (place in the results, deadline)
        while todo or running:
            while todo and len(running) < workers:
                place, call = todo.popleft()
                running[_in_thread(call)] = (place, time.monotonic() + limit)
            first = min(end for _, end in running.values())
            wait(running, None if self.timeout is None else first - time.monotonic(), return_when=FIRST_COMPLETED)
            for future, (place, end) in list(running.items()):
                if future.done() or time.monotonic() >= end:
                    results[place] = self._begun(future.result() if future.done() else self._too_long())
                    del running[future]
        return results

    def _begun(self, result: object) -> object:
        """Start an awaitable in the event loop, and return any other result as it is."""
        if not inspect.isawaitable(result):
            return result
        loop, places = self._loop = self._loop or _start_loop(self, self.workers)
        return asyncio.run_coroutine_threadsafe(self._one(result, places), loop)

    async def _one(self, value: Awaitable[object], places: asyncio.Semaphore) -> object:
        async with places:
            task = asyncio.ensure_future(_guarded(value))
            # Unlike wait_for, this does not wait for a task that suppresses its cancellation.
            await asyncio.wait({task}, timeout=self.timeout)
            if task.done():
                return task.result()
            task.cancel()
            return self._too_long()


def _result_of(call: Call, catch: tuple[type[BaseException], ...]) -> object:
    # A reward needs no gradient, and torch's grad mode is per thread: the caller's setting does not apply here.
    try:
        with torch.no_grad():
            return call.function(*call.args, **call.kwargs)
    except catch as error:
        return Failure(error)


def _in_thread(call: Call) -> Future[object]:
    future, context = Future[object](), contextvars.copy_context()

    def work() -> None:
        # BaseException, since without a result the caller would wait for ever.
        future.set_result(context.run(_result_of, call, (BaseException,)))

    # A daemon, so that a call that never ends does not keep the process alive.
    threading.Thread(target=work, daemon=True, name="reward").start()
    return future


def check_takes(function: object, name: str, *arguments: str) -> None:
    """Raise a TypeError unless ``function`` accepts these positional arguments. The message begins with ``name``.

    Example:
        >>> check_takes(lambda answer: 1.0, "reward", "question", "answer", "metadata")
        Traceback (most recent call last):
        ...
        TypeError: reward is called with (question, answer, metadata): too many positional arguments.
    """
    try:
        inspect.signature(function.forward if isinstance(function, torch.nn.Module) else function).bind(*arguments)  # type: ignore[arg-type]
    except TypeError as error:
        raise TypeError(f"{name} is called with ({', '.join(arguments)}): {error}.") from error
    except ValueError:  # builtins without a signature cannot be checked
        pass


async def _guarded(value: Awaitable[object]) -> object:
    try:
        return await value
    except BaseException as error:  # SystemExit would end the loop, and a cancellation is not an Exception
        return Failure(error)


def _start_loop(owner: object, workers: int | None) -> tuple[asyncio.AbstractEventLoop, asyncio.Semaphore]:
    """Start an event loop in its own thread. It ends with ``owner``. The semaphore limits its concurrent calls."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="async rewards").start()
    # The thread holds no reference to the owner, which would otherwise never be collected.
    weakref.finalize(owner, loop.call_soon_threadsafe, loop.stop)
    return loop, asyncio.Semaphore(workers or 1 << 30)
