"""The client of a service: its connection, and proxies of the model and its scorer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from operator import index
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from torchrl_llm_kl._numerics import check_range
from torchrl_llm_kl._registry import install_hint
from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.rollouts import ModelInterface
from torchrl_llm_kl.scoring import Changes, ScoreOptions, Scorer, ScoreRequest, Scores, Sequences, TokenMask
from torchrl_llm_kl.service._errors import (
    ServiceClosedError,
    ServiceError,
    ServiceOverloaded,
    ServiceTimeout,
    VersionPending,
)
from torchrl_llm_kl.service._messages import ANSWERED, PROTOCOL, Message, Reply, scores_of

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from ray.serve.handle import DeploymentHandle, DeploymentResponse
    from typing_extensions import Unpack

    from torchrl_llm_kl.service._replica import ReplicaState

_LOOK = 2.0  # seconds without an answer after which a client checks that the service still exists
_PAUSE = 0.1  # seconds before a call is repeated
_THREADS = ThreadPoolExecutor(256, thread_name_prefix="scores")  # for awaited calls
_PROCESS = uuid.uuid4().hex[:8]  # names this process among the callers, together with the process id
T = TypeVar("T")


# ------------------------------------------------------------------ the connection


class Connection:
    """One client's connection to a service: Serve's handle and the keeper. Thread-safe.

    It looks up the handle on first use, and again after ``ray.shutdown()``.

    Attributes:
        name: of the application.
        service: the id of the service, or empty for the service that has the name now.
        address: of the Ray cluster, for processes that have not joined one.
        newest: latest version of the weights that this client has seen.
    """

    _forked: ClassVar[bool] = False  # whether only the parent process is connected to Ray

    def __init__(self, name: str, service: str = "", address: str | None = None) -> None:
        self.name, self.service, self.address = name, service, address
        self.newest = 0
        self._lock = threading.RLock()
        self._worker, self._closed = "", ""
        self._handle: DeploymentHandle | None = None
        self._release: weakref.finalize[..., Connection] | None = None

    def __reduce__(self) -> tuple[type[Connection], tuple[str, str, str | None]]:
        return Connection, (self.name, self.service, self.address)

    def connect(self) -> DeploymentHandle:
        """Joins a cluster if this process is not part of one, then finds the application."""
        if Connection._forked:
            raise ServiceError(
                f"process {os.getpid()} was forked from a process that was connected to Ray. The connection does not survive a "
                "fork. Start the process with multiprocessing's 'spawn' or 'forkserver' method."
            )
        if self._closed:
            raise ServiceClosedError(self._closed)
        ray = import_ray()
        with self._lock:
            # After ray.shutdown() this process is another worker.
            known = self._handle if ray.is_initialized() else None
            if known is not None and self._worker == ray.get_runtime_context().get_worker_id():
                return known
            if not ray.is_initialized():
                ray.init(self.address, log_to_driver=False)
            context = ray.get_runtime_context()
            self.address = context.gcs_address
            try:
                handle: DeploymentHandle = ray.serve.get_app_handle(self.name)
            except ray.serve.exceptions.RayServeException as error:
                raise self.gone() from error
            self._worker, self._handle = context.get_worker_id(), handle
            return handle

    def gone(self) -> ServiceClosedError:
        """Builds the error for a service that does not exist."""
        return ServiceClosedError(f"there is no service {self.name!r}: it was shut down, or its last driver ended.")

    def hold(self, keeper: ActorHandle) -> None:
        """Keeps the service until this object is closed or freed, or its process ends."""
        if self._release is not None:
            self._release()
        client = uuid.uuid4().hex
        # This process owns the call, so Ray tells the keeper when the process ends.
        held = keeper.hold.remote(client)
        keeper.watch.remote(client, [held])
        self._release = weakref.finalize(self, _cancel, held)
        self._release.atexit = False  # the end of the process cancels the call too

    def close(self, why: str) -> None:
        """Stops using the service. Later calls raise :class:`ServiceClosedError` with this text."""
        self._closed = self._closed or why
        if self._release is not None:
            self._release()

    def keeper(self) -> ActorHandle:
        """The actor that keeps the weights."""
        from torchrl_llm_kl.service._keeper import keeper_of

        self.connect()
        try:
            return keeper_of(self.name)
        except ValueError:
            raise self.gone() from None

    def check_open(self) -> None:
        """Raises a :class:`ServiceClosedError` if the service has ended."""
        import ray

        from torchrl_llm_kl.service._keeper import is_deployed

        try:
            is_open = not ray.get(self.keeper().state.remote(), timeout=_LOOK).ended
        except ServiceClosedError:
            # Serve's own commands deploy without a keeper. The first replica that starts creates it.
            is_open = not self._closed and is_deployed(self.name)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):  # the keeper restarts
            is_open = True
        if not is_open:
            raise self.gone()

    def saw(self, version: int) -> None:
        """Notes a version of the weights."""
        with self._lock:
            # A plain int: to unpickle a PushedVersion, the keeper would import torch, which takes seconds.
            self.newest = max(self.newest, index(version))

    def send(self, method: str, *args: object) -> DeploymentResponse:
        """Calls a method of any replica. Returns Serve's response."""
        response: DeploymentResponse = getattr(self.connect(), method).remote(*args)
        return response

    def receive(
        self, response: DeploymentResponse, again: Callable[[int], DeploymentResponse], deadline: Deadline
    ) -> Any:
        """Waits for an answer, and repeats the call when its replica ends. Raises an answer that is an error.

        Args:
            response: the result of :meth:`send`.
            again: sends the call again. Its argument is the number of replicas that ended while they held the call.
            deadline: of the answer.
        """
        from ray import exceptions, serve

        tries = 0
        while True:
            try:
                answer = response.result(timeout_s=min(deadline.left, _LOOK))
            except serve.exceptions.BackPressureError as error:
                raise ServiceOverloaded(
                    f"{deadline.what}: this process has max_queued_requests waiting calls ({error.message}) Add replicas, or "
                    "send fewer calls at a time."
                ) from error
            except serve.exceptions.DeploymentUnavailableError as error:
                self.check_open()
                raise ServiceError(f"{deadline.what}: the application failed: {error.message}") from error
            except TimeoutError:
                self.check_open()
                if deadline.left <= 0:
                    raise deadline.over() from None
                continue
            except (
                exceptions.RayActorError,
                exceptions.WorkerCrashedError,
                exceptions.ObjectLostError,
                exceptions.OutOfMemoryError,  # Ray's memory monitor killed the replica
                exceptions.NodeDiedError,
            ) as error:
                self.check_open()
                why: Exception = error
                tries += 1
            else:
                if isinstance(answer, Exception) and not isinstance(answer, VersionPending):
                    raise answer
                if not isinstance(answer, Exception):
                    return answer
                why = answer
            if deadline.left <= _PAUSE:
                raise deadline.over(why) from why
            time.sleep(_PAUSE)
            response = again(tries)

    def call(self, method: str, *args: object, timeout: float) -> Any:
        """Calls a method of any replica, and waits for the answer."""
        deadline = Deadline(timeout, f"{method}() of the service {self.name!r}")
        return outside_loop(
            lambda: self.receive(self.send(method, *args), lambda tries: self.send(method, *args), deadline)
        )

    def broadcast(self, method: str, *args: object, timeout: float) -> list[ReplicaState | Exception]:
        """Calls a method of each running replica. The result has an exception for a replica that does not answer in time."""
        from ray.serve.exceptions import DeploymentUnavailableError

        response = self.connect().broadcast(method, *args)
        try:
            return outside_loop(lambda: list(response.results(timeout_s=timeout, return_exceptions=True)))
        except (TimeoutError, DeploymentUnavailableError) as error:  # late answers, or no running replica
            return [error]


