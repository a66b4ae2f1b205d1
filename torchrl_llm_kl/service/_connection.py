"""A process's way to a service: Serve's handle and the keeper, found on first use and again after ``ray.shutdown()``."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, NamedTuple, TypeVar

from torchrl_llm_kl._registry import install_hint
from torchrl_llm_kl.service._errors import (
    ServiceClosedError,
    ServiceError,
    ServiceOverloaded,
    ServiceTimeout,
    VersionPending,
)

_LOG = logging.getLogger("torchrl_llm_kl.service")
_LOOK = 2.0  # seconds without an answer after which a client looks whether there is still a service
_PAUSE = 0.1  # seconds before a call is repeated after its replica ended


class _Ended(NamedTuple):
    """The replica that held a call ended."""

    error: Exception


_PENDING = object()  # there is no answer yet
T = TypeVar("T")


class Connection:
    """One service, as a client uses it. Thread-safe.

    Attributes:
        name: of the application.
        service: the id of the service; empty for the one that has the name now.
        address: of the Ray cluster, for processes that have not joined one.
        newest: latest version of the weights that this client has seen.
        retries: number of calls that were repeated after their replica ended.
    """

    _of_parent: ClassVar[bool] = False  # whether Ray here is connected by a parent process only

    def __init__(self, name: str, service: str = "", address: str | None = None) -> None:
        self.name, self.service, self.address = name, service, address
        self.newest = self.retries = 0
        self._lock = threading.RLock()
        self._session, self._closed = "", ""
        self._handle: Any = None
        self._methods: dict[str, Any] = {}
        self._release: weakref.finalize[..., Connection] | None = None

    def connect(self) -> None:
        """Join a cluster if this process is part of none, then find the application."""
        if Connection._of_parent:
            raise ServiceError(
                f"process {os.getpid()} was forked from one that was connected to Ray, whose connection does not survive a "
                "fork: start it with multiprocessing's 'spawn' or 'forkserver' method, or fork before the service is used."
            )
        if self._closed:
            raise ServiceClosedError(self._closed)
        ray = import_ray()
        if self._session and self._session == _session():
            return
        with self._lock:
            if not ray.is_initialized():
                ray.init(self.address, log_to_driver=False)
            self.address = ray.get_runtime_context().gcs_address
            self._find()
            self._session = _session()

    def _find(self) -> None:
        from ray import serve

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        try:
            self._handle, self._methods = serve.get_app_handle(self.name), {}
        except serve.exceptions.RayServeException as error:
            raise self.gone() from error

    def gone(self) -> ServiceClosedError:
        """The error of a service that there is not."""
        return ServiceClosedError(f"there is no service {self.name!r}: it was shut down, or its last driver ended.")

    def hold(self, keeper: Any) -> None:
        """Keep the service until this object is closed or freed, or its process ends."""
        if self._release is not None:
            self._release()
        client = uuid.uuid4().hex
        held = keeper.hold.remote(client)  # a call that this process owns: Ray tells the keeper of its end
        keeper.watch.remote(client, [held])
        self._release = weakref.finalize(self, _cancel, held)
        self._release.atexit = False  # the end of the process cancels the call too

    def close(self, why: str) -> None:
        """Stop using the service. Later calls raise :class:`ServiceClosedError` with this text."""
        self._closed = self._closed or why
        if self._release is not None:
            self._release()

    def keeper(self) -> Any:
        """The actor that keeps the weights."""
        from torchrl_llm_kl.service._keeper import keeper_of

        self.connect()
        try:
            return keeper_of(self.name)
        except ValueError:
            raise self.gone() from None

    def check_open(self) -> None:
        """Raise a :class:`ServiceClosedError` if the service has ended."""
        import ray

        from torchrl_llm_kl.service._keeper import is_deployed, keeper_of

        self.connect()
        try:
            ended = ray.get(keeper_of(self.name).state.remote(), timeout=_LOOK).ended
        except ValueError:
            if is_deployed(self.name):  # by Serve's own commands; the first replica that starts creates the keeper
                return
            raise self.gone() from None
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):  # it starts again
            return
        if ended:
            raise self.gone()

    def saw(self, version: int) -> None:
        """Note a version of the weights."""
        with self._lock:
            self.newest = max(self.newest, version)

    # ------------------------------------------------------------------ calls

    def send(self, method: str, *args: object) -> Any:
        """Call a method of any replica; Serve's response."""
        self.connect()
        if method not in self._methods:  # a handle of its own for each method, which Serve's router shares
            self._methods[method] = getattr(self._handle, method)
        return self._methods[method].remote(*args)

    def receive(self, response: Any, again: Callable[[int], Any], deadline: Deadline) -> Any:
        """The answer; an error that is an answer is raised, except for :class:`VersionPending`.

        Args:
            response: of :meth:`send`.
            again: sends the call again after so many replicas ended that held it; None for a call that is not repeated.
            deadline: of the answer.
        """
        tries = 0
        while True:
            outcome = self._look(response, deadline)
            if isinstance(outcome, _Ended):
                self.check_open()
                if deadline.left <= _PAUSE:
                    raise deadline.over(outcome.error) from outcome.error
                tries += 1
                self.retries += 1
                time.sleep(_PAUSE)
                response = again(tries)
            elif isinstance(outcome, Exception) and not isinstance(outcome, VersionPending):
                raise outcome
            elif outcome is not _PENDING:
                return outcome

    def _look(self, response: Any, deadline: Deadline) -> Any:
        """The answer if it is there, ``_PENDING`` if not, or :class:`_Ended`; an error of Serve as one of the service."""
        from ray import exceptions, serve

        try:
            return response.result(timeout_s=min(deadline.left, _LOOK))
        except serve.exceptions.BackPressureError as error:
            raise ServiceOverloaded(
                f"{deadline.what}: as many calls of this process wait as max_queued_requests allows ({error.message}) Add "
                "replicas, or send fewer at a time."
            ) from error
        except serve.exceptions.DeploymentUnavailableError as error:
            self.check_open()
            raise ServiceError(f"{deadline.what}: the application failed: {error.message}") from error
        except TimeoutError:
            if deadline.left <= 0:
                raise deadline.over() from None
            self.check_open()
            return _PENDING
        except (exceptions.TaskCancelledError, serve.exceptions.RequestCancelledError) as error:
            raise ServiceError(f"{deadline.what}: the call was cancelled.") from error
        except (exceptions.RayActorError, exceptions.WorkerCrashedError, exceptions.ObjectLostError) as error:
            return _Ended(error)
        except (exceptions.OutOfMemoryError, exceptions.NodeDiedError) as error:  # Ray's memory monitor, or a lost node
            return _Ended(error)

    def call(self, method: str, *args: object, timeout: float) -> Any:
        """Call a method of any replica, and wait for the answer."""
        deadline = Deadline(timeout, f"{method}() of the service {self.name!r}")
        return outside_loop(
            lambda: self.receive(self.send(method, *args), lambda tries: self.send(method, *args), deadline)
        )

    def broadcast(self, method: str, *args: object, timeout: float) -> list[Any]:
        """What a method of each running replica returns; an exception for one that does not answer in time."""
        from ray.serve.exceptions import DeploymentUnavailableError

        self.connect()
        response = self._handle.broadcast(method, *args)
        try:
            return outside_loop(lambda: list(response.results(timeout_s=timeout, return_exceptions=True)))
        except (TimeoutError, DeploymentUnavailableError) as error:  # the latter: no replica runs
            return [error]