class Deadline:
    """The time by which something must be done, and its description for the error."""

    def __init__(self, timeout: float, what: str) -> None:
        check_range(above=0, timeout=timeout)  # NaN would never end
        self.timeout, self.what = timeout, what
        self._end = time.monotonic() + timeout

    @property
    def left(self) -> float:
        """Seconds, at least 0."""
        return max(self._end - time.monotonic(), 0.0)

    def over(self, why: object = None) -> ServiceTimeout:
        """Builds the error of a missed deadline."""
        reason = "" if why is None else f": {why}"
        return ServiceTimeout(
            f"{self.what} took more than {self.timeout:g} s{reason}. Raise timeout=, or add replicas."
        )


def outside_loop(wait: Callable[[], T]) -> T:
    """Runs ``wait``, in another thread if this one runs an event loop, where Serve refuses to wait."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return wait()
    with ThreadPoolExecutor(1, thread_name_prefix="scores") as pool:
        return pool.submit(wait).result()


def import_ray() -> ModuleType:
    """Imports Ray. Raises an ImportError that says how to install it."""
    try:
        import ray
        import ray.serve
    except ImportError as error:
        raise ImportError(f"a service needs Ray Serve: {install_hint('ray')}.") from error
    return ray


def _cancel(held: object) -> None:
    """Cancels the call that a driver holds, in a thread: garbage collection may run this at any place."""
    import ray

    if ray.is_initialized():
        threading.Thread(target=ray.cancel, args=(held,), name="release", daemon=True).start()


def _after_fork() -> None:
    """Notes in a forked child whether its parent was connected. Ray would claim to be connected, and every call would hang."""
    ray = sys.modules.get("ray")
    Connection._forked = ray is not None and ray.is_initialized()


os.register_at_fork(after_in_child=_after_fork)


# ------------------------------------------------------------------ the proxies


class RemoteModel:
    """Proxy of a service's model, accepted wherever a transform takes a model.

    Small and picklable. It connects on first use: each process finds the application by its name.

    Args:
        name: of the service.

    Keyword Args:
        timeout: seconds per call, retries included.
    """

    log_probs_only = True  # no distributions: see check_distributions
    replays = True  # scores over recorded tokens: see check_replays
    #: Larger calls, in numbers, are sent in parts of about this size, so that small calls of others come between them.
    part_size = 8192

    def __init__(self, name: str, *, timeout: float = 120.0) -> None:
        self.timeout = timeout
        self.connection = Connection(name)
        self._version: int | None = None

    @property
    def name(self) -> str:
        """The name of the service."""
        return self.connection.name

    @property
    def version(self) -> int | None:
        """The version of the weights that calls require, or None for the replica's current one.

        A call waits for a version that was not pushed yet, and raises :class:`WeightVersionError` for an earlier one.
        """
        return self._version

    @version.setter
    def version(self, version: int | None) -> None:
        self._version = None if version is None else index(version)

    @property
    def interface(self) -> ModelInterface:
        """Keys and tokenizer of the model. They are requested once."""
        return self._interface[0]

    @property
    def log_probs_key(self) -> object:
        """The key of the TorchRL wrapper. Raises an AttributeError if the model is not a wrapper."""
        return self._wrapper("log_probs_key").log_probs_key

    @property
    def pad_output(self) -> bool:
        """Whether the TorchRL wrapper pads. Raises an AttributeError if the model is not a wrapper."""
        return bool(self._wrapper("pad_output").pad_output)

    @cached_property
    def _interface(self) -> tuple[ModelInterface, bool]:
        described: tuple[ModelInterface, bool] = self.call("interface")
        return described

    def _wrapper(self, name: str) -> ModelInterface:
        interface, is_wrapper = self._interface
        if not is_wrapper:
            raise AttributeError(f"the model of {self!r} is not a TorchRL wrapper, and has no {name}.")
        return interface

    def make_scorer(self, options: ScoreOptions | None = None, **changes: Unpack[Changes]) -> RemoteScorer:
        """Makes a scorer with these options. The service's own ``memory`` sizes the cache, and 0 here turns it off."""
        return RemoteScorer(self, (options or ScoreOptions()).but(**changes))

    def fingerprint(self) -> tuple[int, str] | None:
        """Returns version and fingerprint of the weights of a replica, or None if calls require another version.

        See :func:`~torchrl_llm_kl.scoring.fingerprint_of`. The replica reads all weights at the first call, and at the first
        one after each push.
        """
        version, fingerprint = self.call("fingerprint")
        self.connection.saw(version)
        old = version < self.connection.newest or self._version not in (None, version)
        return None if old else (version, fingerprint)

    def call(self, method: str, *args: object) -> Any:
        """Calls a method of any replica, with retries until the timeout."""
        return self.connection.call(method, *args, timeout=self.timeout)

    def close(self) -> None:
        """Stops using the service through this object."""
        self.connection.close(f"{self!r} was closed.")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


class RemoteScorer(Scorer):
    """Scores on a service.

    Each of the ``top_k`` tokens takes 8 bytes of the reply. Their log-probs and the log-prob of the rest are float32 for any
    model. Each recorded token that was ``kept`` takes 4 bytes of the request. Calls raise a :class:`ServiceError` if the
    service does not answer.

    Args:
        model: the service.
        options: how to score. A ``memory`` of 0 allows no cache.
    """

    path = "remote"
    offers = ANSWERED
    place = "a service"
    instead = (
        "it sends scores of single tokens. Score the transformers model in this process, with a LogProbScorer, or compare "
        "distributions by their most probable tokens, top_k="
    )
    __slots__ = ("model",)  # other attributes would have no effect, so they cannot be set
    model: RemoteModel

    def __init__(self, model: RemoteModel, options: ScoreOptions) -> None:
        self.model, self.options = model, options

    def run(
        self, request: ScoreRequest, options: ScoreOptions | None = None, *, reference: Scorer | None = None
    ) -> Scores:
        """See :meth:`Scorer.run`."""
        return self.begin(request, options, reference=reference)()

    async def ascore(self, sequences: Sequences, mask: TokenMask | None = None, **changes: Unpack[Changes]) -> Ragged:
        """Does the work of :meth:`score` without blocking an event loop. See :meth:`arun`."""
        return (await self.arun(ScoreRequest.of(sequences, mask), self.options.but(**changes))).log_prob

    async def arun(self, request: ScoreRequest, options: ScoreOptions | None = None) -> Scores:
        """Does the work of :meth:`run` without blocking an event loop. Cancelling it withdraws the requests.

        It takes one of up to 256 threads of this process.

        Example:
            >>> async def both(scorer, a, b):
            ...     return await asyncio.gather(scorer.ascore(a), scorer.ascore(b, temperature=0.5))
        """
        self.model.connection.connect()  # raises in a forked child, where submitted calls would never run
        begun = _THREADS.submit(self.begin, request, options)
        try:
            exchange = await asyncio.wrap_future(begun)
            return await asyncio.wrap_future(_THREADS.submit(exchange))
        except asyncio.CancelledError:
            begun.add_done_callback(_withdraw)
            raise

    def begin(
        self, request: ScoreRequest, options: ScoreOptions | None = None, *, reference: Scorer | None = None
    ) -> Exchange:
        """Sends the request. The result is a function that waits for the scores of :meth:`run`."""
        options = self.options if options is None else options
        self.check(options, request, reference=reference)
        # Connect first, which raises in a forked child: there torch would hang, since its threads do not run.
        self.model.connection.connect()
        if options.remember and not options.memory:
            options = options.but(remember=False)
        return Exchange(self.model, cut(request, self.model.part_size), request, options)