def outside_loop(wait: Callable[[], T]) -> T:
    """What ``wait`` returns. It runs in another thread if this one runs an event loop, where Serve refuses to wait."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return wait()
    with ThreadPoolExecutor(1, thread_name_prefix="scores") as pool:
        return pool.submit(wait).result()


class Deadline:
    """A time in the future, and what shall be done by then."""

    def __init__(self, timeout: float, what: str) -> None:
        self.timeout, self.what = timeout, what
        self._end = time.monotonic() + timeout

    @property
    def left(self) -> float:
        """Seconds, at least 0."""
        return max(self._end - time.monotonic(), 0.0)

    def over(self, why: Exception | None = None) -> ServiceTimeout:
        """The error of a missed deadline."""
        reason = "" if why is None else f": {why}"
        return ServiceTimeout(
            f"{self.what} took more than {self.timeout:g} s{reason}. Raise timeout=, or add replicas."
        )


def _cancel(held: Any) -> None:
    """Withdraw the call that a driver holds, in a thread: an object may be freed in the midst of anything."""
    import ray

    if ray.is_initialized():
        threading.Thread(target=ray.cancel, args=(held,), name="release", daemon=True).start()


def import_ray() -> Any:
    """Ray, or an ImportError that says how to install it."""
    try:
        import ray
        import ray.serve
    except ImportError as error:
        raise ImportError(f"a service needs Ray Serve: {install_hint('ray')}.") from error
    return ray


def _after_fork() -> None:
    """Runs in each forked child: Ray counts as connected there if the parent was, and every call would hang."""
    ray = sys.modules.get("ray")
    Connection._of_parent = ray is not None and ray.is_initialized()


os.register_at_fork(after_in_child=_after_fork)


def _session() -> str:
    """Identifies the connection of this process to a cluster; empty without one."""
    import ray

    if not ray.is_initialized():
        return ""
    context = ray.get_runtime_context()
    return f"{context.gcs_address} {context.get_job_id()} {context.get_worker_id()}"