class Exchange:
    """One call of a scorer, sent in parts. Calling it waits for the scores, all from the same version of the weights."""

    def __init__(
        self, model: RemoteModel, parts: list[ScoreRequest], request: ScoreRequest, options: ScoreOptions
    ) -> None:
        self._model, self._parts, self._request, self._options = model, parts, request, options
        self._id = uuid.uuid4().hex
        self._sent: dict[int, DeploymentResponse] = {}
        for i in range(len(parts)):
            self._send(i)

    def _send(self, i: int, tries: int = 0) -> DeploymentResponse:
        connection = self._model.connection
        message = Message(
            protocol=PROTOCOL,
            service=connection.service,
            id=f"{self._id}/{i}",
            arrays=self._parts[i].to_arrays(),
            options=self._options.to_dict(),
            version=self._model.version,
            newest=connection.newest,
            caller=f"{_PROCESS}-{os.getpid()}/{threading.get_ident()}",
            tries=tries,
        )
        self._sent[i] = connection.send("score", message)
        return self._sent[i]

    def __call__(self) -> Scores:
        """Waits for the scores. Raises the error of a request."""
        return outside_loop(self._wait)

    def _wait(self) -> Scores:
        deadline = Deadline(self._model.timeout, f"scoring on {self._model.name!r}")
        replies: dict[int, Reply] = {}
        try:
            while True:
                for i in range(len(self._parts)):
                    if i not in replies:
                        replies[i] = self._model.connection.receive(self._sent[i], partial(self._send, i), deadline)
                newest = max(reply["version"] for reply in replies.values())
                self._model.connection.saw(newest)
                stale = [i for i, reply in replies.items() if reply["version"] < newest]
                if not stale:
                    return scores_of([replies[i] for i in range(len(self._parts))], self._request)
                for i in stale:  # weights were pushed between the parts
                    del replies[i]
                    self._send(i)
        except BaseException as error:  # also when the user interrupts
            self.cancel()
            if not isinstance(error, ValueError) or isinstance(error, ServiceError) or len(self._parts) == 1:
                raise
        # The error of a part counts the sequences of that part only. One replica checks the whole request for the right count.
        return Exchange(self._model, [self._request], self._request, self._options)()

    def cancel(self) -> None:
        """Withdraws the requests, so that no replica scores those that still wait there."""
        for response in self._sent.values():
            with contextlib.suppress(Exception):  # Serve raises the error of a call that has failed already
                response.cancel()


def cut(request: ScoreRequest, limit: int) -> list[ScoreRequest]:
    """Cuts a request into parts of whole sequences, of about ``limit`` numbers each. Neighbours stay together."""
    sizes = request.sizes()
    if int(sizes.sum()) <= limit:
        return [request]
    place = (sizes.cumsum(0) - sizes) // limit
    return [request.select((place == part).nonzero().squeeze(-1)) for part in torch.unique_consecutive(place).tolist()]


def _withdraw(begun: Future[Exchange]) -> None:
    """Cancels a call whose caller has stopped waiting."""
    if not begun.cancelled() and begun.exception() is None:
        begun.result().cancel()
